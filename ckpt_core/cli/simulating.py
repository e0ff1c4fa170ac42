"""`ckpt-core simulate`: what it is asked, and what it answers."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ckpt_core.simulate import Study, Trace

_SIZE = "SIZE"
_TIME = "TIME"


@dataclass(frozen=True, kw_only=True)
class SimulateRequest:
    """`simulate`: one field for each option, None where nothing was given."""

    iteration_s: Annotated[
        float | None, typer.Option(help="Seconds of an iteration without checkpoints.")
    ] = None
    update_s: Annotated[
        float | None,
        typer.Option(
            help="Part of it that changes the state, and waits for snapshots; default: 0."
        ),
    ] = None
    state_bytes: Annotated[
        str | None, typer.Option(metavar=_SIZE, help="What one writer saves: 10GB.")
    ] = None
    write_bandwidth: Annotated[
        str | None,
        typer.Option(metavar=_SIZE, help="To storage each second, with all writers: 2GB."),
    ] = None
    serial_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar=_SIZE, help="Of one thread that serializes and writes; default: 1/1.9 of that."
        ),
    ] = None
    copy_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar=_SIZE, help="From the device to the host; default: 12GB (PCIe 3 x16)."
        ),
    ] = None
    read_bandwidth: Annotated[
        str | None,
        typer.Option(metavar=_SIZE, help="From storage on recovery; default: --write-bandwidth."),
    ] = None
    network_bandwidth: Annotated[
        str | None,
        typer.Option(metavar=_SIZE, help="To another node's memory; default: 1.875GB (15 Gbps)."),
    ] = None
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Sizes and rates that `ckpt-core bench --json FILE` measured."
        ),
    ] = None
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Of torch.save, checkfreq, gpm, gemini, lightcheck, pccheck, ours, "
            "ideal; default: all.",
        ),
    ] = None
    interval: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="Iterations between checkpoints; default: 1,10,25,50,100."
        ),
    ] = None
    in_flight: Annotated[
        int, typer.Option(min=1, help="Checkpoints at a time, of pccheck and ours.")
    ] = 2
    mtbf: Annotated[
        str | None,
        typer.Option(metavar="TIME,TIME", help="Mean time between failures of the job: 6h,1d."),
    ] = None
    node_mtbf: Annotated[
        str | None, typer.Option(metavar=_TIME, help="The same of one node; with --nodes.")
    ] = None
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes, each of which stops the job when it fails.")
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of index, time in seconds, GPUs that were there."),
    ] = None
    stops: Annotated[
        str,
        typer.Option(metavar="[any|loss]", help="Changes of the trace that stop the job."),
    ] = "any"
    gpus: Annotated[
        int, typer.Option(min=0, help="GPUs that the job waits for; 0: it runs with any number.")
    ] = 0
    restart: Annotated[
        str | None,
        typer.Option(metavar=_TIME, help="From a failure until loading begins; default: 0."),
    ] = None
    duration: Annotated[
        str | None, typer.Option(metavar=_TIME, help="Of the run; default: the trace's, or 7d.")
    ] = None
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Run until so many are done: total training time.")
    ] = None
    runs: Annotated[
        int, typer.Option(min=1, help="Runs with different failures; figures are means.")
    ] = 10
    seed: Annotated[int, typer.Option(help="Of the first run's failures.")] = 0
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Instead: preemptive scheduling of so many jobs; average completion time."
        ),
    ] = None
    machines: Annotated[int, typer.Option(min=1, help="That the jobs share.")] = 3
    round: Annotated[
        str, typer.Option(metavar=_TIME, help="From one scheduling decision to the next.")
    ] = "6min"
    job_time: Annotated[
        str, typer.Option(metavar=_TIME, help="Training that a job needs, on average.")
    ] = "1h"
    job_gap: Annotated[
        str | None, typer.Option(metavar=_TIME, help="Between arrivals; default: all at once.")
    ] = None
    paper: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead: a figure of a paper beside ours: pccheck-5.2.3, pccheck-fig8, "
            "pccheck-fig9, pccheck-eq4, lightcheck-table2, lightcheck-fig9, lightcheck-table3.",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")] = False
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write all rows to this file.")
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw goodput, or total time, into this file."),
    ] = None


def run_simulation(request: SimulateRequest) -> bool:
    """Carry out what is asked.

    Raises:
        ConfigError: an option is wrong, or two do not go together.
    """
    from ckpt_core.cli.simulating_input import check_request
    from ckpt_core.observe import check_plot

    check_request(request)
    if request.plot is not None:
        check_plot(request.plot)
    if request.paper is not None:
        _paper(request)
    elif request.jobs is not None:
        _schedule(request)
    else:
        _study(request)
    return True


def _study(request: SimulateRequest) -> None:
    from ckpt_core.cli.simulating_input import study_of
    from ckpt_core.cli.simulating_output import point_row, points_table, study_text
    from ckpt_core.cli.simulating_plot import plot_points
    from ckpt_core.cli.text import say_json, say_rich
    from ckpt_core.simulate import run_study

    study = study_of(request)
    points = run_study(study)
    rows = [point_row(point, study) for point in points]
    if request.json:
        say_json({**_settings(study), "points": rows})
    else:
        say_rich(study_text(study), points_table(points, study))
    _write_csv(request.csv_file, rows)
    if request.plot is not None:
        plot_points(points, study, request.plot)


def _settings(study: Study) -> dict[str, Any]:
    from dataclasses import asdict

    job, rates = study.setting.job, study.setting.rates
    return {
        "job": asdict(job),
        "rates": asdict(rates),
        "in_flight": study.setting.in_flight,
        "goal": asdict(study.goal),
        "restart_s": study.restart_s,
        "runs": study.runs,
        "seed": study.seed,
    }


def _schedule(request: SimulateRequest) -> None:
    from ckpt_core.cli.simulating_input import loads_of, seconds
    from ckpt_core.cli.simulating_output import schedule_table
    from ckpt_core.cli.text import say_json, say_rich
    from ckpt_core.simulate import mean_completion_s

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
    from dataclasses import asdict

    from ckpt_core.cli.simulating_output import paper_table
    from ckpt_core.cli.text import say_json, say_rich
    from ckpt_core.simulate import compare

    found = compare(request.paper or "", _trace(request))
    rows = [{**asdict(row), "ratio": row.ratio} for row in found]
    if request.json:
        say_json({"paper": request.paper, "rows": rows})
    else:
        say_rich(paper_table(found))
    _write_csv(request.csv_file, rows)


def _trace(request: SimulateRequest) -> Trace | None:
    from ckpt_core.cli.simulating_input import read_trace

    return None if request.trace is None else read_trace(request.trace)


def _write_csv(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    if path is None:
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
