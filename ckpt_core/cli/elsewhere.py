"""`export` in the layout of a framework: its integration writes it, found by an entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ckpt_core.cli.exported import check_outside, replacing, with_its_reason
from ckpt_core.cli.places import seen
from ckpt_core.cli.steps import find_step
from ckpt_core.cli.text import say, say_json
from ckpt_core.errors import ConfigError, UntrustedData
from ckpt_core.system import plugins
from ckpt_core.types import parse_step_dir
from ckpt_core.units import size_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import ExportRequest

GROUP = "ckpt_core.export"
"""Entry points, each a `Target`."""


@dataclass(frozen=True, slots=True)
class Target:
    """One layout; made without importing what writes it. One of the two writes is given.

    Attributes:
        name: what `--to` calls it.
        install: how to get what it is written with.
        write_file: writes what a step holds into an empty file; a step as `ckpt_core.load` takes it, a
            directory or a URL. Last, whether objects may be built, which may run code.
        write_directory: makes a directory of this name of it, all of it or nothing.
    """

    name: str
    install: str
    write_file: Callable[[str, IO[bytes], bool], None] | None = None
    write_directory: Callable[[str, Path], None] | None = None


def targets() -> list[str]:
    """Names of all that are installed."""
    return plugins.names(GROUP)


def export_elsewhere(request: ExportRequest) -> bool:
    """Write it and say so; always a success.

    Raises:
        ConfigError: an option is for other layouts, the step was saved by something else, or the file is
            there.
        NotCommitted, CorruptCheckpoint, UnknownFormat, RestoreError: the step cannot be read.
        UntrustedData: it holds objects that may run code.
        OSError: it cannot be written.
    """
    target: Target = plugins.load(GROUP, str(request.to))
    _check(request, target)
    with seen(request.path) as there:
        step = str(find_step(there.path, request.step))
    try:
        with redirect_stdout(sys.stderr):  # some frameworks talk when they are imported
            _write(target, step, request)
    except UntrustedData as exc:
        exc.args = (str(exc).replace("pass trusted=True", "add --trusted"), *exc.args[1:])
        raise
    except ImportError as exc:
        text = f"{exc.name or exc} is not installed, which writes this layout: {target.install}"
        raise ConfigError(f"--to {target.name}: {text}") from exc
    _tell(request, target, step)
    return True


def _check(request: ExportRequest, target: Target) -> None:
    given = {
        "--only": request.only,
        "--prefix": request.prefix,
        "--weights": request.weights,
        "--strip": request.strip,
        "--rank": request.rank is not None,
        "--force": request.force and target.write_file is None,
    }
    for option, value in given.items():
        if value:
            raise ConfigError(
                f"{option}: the layout of {target.name} is written whole; leave it out"
            )
    if request.trusted and target.write_file is None:
        raise ConfigError(
            f"--trusted: the layout of {target.name} has no objects to build; leave it out"
        )


def _write(target: Target, step: str, request: ExportRequest) -> None:
    if target.write_file is None:
        assert target.write_directory is not None
        check_outside(request.file)
        target.write_directory(step, request.file)
        return
    with replacing(request.file, force=request.force) as file, with_its_reason():
        target.write_file(step, file, request.trusted)


def _tell(request: ExportRequest, target: Target, step: str) -> None:
    file = request.file
    files = [file] if file.is_file() else [path for path in file.rglob("*") if path.is_file()]
    nbytes, number = sum(path.stat().st_size for path in files), parse_step_dir(Path(step).name)
    if request.json:
        told = {"path": step, "step": number, "file": str(file)}
        say_json({**told, "format": target.name, "nbytes": nbytes})
        return
    say(f"{file}: step {number}, {size_text(nbytes)}, {target.name}")
