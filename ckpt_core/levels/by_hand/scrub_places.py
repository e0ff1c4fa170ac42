"""Where a scrub reads: roots here and elsewhere, what parity gives back, and the parity that is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckpt_core.errors import CkptError, ConfigError, NotCommitted
from ckpt_core.layout import MANIFEST_NAME, retired_in
from ckpt_core.levels.agent.pace import Pace
from ckpt_core.levels.bring.sources import open_source
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Away, Copy, Far, Readable
from ckpt_core.levels.far.opening import open_far
from ckpt_core.levels.mailbox import Node, Plan, read_plan
from ckpt_core.levels.parity.opening import group_of, open_root, place_of
from ckpt_core.options import PARITY, scheme_of
from ckpt_core.store import committed_steps, entries, is_real_dir
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir, step_dir_name

if TYPE_CHECKING:
    from ckpt_core.levels.parity.objects import Group


KEPT = "kept"
"""Before `://` and a root: the copies that its node keeps for others."""


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


class ScrubPlace:
    """A root, here or elsewhere.

    Attributes:
        path: if it is a directory whose steps are replaced as a whole.
        part: whose copy it is, if it is another node's: only places of the same one have the same files.
        away: why it is no source, where that is known; "".
        unlisted: why it, or a directory of files in it, could not be listed, so that nothing of that is read;
            None: all was.
        there: what is whole there by its manifests, by its name.
    """

    part = away = ""
    unlisted: Away | None = None

    def __init__(
        self,
        url: str,
        far: Readable,
        pace: SharedPace,
        files: Files,
        refused: Collection[str] = (),
    ) -> None:
        """Lists it; `refused` is what its door was opened with, see `open_far`."""
        self.url, self.files, self._refused = url, files, refused
        self.far = cast("Far", _Paced(far, pace))
        self.path = Path(url) if scheme_of(url) is None else None
        try:
            self.there = _whole(far)
        except Away as exc:
            self.there, self.unlisted, self.away = {}, exc, str(exc)
        if refused:
            self.away = f"{url}: no permission to read {', '.join(sorted(refused))}"
        # Steps are found by their names, and told one by one; which save a directory is nobody knows.
        if any(parse_step_dir(name) is None for name in refused):
            self.unlisted = Away(f"{self.away}: whether that is sound is not known")

    def copies(self, others: Sequence[ScrubPlace]) -> list[Copy]:
        """All that is to be read there; where its manifest cannot be, as another place has it."""
        if self.unlisted is not None and not self._refused:
            return []
        found = dict(self.there)
        for name, known in () if self.path is None else self._unreadable(self.path, others):
            found.setdefault(name, known)
        return sorted(found.values(), key=lambda one: (one.directory or "", one.step))

    def unread(self, name: str) -> Path | None:
        """What has a name there and may be a step whose manifest cannot be read, if it lies here."""
        found = None if self.path is None else self.path / name
        return found if found is not None and is_real_dir(found) else None

    def _unreadable(self, path: Path, others: Sequence[ScrubPlace]) -> Iterator[tuple[str, Copy]]:
        known = {name: copy for one in others for name, copy in one.there.items()}
        for step in committed_steps(path):
            name = step_dir_name(step)
            yield name, known.get(name, Copy(step, ""))
        for name, copy in known.items():
            if copy.directory is not None and is_real_dir(path / name):
                yield name, copy


class KeptParity(ScrubPlace):
    """The parity that a node keeps, made again of the steps of the group where it is damaged.

    Args:
        root: of the node.
        plan: of that root.
    """

    def __init__(self, root: Path, plan: Plan, pace: SharedPace, files: Files) -> None:
        folder = place_of(plan)
        super().__init__(str(folder), DirectoryFar(folder, files=files), pace, files)
        self._root, self._plan, self._folder, self._pace = root, plan, folder, pace

    def _unreadable(self, path: Path, others: Sequence[ScrubPlace]) -> Iterator[tuple[str, Copy]]:
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
        from ckpt_core.levels.parity.encoding import How, Sources, encode
        from ckpt_core.levels.parity.parts import read_part

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


class _KeptCopy(ScrubPlace):
    """What this node keeps of another one, read where it lies."""

    def __init__(self, folder: Path, node: Node, pace: SharedPace, files: Files) -> None:
        super().__init__(str(folder), _KeptFar(folder, node.copy, files=files), pace, files)
        self.path, self.part, self._folder = None, node.part, folder

    def copies(self, others: Sequence[ScrubPlace]) -> list[Copy]:
        """As `ScrubPlace.copies`."""
        names = [entry.name for entry in entries(self._folder) if entry.name not in self.there]
        steps = {name: step for name in names if (step := parse_step_dir(name)) is not None}
        lost = [Copy(step, "") for name, step in steps.items() if self.unread(name) is not None]
        return sorted(
            (*self.there.values(), *lost), key=lambda one: (one.directory or "", one.step)
        )

    def unread(self, name: str) -> Path | None:
        """As `ScrubPlace.unread`; not what is on its way there, or has been taken away."""
        with suppress(OSError):
            data = (self._folder / name / MANIFEST_NAME).read_bytes()
            return None if retired_in(data) else self._folder / name
        return None


class _KeptFar(DirectoryFar):
    """A copy as it lies on this machine; files are put by the agent that serves it, as those of its owner."""

    def __init__(self, folder: Path, url: str, *, files: Files) -> None:
        super().__init__(folder, files=files)
        self._served_at = url

    def _folder(self, copy: Copy) -> Path:
        return self._root / copy.target / copy.folder

    def put(self, copy: Copy, name: str, blocks: Iterable[memoryview], nbytes: int) -> None:
        with open_far(self._served_at) as far:
            far.put(copy, name, blocks, nbytes)


class _Source(ScrubPlace):
    """What is only a source for others, and asked once something is damaged: its own node reads it.

    Args:
        part: as `ScrubPlace.part`.
        opens: opens it.
    """

    def __init__(
        self,
        url: str,
        opens: Callable[[], Readable],
        stack: ExitStack,
        pace: SharedPace,
        *,
        part: str = "",
    ) -> None:
        self.url, self.part, self.path = url, part, None
        self._opens, self._stack, self._pace = opens, stack, pace

    @cached_property
    def there(self) -> dict[str, Copy]:  # type: ignore[override]
        """As `ScrubPlace.there`; nothing, where it does not answer."""
        try:
            far = self._stack.enter_context(self._opens())
            self.far = cast("Far", _Paced(far, self._pace))
            return _whole(self.far)
        except Away as exc:
            self.away = f"{self.url} does not answer: scrub there, too, or here again. {exc}"
            return {}

    def copies(self, others: Sequence[ScrubPlace]) -> list[Copy]:
        """None."""
        return []


def places_at(
    url: str, stack: ExitStack, *, pace: SharedPace, files: Files
) -> Iterator[ScrubPlace]:
    """What a URL names, open until the end of a stack; of parity, also what is kept for others.

    Raises:
        ConfigError: it is none; or the root has no plan of parity any more.
    """
    root = Path(url.partition("://")[2])
    if scheme_of(url) == KEPT:
        yield from _kept(root, stack, pace=pace, files=files)
        return
    if scheme_of(url) != PARITY:
        refused: set[str] = set()
        far = stack.enter_context(open_far(url, files=files, refused=refused))
        yield ScrubPlace(url, far, pace, files, refused)
        return
    yield _Source(url, partial(open_source, url, files=files), stack, pace)
    yield KeptParity(root, _serving_plan(url, root), pace, files)


def kept_for(plan: Plan) -> list[Node]:
    """The nodes whose whole copies the node of a plan keeps."""
    return [node for node in plan.nodes if node.keeper and node.keeper == plan.part]


def _kept(root: Path, stack: ExitStack, *, pace: SharedPace, files: Files) -> Iterator[ScrubPlace]:
    plan = _serving_plan(f"{KEPT}://{root}", root)
    assert plan.serve is not None
    for node in kept_for(plan):
        yield _KeptCopy(Path(plan.serve.dir, plan.run, node.part), node, pace, files)
        opens, part = partial(open_root, plan, node.part), node.part
        yield _Source(f"{part} at {node.address}", opens, stack, pace, part=part)


def _serving_plan(url: str, root: Path) -> Plan:
    plan = read_plan(root)
    if plan is None or plan.serve is None:
        raise ConfigError(f"{url}: the plan of that root is gone")
    return plan


def _whole(far: Readable) -> dict[str, Copy]:
    steps = [Copy(step, attempt) for step, attempt in far.steps().items()]
    return {copy.target: copy for copy in (*steps, *far.directories().values())}
