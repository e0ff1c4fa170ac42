"""What every command says, and how: sizes, ages, clean names, tables, JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core.units import clean

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_PIPE_COLUMNS = 4000
"""Width where there is no terminal: whoever reads a pipe wants whole lines."""

_GAP_COLUMNS = 3
"""Between two columns of a table."""
_LEAST_COLUMNS = 5
"""Of a column of text, in which a name can be folded."""

_RUNS_SHOWN = 8

_AGES = ((86400 * 2, 86400, "days"), (3600 * 2, 3600, "hours"), (120, 60, "minutes"))


def age_text(seconds: float) -> str:
    """How long ago: `3 minutes ago`; a clock that went back gives `in the future`."""
    if seconds < -60:
        return "in the future"
    for least, unit, name in _AGES:
        if seconds >= least:
            return f"{int(seconds // unit)} {name} ago"
    return f"{max(int(seconds), 0)} s ago"


def ranks_text(ranks: Sequence[int]) -> str:
    """Numbers of ranks, ascending, with neighbours joined: `0-3, 8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    shown = ", ".join(texts[:_RUNS_SHOWN])
    return f"{shown}, ..." if len(texts) > _RUNS_SHOWN else shown


def shorten(text: str, most: int) -> str:
    """At most `most` characters."""
    return text if len(text) <= most else f"{text[: max(most - 3, 0)]}..."


def console(*, stderr: bool = False) -> Console:
    """Where tables go: colours and the width of the terminal if it is one, else whole plain lines."""
    from rich.console import Console

    columns = shutil.get_terminal_size(fallback=(0, 0)).columns
    return Console(
        stderr=stderr,
        width=columns or _PIPE_COLUMNS,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not columns,
    )


def say(text: str) -> None:
    """One line of the command's answer."""
    sys.stdout.write(f"{clean(text)}\n")


def say_wrong(text: str) -> None:
    """A line of the answer that is a finding: red on a terminal."""
    from rich.text import Text

    console().print(Text(clean(text), style="red"), soft_wrap=True)


def note(text: str) -> None:
    """One line about the answer, beside it."""
    sys.stderr.write(f"{clean(text)}\n")


def say_json(value: Any) -> None:
    """The answer of `--json`: one object, ASCII, so that any tool and any terminal can take it."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def say_rich(*parts: RenderableType) -> None:
    """Tables and trees, and texts between them."""
    out = console()
    for part in parts:
        # Where a table does not fit, the terminal folds its lines: a number without its end is another one.
        out.print(part, crop=False)


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    wrong: tuple[str, ...] = (),
) -> Table:
    """A plain table; `right` names the headings of columns of numbers.

    However narrow the terminal is, numbers are whole, and no column of text goes. Rows whose state, in one
    of their cells, begins with one of `wrong` are red on a terminal.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    cells = [[clean(cell) for cell in row] for row in rows]
    least = -_GAP_COLUMNS
    for heading, *column in zip(headings, *cells, strict=True):
        numeric = heading in right
        widest = max(map(cell_len, (heading, *column)))
        least += _GAP_COLUMNS + (widest if numeric else min(widest, _LEAST_COLUMNS))
        made.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric)
    if least > console().width:
        made.width = least
    for row in cells:
        style = "red" if wrong and any(cell.startswith(wrong) for cell in row) else None
        made.add_row(*[Text(cell, overflow="fold") for cell in row], style=style)
    return made
