"""The agreed step: one that every node can bring, however far apart the nodes are. Pure, but for its file.

    opened(found, session)           the nodes of a job that begins go on from what they knew
    concluded(agreed, said, save)    with each commit: rank 0, from what all nodes have said with their votes
    agreed.keeps                     what no node gives away, in its root and in its copy

Invariant: a step is agreed on once *every* node has said that it is whole in its root and at its copy. Each
node goes on keeping the one before until it hears that, and keeps the one that is sought from when it hears
of it. So whichever nodes have heard of the newest conclusion, all of them have one step in common, twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from ckpt_core.levels.mailbox import LEVELS
from ckpt_core.system.files import Files

AGREED = "agreed.json"
"""The file in `.levels/` of a root."""

HELD = 8
"""So many of its newest steps a node names once, when a job begins."""

Save = tuple[int, str]
"""A step and the attempt that saved it."""


class Standing(StrEnum):
    """How far a node is with the step that is sought."""

    THERE = "there"
    COMING = "coming"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the nodes have agreed on, as one of them knows it.

    Attributes:
        run: of the job.
        session: in which it was concluded.
        number: counts the conclusions of a session.
        kept: saves of which one is whole with all nodes and all copies, the surest first: two, and one more
            for each job that went on from another step and ended before anything was agreed on.
        sought: the save that is to be the next one; None: there is none yet.
        begun: a step has been voted on in this session. Until then nothing at all is given away.
    """

    run: str
    session: int = 0
    number: int = 0
    kept: tuple[Save, ...] = ()
    sought: Save | None = None
    begun: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """The later of two conclusions has the higher one."""
        return (self.session, self.number)

    @property
    def keeps(self) -> frozenset[int]:
        """Steps that no node gives away."""
        return frozenset(step for step, _ in (*self.kept, *([self.sought] if self.sought else [])))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> Self:
        """As `to_json` gave it. Raises KeyError, TypeError, ValueError."""
        sought = obj["sought"]
        return cls(
            str(obj["run"]),
            int(obj["session"]),
            int(obj["number"]),
            tuple([_save(one) for one in obj["kept"]]),
            None if sought is None else _save(sought),
            bool(obj["begun"]),
        )


@dataclass(frozen=True, slots=True)
class Said:
    """What a node says with its vote.

    Attributes:
        order: of the conclusion that it goes by.
        standing: of the save that is sought there.
        held: the newest saves of its root, or the one that training has gone on from since anything was
            concluded; (): nobody needs to know.
    """

    order: tuple[int, int]
    standing: Standing
    held: tuple[Save, ...] = ()

    def to_json(self) -> Any:
        """What `from_json` takes."""
        return [self.order, self.standing, self.held]

    @classmethod
    def from_json(cls, obj: Any) -> Self:
        """As `to_json` gave it."""
        order, standing, held = obj
        return cls(tuple(order), Standing(standing), tuple([_save(one) for one in held]))


def opened(found: Iterable[Agreed], run: str, session: int) -> Agreed:
    """What nodes go by whose job begins, from what each has found in its root. The same on all of them."""
    last = max(found, key=lambda one: one.order, default=Agreed(run))
    return Agreed(run, session, 0, last.kept)


def concluded(agreed: Agreed, said: Sequence[Said], save: Save | None) -> Agreed:
    """What follows from the votes of all nodes.

    Args:
        agreed: the newest conclusion; that of the one rank that concludes.
        said: by each node.
        save: that is voted on, if the copies take it; no node has it yet.
    """
    is_known = all(one.standing is not Standing.UNKNOWN for one in said)
    if not agreed.begun:
        return _begun(agreed, said, save) if is_known else agreed
    if is_known and set.intersection(*[set(one.held) for one in said]):
        # Training has gone back: what was agreed on, or is sought, may be saved anew under its number.
        return _begun(agreed, said, save)
    if agreed.sought is None or any(one.standing is Standing.LOST for one in said):
        return agreed if save is None else _next(agreed, agreed.kept, save)
    if all((one.order, one.standing) == (agreed.order, Standing.THERE) for one in said):
        return _next(agreed, (agreed.sought,), save)
    return agreed


def late(agreed: Agreed, said: Sequence[Said]) -> list[int]:
    """Which of the nodes, by their place, have not got what is sought yet."""
    there = (agreed.order, Standing.THERE)
    return [number for number, one in enumerate(said) if (one.order, one.standing) != there]


def read_agreed(root: Path, run: str) -> Agreed | None:
    """What a root knows; None: nothing of this run."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        agreed = Agreed.from_json(json.loads((root / LEVELS / AGREED).read_text()))
        return agreed if agreed.run == run else None
    return None


def write_agreed(root: Path, agreed: Agreed, *, files: Files) -> None:
    """Keep it, durably: all of it is there, or the one before. Raises OSError."""
    folder = root / LEVELS
    fresh = folder / f".{AGREED}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        files.unlink(fresh)
    files.write_new(fresh, json.dumps(agreed.to_json()).encode())
    files.rename(fresh, folder / AGREED)
    files.sync_dir(folder)


# -- inside ----------------------------------------------------------------------------------------


def _begun(agreed: Agreed, said: Sequence[Said], save: Save | None) -> Agreed:
    """The first vote: what all roots hold is kept, too, and is what the copies get first."""
    common = set.intersection(*[set(one.held) for one in said])
    if not common:
        return _next(agreed, agreed.kept, save)
    newest = max(common)
    # The others stay: with one of them a copy that is not filled yet may still be brought, and which one that
    # is nobody knows, since a job may wait for its copies, and save nothing, as often as it likes.
    kept = (*[one for one in agreed.kept if one != newest], newest)
    return _next(agreed, kept, newest)


def _next(agreed: Agreed, kept: tuple[Save, ...], sought: Save | None) -> Agreed:
    return Agreed(agreed.run, agreed.session, agreed.number + 1, kept, sought, begun=True)


def _save(obj: Any) -> Save:
    step, attempt = obj
    return int(step), str(attempt)
