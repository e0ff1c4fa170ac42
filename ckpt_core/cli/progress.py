"""A bar on a terminal that tells how far many bytes are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ckpt_core.cli.text import console

Show = Callable[[str, int, int], None]
"""Told a label, bytes done and bytes in all."""


@contextmanager
def progress_bar() -> Iterator[Show]:
    """A function that draws how far we are; it does nothing where there is no terminal."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda label, done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(label: str, done: int, total: int) -> None:
            if label not in tasks:
                for task in tasks.values():
                    progress.update(task, visible=False)
                tasks[label] = progress.add_task(label)
            progress.update(tasks[label], completed=done, total=total)

        yield show
