"""`ckpt-core simulate`: what it answers."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckpt_core.cli.exported import check_outside
from ckpt_core.cli.simulate_request import SimulateRequest
from ckpt_core.cli.simulating_input import check_request, loads_of, read_trace, seconds, study_of
from ckpt_core.cli.simulating_output import (
    in_words,
    paper_table,
    point_row,
    points_table,
    schedule_table,
    study_text,
)
from ckpt_core.cli.simulating_plot import plot_points
from ckpt_core.cli.text import note, say, say_json, say_rich
from ckpt_core.observe import check_plot
from ckpt_core.simulate import Study, Trace, compare, mean_completion_s, run_study
from ckpt_core.system.replacing import replaced
from ckpt_core.units import time_text


def run_simulation(request: SimulateRequest) -> bool:
    """Carry out what is asked.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
    """
    check_request(request)
    if request.plot is not None:
        check_plot(request.plot)
    for path in filter(None, (request.csv_file, request.plot)):
        check_outside(Path(os.path.realpath(path)))
    if request.paper is not None:
        _paper(request)
    elif request.jobs is not None:
        _schedule(request)
    else:
        _study(request)
    return True


def _study(request: SimulateRequest) -> None:
    study = study_of(request)
    points = run_study(study)
    rows = [point_row(point, study) for point in points]
    if request.json:
        say_json({**_settings(study), "points": rows})
    else:
        for line in (*in_words(points, study), ""):
            say(line)
        say_rich(study_text(study), points_table(points, study))
    if study.trace is not None and max(p.wall_s for p in points) > study.trace.duration_s:
        end = time_text(study.trace.duration_s)
        note(f"the trace ends after {end}, and runs that take longer meet no more failures then")
    _write_csv(request.csv_file, rows)
    if request.plot is not None:
        plot_points(points, study, request.plot)


def _settings(study: Study) -> dict[str, Any]:
    job, rates = study.setting.job, study.setting.rates
    return {
        "job": asdict(job),
        "rates": asdict(rates),
        "in_flight": study.setting.in_flight,
        "goal": asdict(study.goal),
        "restart_s": study.restart_s,
        "survives": study.survives.value,
        "levels": [[asdict(level) for level in levels] for levels in study.levels],
        "kinds": dict(study.kinds),
        "runs": study.runs,
        "seed": study.seed,
    }


def _schedule(request: SimulateRequest) -> None:
    round_s = seconds(request.round, field="round")
    seeds = range(request.seed, request.seed + request.runs)
    rows = [
        {
            "strategy": strategy.value,
            "save_s": load.switches[0][0],
            "load_s": load.switches[0][1],
            "mean_completion_s": mean_completion_s(
                load, machines=request.machines, round_s=round_s, seeds=seeds
            ),
        }
        for strategy, load in loads_of(request)
    ]
    if request.json:
        say_json(
            {"jobs": request.jobs, "machines": request.machines, "round_s": round_s, "rows": rows}
        )
    else:
        say_rich(schedule_table(rows))
    _write_csv(request.csv_file, rows)


def _paper(request: SimulateRequest) -> None:
    found = compare(request.paper or "", _trace(request))
    rows = [{**asdict(row), "ratio": row.ratio} for row in found]
    if request.json:
        say_json({"paper": request.paper, "rows": rows})
    else:
        say_rich(paper_table(found))
    _write_csv(request.csv_file, rows)


def _trace(request: SimulateRequest) -> Trace | None:
    return None if request.trace is None else read_trace(request.trace)


def _write_csv(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    if path is None:
        return
    with replaced(path) as fresh, fresh.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
