"""`rm`, `pin`, `unpin`: the commands that change a root."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.anywhere import local, url_of
from ckpt_core.cli.at_levels import FarSteps, plan_of, retire, steps_after, steps_held
from ckpt_core.cli.listing import PINS_NOT_KNOWN
from ckpt_core.cli.places import check_directory, directory_of
from ckpt_core.cli.text import note, say, say_json
from ckpt_core.errors import CkptError, ConfigError, NotCommitted
from ckpt_core.store import (
    check_pins,
    committed_steps,
    opened_by_hand,
    pins_told,
    resolve,
    step_path,
    store_by_hand,
    unpinned_marks,
)
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir, step_dir_name
from ckpt_core.units import clean, count_text, size_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import PinRequest, RemoveRequest
    from ckpt_core.store import StepStore

_SHOWN = 12


def remove_steps(request: RemoveRequest) -> bool:
    """Remove the steps that were asked for; always a success.

    With `--after`, also at the further levels: a restart would go on from what is there.

    Raises:
        ConfigError: it is not clear which, a step is pinned, this user may not read the pins, nobody said
            yes, or there are directories of files and no steps.
        NotCommitted: there is no such step or root.
        RootBusy: somebody else writes to the root, or its agent is at work.
        PersistError: a step could not be removed durably.
        Away: a level cannot be reached; the root has all its steps, and the text says which have gone at
            levels behind it.
    """
    root = directory_of(request.root, command="ckpt-core rm")
    _check_root(root)
    _check_choice(request)
    with ExitStack() as stack:
        store = store_by_hand(root, files=Files())
        if not request.dry_run:
            check_pins(root)
            # Order matters: opened before anything is chosen. What a removal that was cut short has left
            # aside is a step again then; and with the lock held no writer changes what is asked about.
            store = stack.enter_context(opened_by_hand(root, files=Files()))
        pins, held = pins_told(root), steps_held(root)
        pinned = pins or frozenset()
        doom = _chosen(request, root, pinned, held)
        doom = stack.enter_context(_with_levels(request, root, doom))
        done = bool(doom.steps or doom.far_steps) and not request.dry_run
        if done:
            _confirm(request, doom)
            _remove(store, doom)
    _tell(request, root, doom, done=done)
    if pins is None:
        note(f"{PINS_NOT_KNOWN}; pinned steps would stay")
    if request.keep_last is not None and not request.json:
        _tell_kept(root, pinned, held)
    return True


def _remove(store: StepStore, doom: _Doom) -> None:
    # Anybody may have pinned one while the question waited; levels never get their steps back.
    _check_pins(store.pinned(), doom.steps)
    gone: list[FarSteps] = []
    try:
        # Order matters: as long as the root has its steps, a restart goes on from them, and no level that
        # could not be reached is forgotten.
        retire(store.root, doom.levels, gone)
        # What parity has come to rest on since is not what somebody has said yes to.
        store.remove(doom.steps, held=lambda: steps_held(store.root).difference(doom.held))
    except CkptError as exc:
        told = [f"Gone already: {_Doom((), 0, tuple(gone)).text}"] if gone else []
        under_way = [level for level in reversed(doom.levels) if level.steps and level not in gone]
        told += [f"Gone in part, perhaps: {_Doom((), 0, (one,)).text}" for one in under_way[:1]]
        exc.args = (". ".join([str(exc).rstrip("."), *told]), *exc.args[1:])
        raise


@dataclass(frozen=True, slots=True)
class _Doom:
    """What goes: steps of the root, their size, and steps of its levels.

    Attributes:
        held: of the root's, those that parity rests on.
    """

    steps: tuple[int, ...]
    nbytes: int
    levels: tuple[FarSteps, ...] = ()
    held: tuple[int, ...] = ()

    @property
    def far_steps(self) -> int:
        """How many copies go at the levels."""
        return sum(len(level.steps) for level in self.levels)

    @property
    def text(self) -> str:
        """All of it, in words."""
        told = [f"{_named(self.steps)} ({size_text(self.nbytes)})"] if self.steps else []
        told += [
            f"{_named(level.steps)} at level {level.number}, {level.far.url}"
            for level in self.levels
            if level.steps
        ]
        return "; ".join(told)


@contextmanager
def _with_levels(request: RemoveRequest, root: Path, doom: _Doom) -> Iterator[_Doom]:
    if request.after is None or request.no_levels or plan_of(root) is None:
        yield doom
        return
    with steps_after(root, request.after, look_only=request.dry_run) as levels:
        yield replace(doom, levels=tuple(levels))


def _tell_kept(root: Path, pinned: frozenset[int], held: frozenset[int]) -> None:
    there = frozenset(committed_steps(root))
    if kept := sorted(pinned & there):
        note(f"pinned steps stay: {', '.join(map(str, kept))}")
    if kept := sorted(held & there - pinned):
        note(f"steps that parity rests on stay: {', '.join(map(str, kept))}")


def _tell(request: RemoveRequest, root: Path, doom: _Doom, *, done: bool) -> None:
    left = len(committed_steps(root))
    if request.json:
        levels = [{"url": level.far.url, "steps": list(level.steps)} for level in doom.levels]
        answer = {"root": str(root), "steps": list(doom.steps), "file_bytes": doom.nbytes}
        say_json({**answer, "levels": levels, "removed": done, "steps_left": left})
        return
    say(_told(doom, dry_run=request.dry_run, left=left))
    if doom.held and not done:
        note(f"parity rests on {_named(doom.held)}")
    if not doom.levels and doom.steps and plan_of(root) is not None:
        note("the further levels of this root keep what they have")


def set_pin(request: PinRequest, *, pinned: bool) -> bool:
    """Pin or unpin a step, durably; always a success. Needs no lock: any process may.

    Raises:
        ConfigError: the root is one step, or what another node shows of its own; this user may not read
            the pins.
        NotCommitted: there is no such root, or no such step to pin.
        PersistError: it could not be made durable.
        Away: a root in an object store cannot be reached.
    """
    url = url_of(request.root)
    if url is None:
        changed = _set_pin_here(local(request.root), request.step, pinned=pinned)
    else:
        changed = _set_pin_far(url, request.step, pinned=pinned)
    if request.json:
        answer = {"root": str(request.root), "step": request.step}
        say_json({**answer, "pinned": pinned, "changed": changed})
    else:
        state = "pinned" if pinned else "not pinned"
        say(f"step {request.step} is {state}{'' if changed else ', as it was before'}")
        if url is None and not pinned and _levels_hear(local(request.root), request.step):
            note("the agent of this root is to unpin it at the further levels")
    return True


def _levels_hear(root: Path, step: int) -> bool:
    """Whether further levels are still to be told that somebody has unpinned a step."""
    return step in unpinned_marks(root).values()


def _set_pin_here(root: Path, step: int, *, pinned: bool) -> bool:
    """Whether it was otherwise before."""
    _check_root(root)
    check_pins(root)
    if pinned:
        resolve(step_path(root, step))
    store = store_by_hand(root, files=Files())
    changed = (step in store.pinned()) != pinned
    if pinned:
        # Also one that is pinned: whoever set that pin may find that the step is gone, and take it back.
        store.pin(step, committed=True)
    else:
        # Also of a step that was never pinned here: its levels may have it pinned for a root that is lost.
        store.unpin(step)
    return changed


def _set_pin_far(url: str, step: int, *, pinned: bool) -> bool:
    from ckpt_core.levels import is_shown_root, open_far

    if parse_step_dir(url.rpartition("/")[2]) is not None:
        raise ConfigError(
            f"{url} is one step: name the root, {url.rpartition('/')[0]}, and the step"
        )
    if is_shown_root(url):  # which shows no pins: unpin would find the step not pinned
        raise ConfigError(
            f"{url} is the root of another node, which shows it to be read alone: pin and unpin on that node"
        )
    with open_far(url) as far:
        changed = (step in far.pins()) != pinned
        if changed:
            far.pin(step, pinned)
        # Order matters: looked at once the pin is durable. Retention looks for pins before it takes steps.
        if pinned and far.manifest(step_dir_name(step)) is None:
            if changed:
                far.pin(step, False)
            steps = ", ".join(map(str, sorted(far.steps()))) or "there is none"
            raise NotCommitted(f"step {step} is not committed in {url}: {steps}", step=step)
    return changed


def _check_root(root: Path) -> None:
    if parse_step_dir(root.name) is not None:
        raise ConfigError(f"{root} is one step: name the root, {root.parent}, and the step")
    check_directory(root)


def _check_choice(request: RemoveRequest) -> None:
    given = [bool(request.step), request.after is not None, request.keep_last is not None]
    if sum(given) != 1:
        raise ConfigError("say which steps, in one way: --step N, --after N or --keep-last N")


def _doomed(request: RemoveRequest, root: Path, kept: frozenset[int]) -> list[int]:
    if request.step:
        return sorted(set(request.step))
    steps = committed_steps(root)
    if not steps:
        _check_no_directories(root)
    if request.after is not None:
        return [step for step in steps if step > request.after]
    assert request.keep_last is not None
    return [step for step in steps[: -request.keep_last] if step not in kept]


def _check_no_directories(root: Path) -> None:
    """That nothing is removed from a root of DeepSpeed's tags would be taken for gone back in time."""
    from ckpt_core.restore import committed_directories

    if names := committed_directories(root):
        count = count_text(len(names), "directory of files")
        raise ConfigError(
            f"{root} holds no steps but {count} ({names[0]}, ...), such as DeepSpeed's tags, which rm leaves "
            f"alone; delete them yourself, here and at each further level; nothing was removed"
        )


def _chosen(
    request: RemoveRequest, root: Path, pinned: frozenset[int], held: frozenset[int]
) -> _Doom:
    doomed = _doomed(request, root, pinned | held)
    _check_committed(root, doomed)
    _check_pins(pinned, doomed)
    nbytes = sum(_size(step_path(root, step)) for step in doomed)
    return _Doom(tuple(doomed), nbytes, held=tuple(sorted(held.intersection(doomed))))


def _check_pins(pinned: frozenset[int], doomed: Sequence[int]) -> None:
    if kept := sorted(pinned.intersection(doomed)):
        raise ConfigError(f"pinned, {_named(kept)}: unpin first; nothing was removed")


def _check_committed(root: Path, doomed: list[int]) -> None:
    missing = set(doomed) - set(committed_steps(root))
    for step in sorted(missing):
        resolve(step_path(root, step))  # raises, naming the nearest steps


def _confirm(request: RemoveRequest, doom: _Doom) -> None:
    rests = f"parity rests on {_named(doom.held)}" if doom.held else ""
    if request.yes:
        if rests and not request.json:
            note(rests)
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to ask: add --yes to remove, or --dry-run to look")
    sys.stderr.write(clean(f"remove {doom.text} of {request.root}{rests and '; ' + rests}?"))
    sys.stderr.write(" [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was removed")


def _told(doom: _Doom, *, dry_run: bool, left: int) -> str:
    if not doom.text:
        return "nothing to remove"
    verb = "would remove" if dry_run else "removed"
    rest = f"; {count_text(left, 'step')} left" if not dry_run else ""
    return f"{verb} {doom.text}{rest}"


def _named(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_SHOWN]))
    return f"{count_text(len(steps), 'step')}: {shown}{', ...' if len(steps) > _SHOWN else ''}"


def _size(path: Path) -> int:
    try:
        return sum(file.lstat().st_size for file in path.iterdir())
    except FileNotFoundError:  # a writer has retired it, of which `remove` knows best
        return 0
