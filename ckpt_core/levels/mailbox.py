"""What a Checkpointer and the agent of its root tell one another: two small files in `.levels/`.

    plan.json     by the Checkpointer that leads the root: which levels, of which run and session
    status.json   by the agent: what has reached which level, what is on its way, what is wrong
    .lock         held by the agent for its life: there is never more than one
    agent.log     what the agent has to say
    claims.json   by each Checkpointer before it claims the levels: its token
    mounts.json   by each Checkpointer: where the disks of levels that are directories are mounted
    unpinned/     marks of steps that somebody has unpinned in the root, until all levels have been told

A file is replaced by one rename, so that a reader sees all of it or the one before. Neither has to survive a
power loss: the plan is written anew by each Checkpointer, and the status is found again by asking the levels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ckpt_core.levels.whereabouts import is_elsewhere, place_of
from ckpt_core.options import Level, parse_levels
from ckpt_core.store import UNPINNED, forget_marks, unpinned_marks
from ckpt_core.system.files import Files

LEVELS = ".levels"
"""The folder in the root; readers of steps ignore it."""

RUN = "run"
"""The file in it that holds the id of the run."""

PLAN = "plan.json"
STATUS = "status.json"
CLAIMS = "claims.json"
MOUNTS = "mounts.json"
AGENT_LOG = "agent.log"
PROTOCOL = 2
"""An agent that meets a plan of another protocol ends, and leaves the root to the agent of that plan."""

REMEMBERED = 500
"""How many saves of each kind a status names, the latest."""

_BY_STEP = ("steps", "reached", "skipped")
"""JSON has no keys that are numbers."""


@dataclass(frozen=True)
class Serve:
    """What the agent of a root keeps for other nodes while it is there.

    Attributes:
        dir: where.
        bind: the address at which it listens, as `parse_address` takes it.
        token_file: names the file with the token that the job shares.
        shows: the name, of two parts, under which the others may read its root; "": they may not.
    """

    dir: str
    bind: str
    token_file: str
    shows: str = ""


@dataclass(frozen=True)
class Node:
    """A node of those that keep one another's steps, as the plan of each of them has it.

    Attributes:
        part: the name of what it holds of a step.
        address: where its agent listens for the others.
        domain: what fails together with it; None: nothing else does.
        keeper: the part of the node that keeps its copy.
        copy: the URL of that copy.
        group: the number of its group, where they keep parity: then there is neither keeper nor copy.
    """

    part: str
    address: str
    domain: str | None
    keeper: str = ""
    copy: str = ""
    group: int | None = None


@dataclass(frozen=True)
class Source:
    """Something that is left of a part of nodes that kept parity, and were others than those that go on.

    Attributes:
        part: as they called it.
        root: the URL of a root that has it; "": none.
        kept: that of parity that its node kept, now or at an earlier start; "": none.
        group: all parts that it was in a group with.
    """

    part: str
    root: str = ""
    kept: str = ""
    group: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What the agent of a root is to do.

    Attributes:
        run: id of the run; the same in all levels.
        session: counts the Checkpointers that have opened this run. An agent publishes nothing at a level
            that has seen a higher one.
        token: of the Checkpointer that wrote it, so that answers can be told apart.
        levels: in their order.
        closed: the Checkpointer has been closed, and no step comes any more.
        own: levels that no other root of the job has: disks of this machine. What this root holds of a step
            is all that comes there, and makes it a step there as it does here.
        sweeps: this root's agent is the one that deletes what others left at the levels (the first root's).
        protocol: see `PROTOCOL`.
        release: of ckpt_core.
        serve: what it keeps for other nodes; None: nothing.
        nodes: all that keep one another's steps, this one too; (): they have not met, or there are none.
        part: which of them this one is; "": none.
        parity: the shape of groups, where they keep parity, as `Level.parity`.
        asks: nodes that may have something from which the part of this one can be rebuilt; without parity,
            URLs of all places that have parts of steps, where nodes that are cut otherwise have saved.
        before: with parity, what is left of the parts of nodes that are cut otherwise, where such have saved.
        apart: attempts of steps of the root that are newer than the one that all nodes have gone on from: not
            all have them, and no parity is made of them.
        restored: the attempt of the step that all ranks have gone on from; "": they have not. Until then what
            nodes kept of others before may be needed; from then on copies, or parity, of it come first.
        last: attempts of what was saved last, where the trainer waits for that: it goes to every level,
            whatever `every` says, for as long as nothing newer is here.
    """

    run: str
    session: int
    token: str
    levels: tuple[Level, ...]
    closed: bool = False
    sweeps: bool = True
    own: tuple[str, ...] = ()
    protocol: int = PROTOCOL
    release: str = ""
    serve: Serve | None = None
    nodes: tuple[Node, ...] = ()
    part: str = ""
    parity: str = ""
    asks: tuple[str, ...] = ()
    before: tuple[Source, ...] = ()
    apart: tuple[str, ...] = ()
    restored: str = ""
    last: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        levels = [level.to_json() for level in self.levels]
        return {**dataclasses.asdict(self), "levels": levels}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Self:
        """As `to_json` gave it; keys that are not known are ignored."""
        known = {one.name for one in dataclasses.fields(cls)}
        values = {name: value for name, value in obj.items() if name in known}
        for name in ("own", "asks", "apart", "last"):
            values[name] = tuple(values.get(name, ()))
        if values.get("serve") is not None:
            values["serve"] = Serve(**values["serve"])
        values["nodes"] = tuple([Node(**one) for one in values.get("nodes", ())])
        values["before"] = tuple(
            [Source(**{**one, "group": tuple(one["group"])}) for one in values.get("before", ())]
        )
        return cls(**{**values, "levels": parse_levels(values["levels"])})


@dataclass
class LevelStatus:
    """What the agent knows of one level.

    Attributes:
        url: which.
        steps: whole there, as it was last seen: step -> attempt.
        files: directories of files that are whole there, likewise: name -> attempt.
        files_skipped: those of the places before it that never will be, likewise.
        reached: saves of this root that have come there, the latest last, likewise; also those that are
            retired since.
        skipped: saves that were to go there and never will: passed over for newer ones, or retired before.
        sending: the step that is on its way; None: none is.
        sent_bytes, total_bytes: of that one.
        problem: why it cannot go on now, for people; "" when all is well.
        hopeless: the problem does not go away by itself.
        since_s: wall-clock time at which the problem began; 0: none.
        tries: how often the present step has been tried.
        bytes_all: sent by this agent since it began.
        busy_s: time that it took.
        pinned: steps that are pinned there as they are in the root.
        keeps: the conclusion on agreed steps that it goes by, by session and number; []: none.
        token, restored: of the plan that it goes by. What is said for another one is not said of what came
            after: a step may be wanted again that had been passed over, and a place be another one.
    """

    url: str
    steps: dict[int, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    files_skipped: dict[str, str] = field(default_factory=dict)
    reached: dict[int, str] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    sending: int | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    problem: str = ""
    hopeless: bool = False
    since_s: float = 0.0
    tries: int = 0
    bytes_all: int = 0
    busy_s: float = 0.0
    pinned: list[int] = field(default_factory=list)
    keeps: list[int] = field(default_factory=list)
    token: str = ""
    restored: str = ""

    def begins(self, step: int, nbytes: int) -> None:
        """A step is on its way from now on, for the first time or again."""
        self.tries = self.tries + 1 if self.sending == step else 1
        self.sending, self.sent_bytes, self.total_bytes = step, 0, nbytes

    def rests(self) -> None:
        """Nothing is on its way any more."""
        self.sending, self.sent_bytes, self.total_bytes = None, 0, 0

    def has_reached(self, step: int, attempt: str) -> None:
        """Note that a save has come there."""
        _remember(self.reached, step, attempt)

    def has_skipped(self, step: int, attempt: str) -> None:
        """Note that a save never will, or is to be there no more."""
        if self.reached.get(step) == attempt:
            del self.reached[step]
        _remember(self.skipped, step, attempt)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        lists = {name: list(getattr(self, name).items()) for name in _BY_STEP}
        return {**dataclasses.asdict(self), **lists}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Self:
        """As `to_json` gave it; keys that are not known are ignored."""
        known = {one.name for one in dataclasses.fields(cls)}
        values = {name: value for name, value in obj.items() if name in known}
        return cls(**values | {name: dict(values.get(name, ())) for name in _BY_STEP})


@dataclass
class Status:
    """What the agent of a root says of itself.

    Attributes:
        pid, host: of the agent.
        token: of the plan that it goes by.
        levels: in the order of the plan.
        written_s: wall-clock time of this writing, for people.
        ended: it has ended, or is about to, and why ("up to date", "fenced", ...); "" while it works.
        serving: the address at which it keeps steps of other nodes; "" while it does not.
        refused: why it does not, though it is to; "".
    """

    pid: int
    host: str
    token: str
    levels: list[LevelStatus] = field(default_factory=list)
    written_s: float = 0.0
    ended: str = ""
    serving: str = ""
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return {**dataclasses.asdict(self), "levels": [level.to_json() for level in self.levels]}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Self:
        """As `to_json` gave it; keys that are not known are ignored."""
        known = {one.name for one in dataclasses.fields(cls)}
        values = {name: value for name, value in obj.items() if name in known}
        return cls(**{**values, "levels": [LevelStatus.from_json(one) for one in values["levels"]]})


def write_plan(root: Path, plan: Plan, *, others: int | None = None) -> None:
    """Tell the agent of a root what to do. Raises OSError.

    Args:
        others: the newest session that may have been another root's; None: the one before.
    """
    before, others = read_plan(root), plan.session - 1 if others is None else others
    if before is None or before.run != plan.run or others > before.session:
        # The run may have gone on elsewhere, and a step that was unpinned here have been pinned again there.
        forget_marks(root, unpinned_marks(root), files=Files())
    _write(root, PLAN, {**plan.to_json(), "place": place_of(root, root / LEVELS / RUN)})
    (root / UNPINNED).mkdir(exist_ok=True)


def read_plan(root: Path) -> Plan | None:
    """What the agent of a root is to do; None when there is no plan that can be read."""
    obj = _read(root, PLAN)
    with contextlib.suppress(KeyError, TypeError, ValueError):  # ConfigError is one
        return None if obj is None else Plan.from_json(obj)
    return None


def is_copied(root: Path) -> bool:
    """Whether the plan of a root was written elsewhere: it is a copy, or was moved to another disk."""
    return is_elsewhere((_read(root, PLAN) or {}).get("place"), root, root / LEVELS / RUN)


def write_mounts(root: Path, mounts: Mapping[str, str]) -> None:
    """Keep, by its URL, where the filesystem of a level is mounted; others stay. Raises OSError."""
    before = read_mounts(root)
    after = {**before, **mounts}
    if after != before:
        _write(root, MOUNTS, after)


def read_mounts(root: Path) -> dict[str, str]:
    """Where the filesystem of each level that is a directory was mounted, as far as it is known."""
    return _read(root, MOUNTS) or {}


def note_claim(root: Path, token: str, *, copied: bool = False) -> list[str]:
    """Note that a Checkpointer is about to claim the levels: it may be killed before there is a plan of it.

    Called with the root locked. Raises OSError.

    Args:
        copied: those that have noted it before did so in another root.

    Returns:
        The tokens of those that have noted it in this root, this one too.
    """
    before = [] if copied else _tokens(root)
    tokens = [*before, token][-REMEMBERED:]
    _write(root, CLAIMS, {"tokens": tokens})
    return tokens


def noted_claims(root: Path) -> list[str]:
    """The tokens that `note_claim` has noted in this root; none in a copy of another one."""
    return [] if is_copied(root) else _tokens(root)


def _tokens(root: Path) -> list[str]:
    return list((_read(root, CLAIMS) or {}).get("tokens", ()))


def write_status(root: Path, status: Status) -> None:
    """Say what the agent has done. Raises OSError."""
    status.written_s = time.time()
    _write(root, STATUS, status.to_json())


def read_status(root: Path) -> Status | None:
    """What the agent of a root has last said; None when it has said nothing that can be read."""
    obj = _read(root, STATUS)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return None if obj is None else Status.from_json(obj)
    return None


def _write(root: Path, name: str, obj: dict[str, Any]) -> None:
    folder = root / LEVELS
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    # Of one name, so that there is never more than one that a kill has left: each file has one writer.
    fresh = folder / f".{name}"
    fresh.unlink(missing_ok=True)  # it may be another user's
    fresh.write_text(json.dumps(obj))
    fresh.replace(folder / name)


def _read(root: Path, name: str) -> Any:
    try:
        obj = json.loads((root / LEVELS / name).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return obj if isinstance(obj, dict) else None


def _remember(saves: dict[int, str], step: int, attempt: str) -> None:
    if saves.get(step) == attempt:
        return
    # The latest last, whatever its number: training may have gone back.
    saves.pop(step, None)
    saves[step] = attempt
    for old in [*saves][:-REMEMBERED]:
        del saves[old]
