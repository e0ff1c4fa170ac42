"""Where a scrub reads: roots here and elsewhere, what parity gives back, and the parity that is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckpt_core.errors import CkptError, ConfigError, NotCommitted
from ckpt_core.levels.agent.pace import Pace
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Copy, Far, Readable
from ckpt_core.levels.far.opening import open_far
from ckpt_core.levels.mailbox import Plan, read_plan
from ckpt_core.levels.parity.opening import group_of, open_root, open_source, place_of
from ckpt_core.options import PARITY, scheme_of
from ckpt_core.store import committed_steps, entries, is_real_dir
from ckpt_core.system.files import Files
from ckpt_core.types import step_dir_name

if TYPE_CHECKING:
    from ckpt_core.levels.parity.objects import Group


class SharedPace:
    """A pace for the threads of a fetch."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._lock = pace, threading.Lock()

    def let_through(self, nbytes: int) -> None:
        """As `Pace.let_through`."""
        with self._lock:
            self._pace.let_through(nbytes)


class _Paced:
    """A level that is read no faster than it may be."""

    def __init__(self, far: Readable, pace: SharedPace) -> None:
        self._far, self._pace = far, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._far, name)

    def read_blocks(self, copy: Copy, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        for block in self._far.read_blocks(copy, name, offset, nbytes):
            self._pace.let_through(len(block))
            yield block


class Place:
    """A root, here or elsewhere.

    Attributes:
        path: if it is a directory.
        there: what is whole there by its manifests, by its name.
    """

    def __init__(self, url: str, far: Readable, pace: SharedPace, files: Files) -> None:
        self.url, self.files = url, files
        self.far = cast("Far", _Paced(far, pace))
        self.path = Path(url) if scheme_of(url) is None else None
        steps = [Copy(step, attempt) for step, attempt in far.steps().items()]
        self.there = {copy.target: copy for copy in (*steps, *far.directories().values())}

    def copies(self, others: Sequence[Place]) -> list[Copy]:
        """All that is to be read there; where its manifest cannot be, as another place has it."""
        found = dict(self.there)
        for name, known in () if self.path is None else self._unreadable(self.path, others):
            found.setdefault(name, known)
        return sorted(found.values(), key=lambda one: (one.directory or "", one.step))

    def _unreadable(self, path: Path, others: Sequence[Place]) -> Iterator[tuple[str, Copy]]:
        known = {name: copy for one in others for name, copy in one.there.items()}
        for step in committed_steps(path):
            name = step_dir_name(step)
            yield name, known.get(name, Copy(step, ""))
        for name, copy in known.items():
            if copy.directory is not None and is_real_dir(path / name):
                yield name, copy


class _Rebuilt(Place):
    """What parity gives back of a root: only a source for others."""

    def copies(self, others: Sequence[Place]) -> list[Copy]:
        """None: nothing lies there."""
        return []


class KeptParity(Place):
    """The parity that a node keeps, made again of the steps of the group where it is damaged.

    Args:
        root: of the node.
        plan: of that root.
    """

    def __init__(self, root: Path, plan: Plan, pace: SharedPace, files: Files) -> None:
        folder = place_of(plan)
        super().__init__(str(folder), DirectoryFar(folder, files=files), pace, files)
        self._root, self._plan, self._folder, self._pace = root, plan, folder, pace

    def _unreadable(self, path: Path, others: Sequence[Place]) -> Iterator[tuple[str, Copy]]:
        from ckpt_core.levels.parity.objects import step_of

        for entry in entries(path):
            step = step_of(entry.name)
            if step is not None and is_real_dir(path / entry.name):
                yield entry.name, Copy(step, "", entry.name)

    def make_again(self, copy: Copy, progress: Callable[[int, int], None]) -> int:
        """Read the steps of all nodes, and publish the parity of them in its place; of how many nodes.

        Raises:
            NotCommitted: a node does not hold the step any more.
            As `encode`.
        """
        # Only here: it needs NumPy.
        from ckpt_core.levels.parity.encoding import How, Sources, encode, read_part

        group, save = self._meant(copy)
        with ExitStack() as stack:
            fars = [stack.enter_context(self._root_of(part)) for part in group.parts]
            found = [read_part(far, save) for far in fars]
            lacking = [part for part, one in zip(group.parts, found, strict=True) if one is None]
            if lacking:
                text = f"{', '.join(lacking)} does not hold step {save.step} any more"
                raise NotCommitted(text, step=save.step)
            sources = Sources(fars, [one for one in found if one is not None])
            total = sources.nbytes * group.shape.m
            how = How(self._pace.let_through, lambda done: progress(done, max(done, total)))
            mine, far = group.parts.index(self._plan.part), _Afresh(self._folder, files=self.files)
            try:
                encode(group, mine, save, sources, far, how)
            finally:
                far.drop(group.copy(save))
        return len(group.parts)

    def _meant(self, copy: Copy) -> tuple[Group, Copy]:
        """Of which nodes and which save it is: as it says, or else as the plan and the root do."""
        from ckpt_core.levels.parity.objects import Kept, damaged

        try:
            about = Kept.read(self.far, copy).about
            return about.group, about.save
        except CkptError as exc:
            if not damaged(exc):
                raise
        group = group_of(self._plan)
        attempt = DirectoryFar(self._root, files=self.files).steps().get(copy.step)
        if group is None or attempt is None:
            text = (
                f"{self._root} does not hold step {copy.step} any more, or its nodes have not met"
            )
            raise NotCommitted(text, step=copy.step)
        return group, Copy(copy.step, attempt)

    def _root_of(self, part: str) -> Readable:
        if part == self._plan.part:
            return DirectoryFar(self._root, files=self.files)
        if all(part != node.part for node in self._plan.nodes):
            raise NotCommitted(f"{part} is no node of the job any more")
        return open_root(self._plan, part)


class _Afresh(DirectoryFar):
    """A copy that is made again while it is there: it is read where it is made, not where it lies."""

    def _folder(self, copy: Copy) -> Path:
        return self._inflight(copy)


def places_at(url: str, stack: ExitStack, *, pace: SharedPace, files: Files) -> Iterator[Place]:
    """What a URL names, open until the end of a stack; of parity, also what is kept for others.

    Raises:
        ConfigError: it is none; or the root has no plan of parity any more.
        Away: it cannot be listed.
    """
    if scheme_of(url) != PARITY:
        yield Place(url, stack.enter_context(open_far(url, files=files)), pace, files)
        return
    yield _Rebuilt(url, stack.enter_context(open_source(url, files=files)), pace, files)
    root = Path(url.partition("://")[2])
    plan = read_plan(root)
    if plan is None or plan.serve is None:
        raise ConfigError(f"{url}: the plan of that root is gone")
    yield KeptParity(root, plan, pace, files)
