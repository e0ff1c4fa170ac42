"""What a command that measures does now: it is not known how far that is, so it is told in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_core.cli.text import note

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str], None]


@contextmanager
def meanwhile(console: Console, *, shown: bool) -> Iterator[Tell]:
    """A function that takes what happens next: a line that changes on a terminal, elsewhere a line for each.

    Args:
        console: standard error; what it prints meanwhile comes above the line.
        shown: False: it does nothing.
    """
    if not shown:
        yield lambda text: None
    elif not console.is_terminal:
        yield note
    else:
        with console.status("starting") as status:
            yield status.update
