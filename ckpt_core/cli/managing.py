"""`rm`, `pin`, `unpin`: the commands that change a root."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.cli.text import clean, count_text, note, say, say_json, size_text
from ckpt_core.errors import ConfigError, NotCommitted
from ckpt_core.store import StepStore, committed_steps, resolve, step_path
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir

if TYPE_CHECKING:
    from ckpt_core.cli.requests import PinRequest, RemoveRequest

_ALL_SLOTS = sys.maxsize
"""Opening a store trims its slots; ours must not take any from the training job that comes next."""

_SHOWN = 12


def remove_steps(request: RemoveRequest) -> bool:
    """Remove the steps that were asked for; always a success.

    Raises:
        ConfigError: it is not clear which, a step is pinned, or nobody said yes.
        NotCommitted: there is no such step or root.
        RootBusy: somebody else writes to the root.
        PersistError: a step could not be removed durably.
    """
    _check_root(request.root)
    _check_choice(request)
    pinned = _store(request.root).pinned()
    doomed = _doomed(request, pinned)
    _check_committed(request.root, doomed)
    if pinned.intersection(doomed):
        named = _named(sorted(pinned.intersection(doomed)))
        raise ConfigError(f"pinned, {named}: unpin first; nothing was removed")
    nbytes = sum(_size(step_path(request.root, step)) for step in doomed)
    done = bool(doomed) and not request.dry_run
    if done:
        with _locked(request.root) as store:
            # Asked with the lock held: nothing else can change what the answer is about.
            _confirm(request, doomed, nbytes)
            store.remove(doomed)
    left = len(committed_steps(request.root))
    if request.json:
        answer = {"root": str(request.root), "steps": doomed, "file_bytes": nbytes}
        say_json({**answer, "removed": done, "steps_left": left})
    else:
        say(_told(doomed, nbytes, dry_run=request.dry_run, left=left))
        if request.keep_last is not None and pinned:
            note(f"pinned steps stay: {', '.join(map(str, sorted(pinned)))}")
    return True


def set_pin(request: PinRequest, *, pinned: bool) -> bool:
    """Pin or unpin a step, durably; always a success. Needs no lock: any process may.

    Raises:
        NotCommitted: there is no such root, or no such step to pin.
        PersistError: it could not be made durable.
    """
    _check_root(request.root)
    if pinned:
        resolve(step_path(request.root, request.step))
    store = _store(request.root)
    changed = (request.step in store.pinned()) != pinned
    if pinned:
        # Also one that is pinned: whoever set that pin may find that the step is gone, and take it back.
        store.pin(request.step, committed=True)
    elif changed:
        store.unpin(request.step)
    if request.json:
        answer = {"root": str(request.root), "step": request.step}
        say_json({**answer, "pinned": pinned, "changed": changed})
    else:
        state = "pinned" if pinned else "not pinned"
        say(f"step {request.step} is {state}{'' if changed else ', as it was before'}")
    return True


def _check_root(root: Path) -> None:
    if parse_step_dir(root.name) is not None:
        raise ConfigError(f"{root} is one step: name the root, {root.parent}, and the step")
    if not root.is_dir():
        raise NotCommitted(f"{root}: there is no such directory", path=root)


def _check_choice(request: RemoveRequest) -> None:
    given = [bool(request.step), request.after is not None, request.keep_last is not None]
    if sum(given) != 1:
        raise ConfigError("say which steps, in one way: --step N, --after N or --keep-last N")


def _doomed(request: RemoveRequest, pinned: frozenset[int]) -> list[int]:
    if request.step:
        return sorted(set(request.step))
    steps = committed_steps(request.root)
    if request.after is not None:
        return [step for step in steps if step > request.after]
    assert request.keep_last is not None
    return [step for step in steps[: -request.keep_last] if step not in pinned]


def _check_committed(root: Path, doomed: list[int]) -> None:
    missing = set(doomed) - set(committed_steps(root))
    for step in sorted(missing):
        resolve(step_path(root, step))  # raises, naming the nearest steps


def _confirm(request: RemoveRequest, doomed: list[int], nbytes: int) -> None:
    if request.yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to ask: add --yes to remove, or --dry-run to look")
    sys.stderr.write(clean(f"remove {_named(doomed)} ({size_text(nbytes)}) of {request.root}?"))
    sys.stderr.write(" [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was removed")


def _told(doomed: list[int], nbytes: int, *, dry_run: bool, left: int) -> str:
    if not doomed:
        return "nothing to remove"
    verb = "would remove" if dry_run else "removed"
    rest = f"; {count_text(left, 'step')} left" if not dry_run else ""
    return f"{verb} {_named(doomed)} ({size_text(nbytes)}){rest}"


def _named(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:_SHOWN]))
    return f"{count_text(len(steps), 'step')}: {shown}{', ...' if len(steps) > _SHOWN else ''}"


def _size(path: Path) -> int:
    try:
        return sum(file.lstat().st_size for file in path.iterdir())
    except FileNotFoundError:  # a writer has retired it, of which `remove` knows best
        return 0


@contextmanager
def _locked(root: Path) -> Iterator[StepStore]:
    store = _store(root)
    store.open()
    try:
        yield store
    finally:
        store.close()


def _store(root: Path) -> StepStore:
    return StepStore(root, files=Files(), keep_last=None, keep_every=None, spare_slots=_ALL_SLOTS)
