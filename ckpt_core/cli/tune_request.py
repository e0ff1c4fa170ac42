"""`ckpt-core tune`: its options. Loaded with every command, so nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ckpt_core.cli.requests import NoProgress


@dataclass(frozen=True)
class TuneRequest:
    """What the command line asks for: one field for each option."""

    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="Your program, with {root} where it saves, and {every} for the steps between saves.",
        ),
    ] = None
    root: Annotated[
        Path | None, typer.Option(help="Directory on the disk to measure; default: this one.")
    ] = None
    model_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Instead of a program: a state of this size.")
    ] = None
    iteration_s: Annotated[
        float | None, typer.Option(help="One iteration of training; of a program it is measured.")
    ] = None
    load: Annotated[
        str,
        typer.Option(
            metavar="[idle|busy]",
            help="Without a program: cores are idle in an iteration, or busy.",
        ),
    ] = "idle"
    device: Annotated[str, typer.Option(help="Without a program: where the state is.")] = "cpu"
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most staging memory; default: a quarter of what is free."
        ),
    ] = None
    max_storage: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most storage; default: nine tenths of what is free."),
    ] = None
    max_overhead: Annotated[
        float, typer.Option(help="Largest part of training time that saves may cost.")
    ] = 0.05
    max_interval: Annotated[
        int | None, typer.Option(help="Largest interval you can live with, in steps.")
    ] = None
    keep_last: Annotated[
        int, typer.Option(help="Committed steps that are kept; a program says so itself.")
    ] = 2
    in_flight: Annotated[list[int] | None, typer.Option(help="Only this number; repeatable.")] = (
        None
    )
    writers: Annotated[list[int] | None, typer.Option(help="Likewise.")] = None
    chunk_bytes: Annotated[list[str] | None, typer.Option(metavar="SIZE", help="Likewise.")] = None
    staging_bytes: Annotated[list[str] | None, typer.Option(metavar="SIZE", help="Likewise.")] = (
        None
    )
    direct_io: Annotated[
        list[str] | None, typer.Option(metavar="[auto|on|off]", help="Likewise.")
    ] = None
    saves: Annotated[int, typer.Option(help="Measured saves in each turn.")] = 5
    rounds: Annotated[int, typer.Option(help="Turns of each finalist.")] = 5
    checks: Annotated[
        int, typer.Option(help="Rounds in which the interval is tried out; 0: it is not.")
    ] = 3
    minutes: Annotated[
        float | None, typer.Option(help="Search no longer than this; the finals come after it.")
    ] = None
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure every candidate, --rounds times.")
    ] = False
    seed: Annotated[int, typer.Option(help="Of the order of turns.")] = 0
    timeout_s: Annotated[
        float, typer.Option(help="Longest time without a sign of life, and of one save.")
    ] = 600.0
    plot: Annotated[Path | None, typer.Option(help="Draw what was measured into this file.")] = None
    no_progress: NoProgress = False
    json: Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")] = False
