"""The group of a node as its agent meets it: where the others show what they have, and what each has said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ckpt_core.layout import Manifest
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Copy, Readable
from ckpt_core.levels.mailbox import Plan
from ckpt_core.levels.parity.agreeing import FILE, Said
from ckpt_core.levels.parity.objects import Group, directory_name
from ckpt_core.levels.parity.opening import group_of, open_kept, open_root, place_of
from ckpt_core.store import INFLIGHT, ensure_root, entries
from ckpt_core.system.files import Files

if TYPE_CHECKING:
    from ckpt_core.levels.far.plain import PlainFar


@dataclass(frozen=True)
class Other:
    """Another node of the group, by its number there."""

    number: int
    part: str
    root: PlainFar
    kept: PlainFar

    def keeps(self, copy: Copy) -> bool:
        """Whether it keeps that parity. Raises Away, CorruptCheckpoint."""
        raw = self.kept.manifest(directory_name(copy.step))
        path = Path(self.kept.url) / copy.target
        return raw is not None and Manifest.decode(raw, path=path).attempt == copy.attempt


@dataclass
class Met:
    """The group, as one plan has it.

    Attributes:
        plan: that says so.
        mine: the number of this node in the group.
        own, folder: where it keeps parity.
        said: what this node has said last.
        heard: what the first node has said last.
        failed: attempts of which this node cannot make its own.
    """

    plan: Plan
    group: Group
    mine: int
    own: DirectoryFar
    folder: Path
    others: list[Other]
    said: Said | None = None
    heard: Said = field(default_factory=Said)
    failed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, plan: Plan, *, files: Files) -> Self | None:
        """What an earlier life has begun in its place is gone; None: the nodes have not met.

        Raises:
            Away, OSError: the place cannot be used.
        """
        group = group_of(plan)
        if group is None or plan.serve is None:
            return None
        folder = place_of(plan)
        ensure_root(files, folder)
        others = [
            Other(number, part, open_root(plan, part), open_kept(plan, part))
            for number, part in enumerate(group.parts)
            if part != plan.part
        ]
        mine = group.parts.index(plan.part)
        met = cls(plan, group, mine, DirectoryFar(folder, files=files), folder, others)
        met._clear()
        return met

    @property
    def mark(self) -> str:
        """Of the group, for as long as a job runs: what was said in another one does not count."""
        shape, session = self.group.shape, self.plan.session
        return " ".join([f"{shape.k}+{shape.m}", *self.group.parts, f"session {session}"])

    @property
    def leads(self) -> bool:
        """Whether this node is the first one."""
        return self.mine == 0

    @property
    def first(self) -> Other:
        """The first node, which is another one."""
        return next(one for one in self.others if one.number == 0)

    def all_keep(self, save: Copy) -> bool:
        """Whether all others keep their parity of a save. Raises Away, CorruptCheckpoint."""
        copy = self.group.copy(save)
        return all(one.keeps(copy) for one in self.others)

    def heard_of(self, other: Other) -> Said:
        """What another node says. Raises Away."""
        word = other.kept.read_word(FILE)
        return Said.decode(None if word is None else word.data, group=self.mark)

    def readers(self, own: Readable) -> list[Readable]:
        """The roots of all nodes in their order, this one's as it is given."""
        found: Mapping[int, Readable] = {one.number: one.root for one in self.others}
        return [found.get(number, own) for number in self.group.shape.stripes]

    def close(self) -> None:
        """Let go of all connections."""
        for one in self.others:
            one.root.close()
            one.kept.close()

    def _clear(self) -> None:
        """Nobody else writes in this place."""
        for entry in entries(self.folder / INFLIGHT):
            step, _, digits = entry.name.partition("-")
            if step.isdecimal() and len(digits) == 8:
                self.own.drop(Copy(int(step), entry.name))
        self.own.sweep([])
