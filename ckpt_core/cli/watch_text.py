"""`watch`: a job at one moment in words: rows of a picture, and lines where there is no terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckpt_core.cli.listing import Listing, StepRow, total_text
from ckpt_core.cli.listing_levels import Further, LevelRow
from ckpt_core.cli.text import age_text, shorten, table
from ckpt_core.cli.watched import RankNow, Saved, UnderWay, Watched
from ckpt_core.units import clean, count_text, size_text, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_RECENT = 10
_COMMAND = 60
_FAILURES_SHOWN = 3
_RANKS_SHOWN = 16


class Row(NamedTuple):
    """One row of the picture; `wrong`: red."""

    label: str
    text: str
    wrong: bool = False


def picture(seen: Watched, *, hint: str = "") -> RenderableType:
    """All that is known, for a terminal of any width."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for row in rows(seen):
        grid.add_row(row.label, Text(clean(row.text), style="red" if row.wrong else ""))
    parts: list[RenderableType] = [grid]
    if len(seen.ranks) > 1:
        parts += ["", _rank_table(seen)]
    return Group(*parts, *([Text(hint, style="dim")] if hint else []))


def rows(seen: Watched) -> Iterator[Row]:
    """Everything but the table of ranks."""
    for root in seen.roots:
        yield _writer(root, seen)
    yield _newest(seen)
    yield from _saving(seen)
    first = min(seen.ranks, key=lambda rank: rank.rank, default=None)
    if first is not None:
        yield from _pace(first, seen.ranks)
    for root in seen.roots:
        if root.further is not None:
            yield from _levels(root.further, newest_step(seen), seen.unix_s)
    yield from _failures(seen)
    for problem in seen.problems:
        yield Row("", problem, wrong=True)


def newest_step(seen: Watched) -> int | None:
    """Of all that is committed, as far as is known."""
    steps = [row.step for root in seen.roots for row in root.steps]
    steps += [save.step for save in _committed(seen)] if not seen.roots else []
    return max(steps, default=None)


def saved_text(save: Saved) -> str:
    """What a save was: `480.0 MiB in 0.4 s, 1.2 GiB/s; training waited 12 ms`."""
    text = f"{size_text(save.nbytes)} in {time_text(save.seconds)}"
    if save.seconds > 0:
        text += f", {size_text(save.nbytes / save.seconds)}/s"
    return text if save.waited_s is None else f"{text}; training waited {time_text(save.waited_s)}"


def writer_text(root: Listing) -> str:
    """Who writes to a root."""
    if root.writer is None:
        return f"nobody writes to {root.root}"
    where = root.writer.get("host", "another host")
    return f"pid {root.writer['pid'] or 'unknown'} on {where} writes to {root.root}"


# -- rows --------------------------------------------------------------------------------------


def _writer(root: Listing, seen: Watched) -> Row:
    text = writer_text(root)
    if root.writer is not None:
        command = root.writer.get("command")
        return Row("job", f"{text}: {shorten(command, _COMMAND)}" if command else text)
    begun = sorted({save.step for rank in seen.ranks for save in rank.under_way})
    if begun:
        steps = ", ".join(map(str, begun))
        return Row("job", f"{text}: it ended while step {steps} was being saved", wrong=True)
    return Row("job", text, wrong=not seen.ranks or bool(root.in_flight))


def _newest(seen: Watched) -> Row:
    step = newest_step(seen)
    if step is None:
        unknown = seen.problems and not seen.roots and not seen.ranks
        texts = ["not known" if unknown else "none is committed yet"]
        texts += [_held(root) for root in seen.roots if root.directories]
        return Row("newest step", "; ".join(texts))
    told = [save.unix_s for save in _committed(seen) if save.step == step]
    row = _row_of(seen, step)
    if row is not None and row.created_unix_s is not None:
        told = told or [row.created_unix_s]
    text = f"{step}, {age_text(seen.unix_s - max(told))}" if told else str(step)
    for root in seen.roots:
        text += f"; {_held(root)}"
    problem = None if row is None else row.problem
    return Row(
        "newest step", text if problem is None else f"{text}; {problem}", wrong=bool(problem)
    )


def _held(root: Listing) -> str:
    texts = [count_text(len(root.steps), "step")] if root.steps or not root.directories else []
    texts += [count_text(len(root.directories), "directory of files")] if root.directories else []
    return f"{', '.join(texts)}, {total_text(root)} in the root"


def _row_of(seen: Watched, step: int) -> StepRow | None:
    rows = (row for root in seen.roots for row in root.steps)
    return next((row for row in rows if row.step == step), None)


def _saving(seen: Watched) -> Iterator[Row]:
    """Each step that is under way; what most of its ranks are in is what holds it up."""
    if not seen.ranks:
        begun = [other for root in seen.roots if root.writer for other in root.in_flight]
        texts = [
            f"step {other.step}, begun {age_text(seen.unix_s - other.modified_unix_s)}"
            for other in begun
        ]
        yield Row("saving", "; ".join(texts) or "nothing")
        return
    if seen.roots and all(root.writer is None for root in seen.roots):
        return
    saves = [save for rank in seen.ranks for save in rank.under_way]
    if not saves:
        yield Row("saving", "nothing")
    for step in sorted({save.step for save in saves}):
        mine = [save for save in saves if save.step == step]
        yield Row("saving", _under_way_text(step, mine, seen))


def _under_way_text(step: int, saves: list[UnderWay], seen: Watched) -> str:
    phases = sorted({save.phase for save in saves}, key=["staging", "persist", "commit"].index)
    begin_s = min(save.begin_unix_s for save in saves)
    text = f"step {step}: {', '.join(phases)}"
    before = [save.nbytes for save in _committed(seen) if save.rank == saves[0].rank]
    if before:
        text += f", about {size_text(before[-1])}"
    text += f", {time_text(max(seen.unix_s - begin_s, 0.0))} so far"
    if len(seen.ranks) > 1:
        text += f", on {len(saves)} of {count_text(len(seen.ranks), 'rank')}"
    return text


def _pace(first: RankNow, ranks: Iterable[RankNow]) -> Iterator[Row]:
    if first.every_steps is not None and first.every_s is not None:
        steps = f"every {count_text(first.every_steps, 'step')}"
        yield Row("interval", f"{steps}, {time_text(first.every_s)}")
    worst = max(ranks, key=lambda rank: rank.waited_share or 0.0)
    last = worst.over[-1].waited_s if worst.over else None
    texts = []
    if worst.waited_share is not None:
        texts.append(f"waited {worst.waited_share:.2%} of the time lately")
    if last is not None:
        texts.append(f"{time_text(last)} for the last save")
    if first.iteration_s:
        texts.append(f"an iteration takes {time_text(first.iteration_s)}")
    if first.iteration_s and first.beside_s:
        more = first.beside_s / first.iteration_s - 1
        texts.append(f"{time_text(first.beside_s)} beside a save ({more:+.0%})")
    if texts:
        yield Row("training", ", ".join(texts))
    saves = [save for save in first.over if save.failure is None and save.seconds > 0][-_RECENT:]
    if saves:
        rate = statistics.median(save.nbytes / save.seconds for save in saves)
        took_s = statistics.median(save.seconds for save in saves)
        text = f"{size_text(saves[-1].nbytes)} durable in {time_text(took_s)}, {size_text(rate)}/s"
        yield Row("a save", f"{text} (median of {len(saves)})")


def _levels(further: Further, newest: int | None, now: float) -> Iterator[Row]:
    for level in further.levels:
        text = level_text(level, newest)
        if level.problem is not None:
            since = "" if level.since_unix_s is None else f", {age_text(now - level.since_unix_s)}"
            text += f"; {level.problem}{since}"
        yield Row(f"level {level.number}", text, wrong=level.problem is not None)
    if further.agent is None and further.ended is None:
        text = "no agent runs: the next start of the job goes on, or `ckpt-core agent ROOT`"
        yield Row("", text, wrong=True)


def level_text(level: LevelRow, newest: int | None) -> str:
    """Where a level is: `s3://b/run: newest 1100, 100 steps behind; sending 1200, 45 % of 3.0 GiB`."""
    text = f"{level.url}: no step yet"
    if level.steps:
        text = f"{level.url}: newest {level.steps[-1]}"
        if newest is not None and newest > level.steps[-1]:
            text += f", {count_text(newest - level.steps[-1], 'step')} behind"
    if level.sending is not None:
        part = level.sent_bytes / level.total_bytes if level.total_bytes else 0.0
        text += f"; sending {level.sending}, {part:.0%} of {size_text(level.total_bytes)}"
    return text


def _failures(seen: Watched) -> Iterator[Row]:
    failed = [
        (save.unix_s, save.rank, f"step {save.step}: {save.failure}")
        for rank in seen.ranks
        for save in rank.over
        if save.failure is not None
    ]
    failed = sorted([*failed, *seen.failed])
    for at_s, rank, text in failed[-_FAILURES_SHOWN:]:
        of = f"rank {rank}, " if len(seen.ranks) > 1 else ""
        yield Row("failed", f"{of}{age_text(seen.unix_s - at_s)}: {text}", wrong=True)
    if len(failed) > _FAILURES_SHOWN:
        yield Row("", f"and {count_text(len(failed) - _FAILURES_SHOWN, 'failure')} before")


def _rank_table(seen: Watched) -> RenderableType:
    headings = ["rank", "host", "heard", "saving", "newest", "a save", "waited"]
    lines = []
    for rank in seen.ranks[:_RANKS_SHOWN]:
        done = [save for save in rank.over if save.failure is None]
        begun = ", ".join(f"{save.step} {save.phase}" for save in rank.under_way)
        share = "" if rank.waited_share is None else f"{rank.waited_share:.2%}"
        newest, took = (str(done[-1].step), time_text(done[-1].seconds)) if done else ("", "")
        heard = age_text(seen.unix_s - rank.heard_unix_s)
        lines.append([str(rank.rank), rank.host, heard, begun, newest, took, share])
    more = len(seen.ranks) - _RANKS_SHOWN
    if more > 0:
        lines.append(["...", f"{more} more", "", "", "", "", ""])
    return table(headings, lines, right=("rank", "newest", "waited"))


def _committed(seen: Watched) -> list[Saved]:
    saves = [save for rank in seen.ranks for save in rank.over if save.failure is None]
    return sorted(saves, key=lambda save: save.unix_s)
