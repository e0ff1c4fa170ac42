"""What commands ask and do at the further levels of a root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.errors import ConfigError, RootBusy
from ckpt_core.store import RootLock, pinned_steps, pins_told, unpinned_marks
from ckpt_core.types import step_dir_name

if TYPE_CHECKING:
    from ckpt_core.levels import Far, Plan


@dataclass(frozen=True, slots=True)
class FarSteps:
    """Steps of one level.

    Attributes:
        number: of the level, from 1 on.
        far: the door to it.
        steps: ascending.
    """

    number: int
    far: Far
    steps: tuple[int, ...]


def plan_of(root: Path) -> Plan | None:
    """What the agent of a root is to do; None when it has no further level."""
    from ckpt_core.levels import read_plan

    plan = read_plan(root)
    return plan if plan is not None and plan.levels else None


def steps_held(root: Path) -> frozenset[int]:
    """The steps that parity rests on; none where the root has parity no more."""
    plan = plan_of(root)
    if plan is None or all(level.parity is None for level in plan.levels):
        return frozenset()
    from ckpt_core.levels import held_steps

    return held_steps(root)


def url_of_level(root: Path, level: str) -> str:
    """The URL of a level of a root.

    Args:
        level: its number, from 1 on, or its URL.

    Raises:
        ConfigError: the root has no such level; the text says which it has.
    """
    plan = plan_of(root)
    urls = [] if plan is None else [one.url for one in plan.levels]
    if level.isdecimal() and 1 <= int(level) <= len(urls):
        return urls[int(level) - 1]
    if level.rstrip("/") in urls:
        return level.rstrip("/")
    known = ", ".join(f"{number}: {url}" for number, url in enumerate(urls, 1)) or "none at all"
    raise ConfigError(f"--level {level}: {root} has no such level; its levels are {known}")


@contextmanager
def steps_after(root: Path, after: int, *, look_only: bool) -> Iterator[list[FarSteps]]:
    """The steps after one, at each level of a root; nobody sends any meanwhile, unless this is but a look.

    Raises:
        RootBusy: the agent of the root is at work.
        Away: a level cannot be reached.
        ConfigError: a level needs an extra that is not installed, or one of the steps is pinned there.
    """
    plan = plan_of(root)
    with ExitStack() as stack:
        if plan is None:
            yield []
            return
        from ckpt_core.levels import LEVELS, open_far

        if not look_only:
            _lock_out_agent(stack, root / LEVELS, root)
        mine = pins_told(root) or frozenset() if look_only else pinned_steps(root)
        found = []
        for number, level in enumerate(plan.levels, 1):
            if level.parity is not None:
                continue  # without the steps of the roots it is of no use, and agents take it away
            far = stack.enter_context(open_far(level.url))
            steps = tuple(sorted(step for step in far.steps() if step > after))
            pins, unpinned = far.pins(), {*unpinned_marks(root).values()} - mine
            for step in () if look_only else sorted(pins & unpinned):
                far.pin(step, False)  # as the agent would, if there were one
            pinned = sorted(pins.intersection(steps) - unpinned)
            if pinned:
                named = ", ".join(map(str, pinned))
                raise ConfigError(
                    f"pinned at level {number}, {far.url}: {named}: unpin first; nothing was removed"
                )
            found.append(FarSteps(number, far, steps))
        yield found


def retire(root: Path, levels: Sequence[FarSteps], gone: list[FarSteps]) -> None:
    """Take those steps away, at the last level first, and out of what the agent has last said.

    Args:
        gone: gets each level that has lost its steps; if this raises, the others have all or some of theirs.

    Raises:
        Away: a level could not be reached or did not do as asked; the levels before it still have theirs.
    """
    for level in reversed(levels):
        if level.steps:
            level.far.retire([step_dir_name(step) for step in level.steps])
            gone.append(level)
            _correct_status(root, level)


def _correct_status(root: Path, gone: FarSteps) -> None:
    from ckpt_core.levels import read_status, write_status

    status = read_status(root)
    if status is None:
        return
    for level in status.levels:
        if level.url == gone.far.url:
            kept = {
                step: attempt for step, attempt in level.steps.items() if step not in gone.steps
            }
            level.steps = kept
    with suppress(OSError):  # it is for people, and the next agent says it anew
        write_status(root, status)


def _lock_out_agent(stack: ExitStack, folder: Path, root: Path) -> None:
    lock = RootLock(folder)
    try:
        lock.acquire()
    except RootBusy as exc:
        raise RootBusy(
            f"the agent of {root} is at work and might send again what is removed now ({exc}): let it end, "
            "or end it; or leave the levels as they are with --no-levels",
            path=root,
        ) from exc
    stack.callback(lock.release)
