"""`ckpt-core bench`: measure this engine beside others. Thin: everything happens in `ckpt_core.bench`."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from ckpt_core.bench import Report, Settings

Choice = TypeVar("Choice", bound=StrEnum)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for: one field for each option, empty where nothing was given."""

    suite: Annotated[
        str, typer.Option(metavar="[core]", help="Which contenders and workloads.")
    ] = "core"
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Small sizes and few rounds, whatever is given: only a trial."
        ),
    ] = False
    root: Annotated[
        Path | None, typer.Option(help="Directory on the disk to measure; default: this one.")
    ] = None
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this file.")] = None
    state_bytes: Annotated[str, typer.Option(help="Size of the state, such as 2GiB.")] = "768MiB"
    leaves: Annotated[int, typer.Option(help="Tensors in the state.")] = 384
    rounds: Annotated[int, typer.Option(help="Turns of each contender.")] = 5
    interval: Annotated[
        list[int] | None, typer.Option(help="Steps between saves in training; repeatable.")
    ] = None
    contender: Annotated[
        list[str] | None, typer.Option(help="Only this contender; repeatable.")
    ] = None
    measure: Annotated[
        list[str] | None,
        typer.Option(metavar="[save|restore|leaves|train]", help="Only this; repeatable."),
    ] = None
    staging_bytes: Annotated[
        str | None, typer.Option(help="Bound of our staging memory; default: the engine's.")
    ] = None
    seed: Annotated[int, typer.Option(help="Of the order of turns.")] = 0


def bench(**options: Any) -> None:
    """Measure persist, stall, restore, memory and training slowdown beside other checkpointers.

    Writes into a new directory below --root and removes it at the end. Ends with 1 when this engine
    failed, or when anyone's restored bytes were not the saved ones.
    """
    from rich.console import Console

    from ckpt_core.bench import Suite, run
    from ckpt_core.errors import ConfigError

    request = Request(**options)
    try:
        suite = _choice(Suite, request.suite, "suite")
        _check_outputs(request)
        settings = _settings(request)
        with Console(stderr=True).status("starting") as status:
            report = run(settings, suite=suite, notify=status.update)
        _write(report, request)
    except ConfigError as exc:
        raise typer.BadParameter(str(exc)) from exc
    if not report.sound:
        raise typer.Exit(1)


# typer reads a command's options from its signature; they are the fields of the request.
bench.__signature__ = inspect.signature(Request, eval_str=True).replace(  # type: ignore[attr-defined]
    return_annotation=None
)


def _settings(request: Request) -> Settings:
    """The settings of a run; what was not given keeps its default.

    Raises:
        ConfigError: a size, a name or a number is wrong.
    """
    from ckpt_core.bench import Measure, Settings
    from ckpt_core.types import parse_bytes

    given: dict[str, Any] = {
        "intervals": tuple(request.interval or ()),
        "contenders": tuple(request.contender or ()),
        "measures": tuple(_choice(Measure, name, "measure") for name in request.measure or ()),
    }
    if request.staging_bytes is not None:
        given["staging_bytes"] = parse_bytes(request.staging_bytes, field="staging_bytes")
    settings = Settings(
        root=request.root or Path.cwd(),
        state_bytes=parse_bytes(request.state_bytes, field="state_bytes"),
        leaves=request.leaves,
        rounds=request.rounds,
        seed=request.seed,
        **{name: value for name, value in given.items() if value},
    )
    return settings.quick() if request.quick else settings


def _choice(kind: type[Choice], value: str, option: str) -> Choice:
    from ckpt_core.errors import ConfigError

    try:
        return kind(value)
    except ValueError as exc:
        raise ConfigError(f"--{option} {value}: choose of {', '.join(kind)}") from exc


def _check_outputs(request: Request) -> None:
    """Find out before the run, not after it, that its results cannot be written."""
    from ckpt_core.bench import check_plot
    from ckpt_core.errors import ConfigError

    for path in filter(None, (request.json_file, request.plot)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{str(path)!r} cannot be written: its directory does not exist")
    if request.plot is not None:
        check_plot(request.plot)


def _write(report: Report, request: Request) -> None:
    """The tables on standard output, and the files that were asked for."""
    from rich.console import Console

    from ckpt_core.bench import plot, render

    Console().print(render(report))
    if request.json_file is not None:
        request.json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if request.plot is not None:
        plot(report, request.plot)
