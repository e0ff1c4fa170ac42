"""Record what a run does to its files, cut the power at every sync, and look at what is left."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckpt_core
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir
from tests.crash.disk import Disk, build, policies
from tests.crash.layers import CHANGES, SYNCS, hooked
from tests.crash.promises import QuickFiles
from tests.crash.scenarios import Scenario

_PACKAGE = str(Path(ckpt_core.__file__).parent)
NOTES = ("start", "acknowledged", "pinned")
"""Lines of a log that are no operations."""


@dataclass(frozen=True)
class Event:
    """One line of the log: an operation, or "acknowledged" with (step, mark), or "start"."""

    name: str
    args: tuple[Any, ...] = ()
    site: str = ""


class Recorder:
    """Real files whose changes are written down in order.

    `skip` names a sync that is left out wherever it occurs, `fail` one that fails once after "start".

    While `dead`, every operation is refused and changes nothing: for the files, the process is gone.
    """

    def __init__(self, *, skip: str | None = None, fail: str | None = None) -> None:
        self._fail = fail
        self.log: list[Event] = []
        self.dead = False
        self._started = False
        self._skip = skip
        self._lock = threading.RLock()
        self._die_after: int | None = None

    def files(self, base: type[Files] = QuickFiles) -> Files:
        """Files of class `base` that are recorded."""
        return hooked(base, self, CHANGES)

    def note(self, name: str, *args: Any) -> None:
        """Add a line that is no operation."""
        with self._lock:
            self._started |= name == "start"
            self.log.append(Event(name, args))

    def die_after(self, renames: int) -> None:
        """Refuse everything once `renames` more renames have been done."""
        self._die_after = renames

    def revive(self) -> None:
        """Another process, on the same files."""
        self.dead, self._die_after = False, None

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        with self._lock:
            if self.dead and name != "close":
                raise OSError(5, "the process is gone")
            if self._started and self._fail and name in SYNCS and _site(args[0]) == self._fail:
                self._fail = None
                raise OSError(5, "a sync that fails once")
            result = act()
            event = self._event(name, args, result)
            if not (event.site and event.site == self._skip):
                self.log.append(event)
            self._count(name)
            return result

    def _event(self, name: str, args: tuple[Any, ...], result: Any) -> Event:
        if name in ("create", "open_write"):
            return Event(name, (args[0], result))
        if name == "pwrite":
            fd, data, offset = args
            return Event(name, (fd, bytes(data), offset))
        if name in ("sync", "sync_dir"):
            return Event(name, args, _site(args[0]))
        assert name != "map_shared", "writes through a mapping cannot be recorded"
        return Event(name, args)

    def _count(self, name: str) -> None:
        if self._die_after is not None and name in ("rename", "exchange"):
            self._die_after -= 1
            self.dead = self._die_after <= 0


def _site(synced: int | Path) -> str:
    """Which sync of the engine this is: the two innermost functions, and the kind of file."""
    path = synced if isinstance(synced, Path) else Path(os.readlink(f"/proc/self/fd/{synced}"))
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(names) < 2:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE) and not code.co_filename.endswith("files.py"):
            names.append(code.co_qualname)
        frame = frame.f_back
    return f"{' > '.join(reversed(names))} [{_kind(path)}]"


def _kind(path: Path) -> str:
    if path.name.startswith("."):
        return path.name
    if path.suffix == ".pointer":
        return "pointer"
    if path.parent.name == ".inflight":
        return "attempt"
    if path.parent.parent.name == ".inflight":
        return path.name
    if path.parent.name == ".pins":
        return "pin"
    if path.is_dir():
        return "root" if (path / ".lock").exists() else "parent"
    return path.name


@dataclass(frozen=True)
class Outage:
    """A moment at which the power fails, and what had been promised by then."""

    disk: Disk
    where: str
    promised: dict[int, frozenset[int]]
    pinned: frozenset[int] | None = None


def outages(log: Iterable[Event], base: Path, root: Path) -> Iterator[Outage]:
    """The moments right before every sync after "start", and the end. The disk goes on afterwards."""
    disk, promised, started = Disk(base, root), Promises(root), False
    for number, event in enumerate(log):
        if event.name == "start":
            started = True
        elif event.name == "acknowledged":
            promised.keep(*event.args)
        elif event.name == "pinned":
            promised.pinned = event.args[0]
        else:
            if started and event.site:
                where = f"before {number}, {event.site}"
                yield Outage(disk, where, promised.now(), promised.pinned)
            promised.follow(event)
            disk.apply(event.name, event.args)
    yield Outage(disk, "at the end", promised.now(), promised.pinned)


class Promises:
    """The steps that must be there after a power loss, with the marks that each may have; the pins."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._marks: dict[int, frozenset[int]] = {}
        self._away: dict[str, int] = {}
        self.pinned: frozenset[int] | None = None

    def now(self) -> dict[int, frozenset[int]]:
        return dict(self._marks)

    def keep(self, step: int, mark: int) -> None:
        """That form of a step was committed."""
        self._marks[step] = frozenset({mark})

    def follow(self, event: Event) -> None:
        """A step that is renamed is being retired or replaced: retired, once no other takes its name."""
        if event.name == "exchange":
            self._loosen(event.args[1])
        elif event.name == "rename":
            source, target = event.args
            step, taken = self._step(source), self._step(target)
            self._away = {name: gone for name, gone in self._away.items() if gone != taken}
            if step is not None and target.name.endswith(".replaced"):
                self._loosen(source)
                self._away[target.name] = step
            elif step is not None:
                self._marks.pop(step, None)
            elif source.name in self._away:
                self._marks.pop(self._away.pop(source.name), None)

    def _loosen(self, path: Path) -> None:
        step = self._step(path)
        if step in self._marks:
            assert step is not None
            self._marks[step] |= {0, 1, 2}

    def _step(self, path: Path) -> int | None:
        """Of a step, or of a directory `tag<step>`."""
        if path.parent != self._root:
            return None
        if path.name.startswith("tag"):
            return int(path.name.removeprefix("tag"))
        return parse_step_dir(path.name)


def moments(log: Sequence[Event]) -> range:
    """Numbers of the outages."""
    began = next(at for at, event in enumerate(log) if event.name == "start")
    return range(1 + sum(bool(event.site) for event in log[began:]))


def broken_promise(
    log: list[Event],
    root: Path,
    place: Path,
    plan: Scenario,
    *,
    seeds: int,
    at: Collection[int] | None = None,
) -> tuple[int, str]:
    """Cut the power; how many states were looked at, and what is wrong with the first bad one.

    Args:
        at: numbers of the outages that are looked at; None: all.
    """
    seen: set[int] = set()
    for number, outage in enumerate(outages(log, root.parent, root)):
        if at is not None and number not in at:
            continue
        for policy in policies(seeds):
            tree = outage.disk.after(policy)
            promise = (frozenset(outage.promised.items()), outage.pinned)
            key = hash((frozenset(tree.items()), promise))
            if key in seen:
                continue
            seen.add(key)
            target = place / f"after-{len(seen)}"
            build(tree, target)
            problem = _look(plan, target / root.name, outage)
            shutil.rmtree(target)
            if problem:
                return len(seen), f"power lost {outage.where} ({policy.text}): {problem}"
    return len(seen), ""


def _look(plan: Scenario, root: Path, outage: Outage) -> str:
    try:
        plan.look(root, outage.promised)
        assert outage.pinned in (None, _pins(root)), f"pins are {_pins(root)}"
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def _pins(root: Path) -> frozenset[int]:
    return frozenset(int(entry.name) for entry in (root / ".pins").glob("*"))
