"""`ckpt-core bench`: measure this engine beside others. Thin: everything happens in `ckpt_core.bench`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ckpt_core.cli.local_paths import request_of, signature_of
from ckpt_core.cli.meanwhile import meanwhile
from ckpt_core.cli.requests import NoProgress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ckpt_core.bench import AnySettings, Report

_WIDEST = 1000
"""Characters of a line in a file; more are wrapped."""

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for: one field for each option, empty where nothing was given."""

    suite: Annotated[
        str,
        typer.Option(
            metavar="[core|ranks|lightning|lightning-fsdp|lightning-deepspeed|transformers|deepspeed|horovod|"
            "policy|papers|device|levels]",
            help="core: one process beside other checkpointers. ranks: several that save together. "
            "lightning, transformers, deepspeed, horovod: the ways to save under these. "
            "lightning-fsdp, lightning-deepspeed: under these strategies, on two ranks. "
            "policy: Auto, beside a second job. papers: figures of the papers. "
            "device: a GPU or the like, beside raw copies. levels: agents, a store on loopback, memory.",
        ),
    ] = "core"
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Small sizes and few rounds, whatever is given: only a trial."
        ),
    ] = False
    root: Annotated[
        Path | None,
        typer.Option(
            help="Directory on the disk to measure; default: this one; device: /dev/shm with room."
        ),
    ] = None
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this file.")] = None
    headline: Annotated[
        Path | None,
        typer.Option(
            help="Draw stall and durable GB/s of four contenders into this file, and print the same as "
            "Markdown (suite core)."
        ),
    ] = None
    from_file: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Measure nothing: show and draw what --json has written, of any suite."
        ),
    ] = None
    state_bytes: Annotated[
        str | None,
        typer.Option(
            help="Size of the state, such as 2GiB; default: 768MiB; ranks: 192MiB; horovod: 200MB; "
            "deepspeed: 64MB; policy: 128MB; papers: 200MB; device: 10GB."
        ),
    ] = None
    ranks: Annotated[
        list[int] | None,
        typer.Option(help="Processes that save together (suite ranks); repeatable."),
    ] = None
    leaves: Annotated[
        int | None,
        typer.Option(
            help="Tensors in the state; default: 384; papers: 160. "
            "lightning, transformers, deepspeed, horovod, policy have a model's."
        ),
    ] = None
    rounds: Annotated[int, typer.Option(help="Turns of each contender.")] = 5
    interval: Annotated[
        list[int] | None, typer.Option(help="Steps between saves in training; repeatable.")
    ] = None
    contender: Annotated[
        list[str] | None, typer.Option(help="Only this contender; repeatable.")
    ] = None
    measure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this; repeatable. core has save, restore, leaves, train, still, start; "
            "ranks save, train, plan, messages; lightning, transformers save, train, resume; "
            "deepspeed save, train; horovod train; "
            "policy overhead, decision; papers throughput, persist, in_flight, writers, memory, "
            "intervals, separated, breakdown; device copy, first, read, train, restore; "
            "levels train, upload, back, memory, peers, parity.",
        ),
    ] = None
    max_overhead: Annotated[
        float | None,
        typer.Option(
            help="Bound that Auto is given (suite policy), or of table I (papers); default: 0.05."
        ),
    ] = None
    staging_bytes: Annotated[
        str | None, typer.Option(help="Bound of our staging memory; default: the engine's.")
    ] = None
    iteration_s: Annotated[
        float | None,
        typer.Option(
            "--iteration-s", help="Iteration of the stand-in (suite papers); default: 0.01."
        ),
    ] = None
    memory_root: Annotated[
        Path | None,
        typer.Option(help="On a filesystem in memory (suites papers, levels); default: /dev/shm."),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Write each figure as PNG and CSV, and tables.md (suite papers)."),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(help="Such as cuda:1 (suite device); default: the current one; cpu: a trial."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the order of turns.")] = 0
    no_progress: NoProgress = False


def bench(**options: Any) -> None:
    """Measure this engine beside other checkpointers.

    Or several ranks that save together.

    Writes into a new directory below --root and removes it at the end. Ends with 1 when this engine
    failed, or when anyone's restored bytes were not the saved ones.
    """
    from rich.console import Console

    from ckpt_core.bench import run, suite_of
    from ckpt_core.errors import ConfigError

    request = request_of(Request, options)
    try:
        _check_outputs(request)
        if request.from_file is not None:
            _write(_read(request.from_file), request)
            return
        settings = _settings(request, suite_of(request.suite))
        console = Console(stderr=True)
        with meanwhile(console, shown=not request.no_progress) as tell:
            report = run(settings, notify=tell, known=partial(_keep, request, console))
        _write(report, request)
    except ConfigError as exc:
        raise typer.BadParameter(str(exc)) from exc
    if not report.sound:
        raise typer.Exit(1)


# typer reads a command's options from its signature; they are the fields of the request.
bench.__signature__ = signature_of(Request)  # type: ignore[attr-defined]


_REFUSED = {
    ("interval", "policy"): "Auto finds it",
    ("interval", "device"): "it saves every 10th step",
    ("interval", "levels"): "it saves every 5th step",
    ("staging_bytes", "levels"): "its saves have the engine's",
    ("staging_bytes", "papers"): "its presets say it",
    ("leaves", "device"): "it has three sizes of them",
} | {
    ("leaves", suite): "they are those of its model"
    for suite in (
        *("lightning", "lightning-fsdp", "lightning-deepspeed", "transformers"),
        *("deepspeed", "horovod", "policy"),
    )
}
"""Option and suite that do not go together -> why."""

_ONLY = {
    "ranks": ("ranks",),
    "max_overhead": ("policy", "papers"),
    "iteration_s": ("papers",),
    "memory_root": ("papers", "levels"),
    "out": ("papers",),
    "device": ("device",),
}
"""Option -> the suites that have it."""


def _settings(request: Request, suite: Any) -> AnySettings:
    """The settings of a run; what was not given keeps its default.

    Raises:
        ConfigError: a size, a name or a number is wrong, or of another suite.
    """
    _check_suite(request, suite.name)
    kind = suite.settings.kind()
    given: dict[str, Any] = {
        "intervals": tuple(request.interval or ()),
        "contenders": tuple(request.contender or ()),
        "measures": tuple(_choice(kind, name, "measure") for name in request.measure or ()),
        "world_sizes": tuple(request.ranks or ()),
        "leaves": request.leaves,
        "max_overhead": request.max_overhead,
        "iteration_s": request.iteration_s,
        "memory_root": request.memory_root,
        "device": request.device,
        "state_bytes": _size(request.state_bytes, "state_bytes"),
        "staging_bytes": _size(request.staging_bytes, "staging_bytes"),
    }
    settings: AnySettings = suite.settings(
        root=request.root or suite.settings.default_root(),
        rounds=request.rounds,
        seed=request.seed,
        **{name: value for name, value in given.items() if value not in (None, ())},
    )
    return settings.quick() if request.quick else settings


def _check_suite(request: Request, suite: str) -> None:
    """Raise for an option that this suite does not have.

    Raises:
        ConfigError: names it, and where it belongs.
    """
    from ckpt_core.errors import ConfigError

    for (name, of), why in _REFUSED.items():
        if of == suite and getattr(request, name) not in (None, []):
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --suite {suite}: {why}")
    for name, suites in _ONLY.items():
        if getattr(request, name) not in (None, []) and suite not in suites:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} goes with --suite {' or '.join(suites)}")


def _size(text: str | None, field: str) -> int | None:
    from ckpt_core.units import parse_bytes

    return None if text is None else parse_bytes(text, field=field)


def _choice(kind: type[Choice], value: str, option: str) -> Choice:
    from ckpt_core.errors import ConfigError

    try:
        return kind(value)
    except ValueError as exc:
        raise ConfigError(f"--{option} {value}: choose of {', '.join(kind)}") from exc


def _check_outputs(request: Request) -> None:
    """Find out before the run, not after it, that its results cannot be written."""
    from ckpt_core.cli.exported import check_outside
    from ckpt_core.errors import ConfigError
    from ckpt_core.observe import check_plot

    for path in filter(None, (request.json_file, request.plot, request.headline, request.out)):
        # Into --out is written, so that it may not be a step itself.
        check_outside(Path(os.path.realpath(path)) / ("figure.png" if path is request.out else ""))
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{str(path)!r} cannot be written: its directory does not exist")
    for picture in (request.plot, request.headline, request.out and request.out / "figure.png"):
        if picture is not None:
            check_plot(picture)
    if request.out is not None and request.out.exists() and not request.out.is_dir():
        raise ConfigError(f"--out {str(request.out)!r} is a file: name a directory")


def _read(path: Path) -> Report:
    """The figures of an earlier run.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    from ckpt_core.bench import Report
    from ckpt_core.errors import ConfigError

    try:
        return Report.from_json(json.loads(path.read_text()))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--from {str(path)!r} cannot be read: {exc}") from exc


def _keep(request: Request, console: Console, report: Report, row: str) -> None:
    """A row as soon as it is known, and all figures so far: the run may be cut off."""
    console.print(row, highlight=False, soft_wrap=True)
    _write_json(report, request)


def _write_json(report: Report, request: Request) -> None:
    if request.json_file is not None:
        from ckpt_core.system.replacing import replaced

        with replaced(request.json_file) as file:
            file.write_text(json.dumps(report.to_json(), indent=2) + "\n")


def _console_for(tables: RenderableType) -> Console:
    """Standard output: as wide as the terminal, and where it is none, as wide as what goes there."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    if not console.is_terminal:
        wide = console.options.update_width(_WIDEST)
        console = Console(width=Measurement.get(console, wide, tables).maximum)
    return console


def _write(report: Report, request: Request) -> None:
    """The tables on standard output, and the files that were asked for."""
    from ckpt_core.bench import draw_headline, headline_table, plot, render, write

    console = _console_for(tables := render(report))
    console.print(tables)
    _write_json(report, request)
    if request.plot is not None:
        plot(report, request.plot)
    if request.headline is not None:
        draw_headline(report, request.headline)
        print(*headline_table(report), sep="\n")
    if request.out is not None:
        write(report, request.out)
