"""From the options of `simulate` to what the simulator takes."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from ckpt_core.cli.simulate_request import SimulateRequest
from ckpt_core.errors import ConfigError
from ckpt_core.options import read_shape
from ckpt_core.simulate import (
    FurtherLevel,
    Goal,
    Job,
    Kind,
    Load,
    Measured,
    Rates,
    Redundancy,
    Setting,
    Stops,
    Strategy,
    Study,
    Trace,
    costs_of,
    parse_trace,
    read_bench,
)
from ckpt_core.units import parse_bytes, time_text

_Choice = TypeVar("_Choice", bound=StrEnum)

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SERIAL = 1 / 1.9
"""Of the bandwidth of all writers (PCcheck section 5.3: up to 1.9 times faster than one)."""
_COPY, _NETWORK = 12e9, 1.875e9
_DURATION_S = 7 * 86400.0
_INTERVALS = (1, 10, 25, 50, 100)
_LEVEL = {"every", "seconds", "restore", "survives"}
_KEEPS = {"keeps", "refill"}
_ALONE = {
    "paper": (
        "bench",
        "mtbf",
        "node_mtbf",
        "jobs",
        "iterations",
        "duration",
        "plot",
        "state_bytes",
        "level",
        "survives",
        "kinds",
    ),
    "jobs": (
        "trace",
        "mtbf",
        "node_mtbf",
        "iterations",
        "duration",
        "interval",
        "plot",
        "level",
        "survives",
        "kinds",
    ),
    "trace": ("mtbf", "node_mtbf"),
    "mtbf": ("node_mtbf",),
    "iterations": ("duration",),
}


def check_request(request: SimulateRequest) -> None:
    """Find out before the run what cannot go together, or cannot be written.

    Raises:
        ConfigError: it cannot.
    """
    for one, others in _ALONE.items():
        for other in others:
            if getattr(request, one) is not None and getattr(request, other) is not None:
                raise ConfigError(f"{_option(one)} does not go with {_option(other)}: give one")
    if (request.node_mtbf is None) != (request.nodes is None):
        raise ConfigError("--node-mtbf and --nodes go together: give both")
    for path in filter(None, (request.csv_file, request.plot)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{str(path)!r} cannot be written: its directory does not exist")


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def seconds(text: str, *, field: str) -> float:
    """Seconds from `90`, `1.5h`, `6min` or `30d`.

    Raises:
        ConfigError: it is no time.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", text)
    found = math.inf if match is None else float(match[1]) * _UNITS.get(match[2], math.inf)
    if not math.isfinite(found):
        raise ConfigError(f"{field}={text!r} is not a time: write it like 90s, 6min, 1.5h or 30d")
    return found


def study_of(request: SimulateRequest) -> Study:
    """What the options ask to be run.

    Raises:
        ConfigError: an option is missing or wrong.
    """
    measured = _measured(request)
    trace = None if request.trace is None else read_trace(request.trace)
    return Study(
        setting=_setting(request, measured),
        goal=_goal(request, trace),
        strategies=_strategies(request),
        intervals=_intervals(request),
        longer=request.interval is None,
        mtbfs_s=_mtbfs(request),
        trace=trace,
        stops=_choice(Stops, request.stops, "stops"),
        gpus=request.gpus,
        restart_s=seconds(request.restart or "0", field="restart"),
        seed=request.seed,
        runs=request.runs,
        survives=_choice(Kind, request.survives or _survives(request), "survives"),
        levels=_levels(request.level or [], request.nodes),
        kinds=_kinds(request.kinds),
        nodes=request.nodes or 0,
        stalls={Strategy.OURS: measured.stall_s} if measured and measured.stall_s else {},
    )


def loads_of(request: SimulateRequest) -> Iterator[tuple[Strategy, Load]]:
    """For each strategy the jobs that are scheduled, with what a switch costs them.

    A job that loses its machine is saved to the end before the next one comes.

    Raises:
        ConfigError: an option is missing or wrong.
    """
    setting = _setting(request, _measured(request))
    restart_s = seconds(request.restart or "0", field="restart")
    service_s = seconds(request.job_time, field="job_time")
    if not service_s:
        raise ConfigError(f"job_time={request.job_time!r} must be above 0")
    for strategy in _strategies(request):
        costs = costs_of(strategy, setting)
        behind = (costs.snapshot_s, costs.persist_s)
        save_s = costs.stall_s + (max(behind) if costs.pipelined else sum(behind))
        yield (
            strategy,
            Load(
                tasks=request.jobs or 1,
                mean_service_s=service_s,
                mean_gap_s=seconds(request.job_gap or "0", field="job_gap"),
                switches=((save_s, restart_s + costs.load_s),),
            ),
        )


def read_trace(path: Path) -> Trace:
    """The trace in a file.

    Raises:
        ConfigError: it is none.
        OSError: it cannot be read.
    """
    try:
        return parse_trace(path.read_text().splitlines(), name=str(path))
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{str(path)!r} is not text, so it is no trace") from exc


def _measured(request: SimulateRequest) -> Measured | None:
    if request.bench is None:
        return None
    try:
        report = json.loads(request.bench.read_text())
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{str(request.bench)!r} is not JSON: {exc}") from exc
    if not isinstance(report, dict):
        raise ConfigError(f"{str(request.bench)!r} is not what `ckpt-core bench --json` writes")
    return read_bench(report, name=str(request.bench))


def _setting(request: SimulateRequest, measured: Measured | None) -> Setting:
    state_bytes = _rate(request, "state_bytes", measured.state_bytes if measured else None)
    iteration_s = request.iteration_s
    if iteration_s is None and measured is not None:
        iteration_s = measured.iteration_s
    write = _rate(request, "write_bandwidth", measured.write if measured else None)
    rates = Rates(
        write=write,
        serial=_rate(
            request, "serial_bandwidth", (measured and measured.serial) or write * _SERIAL
        ),
        copy=_rate(request, "copy_bandwidth", (measured and measured.copy) or _COPY),
        read=_rate(request, "read_bandwidth", (measured and measured.read) or write),
        network=_rate(request, "network_bandwidth", _NETWORK),
    )
    if iteration_s is None:
        raise _missing("iteration_s")
    job = Job(iteration_s=iteration_s, state_bytes=state_bytes, update_s=request.update_s or 0.0)
    return Setting(job, rates, request.in_flight)


def _rate(request: SimulateRequest, field: str, default: float | None) -> float:
    text: str | None = getattr(request, field)
    if text is not None:
        return float(parse_bytes(text, field=field))
    if default is None:
        raise _missing(field)
    return default


def _missing(field: str) -> ConfigError:
    return ConfigError(f"{_option(field)} is missing: give it, or --bench FILE, or --paper NAME")


def _goal(request: SimulateRequest, trace: Trace | None) -> Goal:
    if request.iterations is not None:
        return Goal(iterations=request.iterations)
    if request.duration is not None:
        duration_s = seconds(request.duration, field="duration")
        if trace is not None and duration_s > trace.duration_s:
            raise ConfigError(
                f"duration={request.duration!r} is longer than the trace, which ends after "
                f"{time_text(trace.duration_s)}: give no more than that"
            )
        return Goal(duration_s=duration_s)
    return Goal(duration_s=_DURATION_S if trace is None else trace.duration_s)


def _mtbfs(request: SimulateRequest) -> tuple[float, ...]:
    if request.node_mtbf is not None and request.nodes is not None:
        return (seconds(request.node_mtbf, field="node_mtbf") / request.nodes,)
    texts = request.mtbf.split(",") if request.mtbf else []
    return tuple(seconds(text, field="mtbf") for text in texts)


def _strategies(request: SimulateRequest) -> tuple[Strategy, ...]:
    if request.strategy is None:
        return tuple(Strategy)
    names = request.strategy.split(",")
    return tuple(_choice(Strategy, name.strip(), "strategy") for name in names)


def _intervals(request: SimulateRequest) -> tuple[int, ...]:
    if request.interval is None:
        return _INTERVALS
    try:
        return tuple(int(text) for text in request.interval.split(","))
    except ValueError as exc:
        raise ConfigError(
            f"interval={request.interval!r} is not a list of iterations: write it like 10,50,100"
        ) from exc


def _survives(request: SimulateRequest) -> Kind:
    return Kind.PROCESS if request.level else Kind.SITE


def _levels(texts: Sequence[str], nodes: int | None) -> tuple[tuple[FurtherLevel, ...], ...]:
    """Every way to choose one `every` for each level."""
    return tuple(itertools.product(*[_level(text, nodes) for text in texts]))


def _level(text: str, nodes: int | None) -> list[FurtherLevel]:
    given = _pairs(text, "level")
    if missing := _LEVEL - given.keys() or given.keys() - _LEVEL - _KEEPS:
        raise ConfigError(
            f"level={text!r}: {', '.join(sorted(missing))} is missing or unknown: write it like "
            "every=100,seconds=30,restore=40,survives=node"
        )
    redundancy = _redundancy(given, nodes)
    everys = given["every"].split("/")
    if not all(every.isdecimal() for every in everys):
        raise ConfigError(f"every={given['every']!r} is no number of iterations, or several with /")
    return [
        FurtherLevel(
            every=int(every),
            copy_s=seconds(given["seconds"], field="seconds"),
            restore_s=seconds(given["restore"], field="restore"),
            survives=_choice(Kind, given["survives"], "survives"),
            redundancy=redundancy,
        )
        for every in everys
    ]


def _redundancy(given: Mapping[str, str], nodes: int | None) -> Redundancy | None:
    """How nodes keep one another's steps, if they do."""
    if not _KEEPS & given.keys():
        return None
    keeps = given.get("keeps")
    shape = read_shape(keeps)
    if (shape is None and keeps != "copies") or "refill" not in given or nodes is None:
        raise ConfigError(
            "keeps=copies or keeps=4+1 goes with refill=, the time from the loss of a node until another one "
            "has its part and what it kept for others, and with --nodes"
        )
    refill_s = seconds(given["refill"], field="refill")
    if shape is None:
        return Redundancy(nodes=nodes, refill_s=refill_s)
    return Redundancy(nodes=nodes, group=sum(shape), spare=shape[1], refill_s=refill_s)


def _kinds(text: str | None) -> dict[Kind, float]:
    given = _pairs(text, "kinds") if text else {}
    try:
        shares = {_choice(Kind, name, "kinds"): float(share) for name, share in given.items()}
    except ValueError as exc:
        raise ConfigError(f"kinds={text!r}: write it like process=6,node=3,site=1") from exc
    if shares and not (min(shares.values()) >= 0 < sum(shares.values()) < math.inf):
        raise ConfigError(f"kinds={text!r}: shares are numbers, and not all of them 0")
    return shares


def _pairs(text: str, option: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    if not all(value for _, _, value in pairs) or len(set(names)) < len(names):
        raise ConfigError(
            f"{option}={text!r}: write NAME=VALUE, with commas between, each name once"
        )
    return {name: value.strip() for name, (_, _, value) in zip(names, pairs, strict=True)}


def _choice(kind: type[_Choice], value: str, option: str) -> _Choice:
    try:
        return kind(value)
    except ValueError as exc:
        raise ConfigError(f"{option}={value!r} is not known: choose of {', '.join(kind)}") from exc
