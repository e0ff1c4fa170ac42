"""Which tag is loaded: the one that is asked for, or the newest whole one. Every byte is compared first.

    `latest` names a whole tag                  that one
    it is damaged, or not there                 the newest whole one, with a warning
    `latest` is missing, empty or garbage       the newest whole one, with a warning
    nothing is whole                            CorruptCheckpoint; with nothing there at all: None
    tag=                                        that one, or CorruptCheckpoint that names the newest whole one
    a tag of plain DeepSpeed                    as DeepSpeed does, unchecked
    levels, and anything but the first case     what they have is brought back first, if it is newer than the
                                                newest whole tag here, or the one that is asked for

The first rank looks, and tells the others: they might, a moment later, find something else.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt_core import (
    Checkpointer,
    CkptError,
    CorruptCheckpoint,
    Level,
    NotCommitted,
    RestoreError,
    bring_directory,
    committed_directories,
    verify,
)
from ckpt_deepspeed.engine import LATEST

Levels = Sequence[Level | Mapping[str, Any] | str]
MANIFESTS = ("manifest.json", "rank-*.json")
_SHOWN = 80
_ASIDE = ".inflight/*.replaced"
"""What a kill has left between the two renames that replace a directory: docs/format.md."""


def choose(
    load_dir: str | os.PathLike[str],
    tag: object = None,
    *,
    per_node: bool = False,
    levels: Levels = (),
) -> str | None:
    """The tag to load; all ranks call it and get the same answer.

    Args:
        tag: what the caller asks for; None: the one that the file `latest` names, or the newest.
        per_node: `load_dir` is a directory of each node; a tag counts if it is whole on all.
        levels: further roots that may have what is damaged or missing here.

    Returns:
        A tag that is whole; or, unchecked, one that was not saved by this engine; None if there is none.

    Raises:
        CorruptCheckpoint: the tag that was asked for is damaged, or all are.
        NotCommitted: there is no tag of that name.
        RestoreError: the directory cannot be read, a rank has no memory or thread to read with, or nothing is
            whole here and a level cannot be asked.
        RootBusy, PersistError, CommitError: a tag cannot be brought back.
    """
    looks = _Looks(Path(load_dir), per_node, levels)
    return looks.newest() if tag is None else looks.asked_for(str(tag))


def is_missing(load_dir: str | os.PathLike[str], tag: object = None) -> bool:
    """Whether there is no such tag, or, with none, none that `latest` names; the same on all ranks."""
    root = Path(load_dir)
    if tag is None:
        return bool(_shared(lambda: _named(root)[1] is not None))
    return bool(_shared(lambda: not os.path.isdir(_brought_back(root, str(tag)))))


@dataclass(frozen=True, slots=True)
class _Looks:
    """The ranks look at one directory together."""

    root: Path
    per_node: bool
    levels: Levels = ()

    def asked_for(self, tag: str) -> str:
        there, ours = _shared(lambda: _kind(_brought_back(self.root, tag)))
        if there and not ours:
            return tag
        problem = self._problem(tag) if there else None
        if there and problem is None:
            return tag
        if self._brought(directory=tag) is not None:
            return tag
        whole, _, _ = self._whole(tag)
        hint = "no other tag is whole" if whole is None else f"the newest whole tag is {whole!r}"
        if not there:
            raise NotCommitted(
                f"there is no tag {tag!r} in {self.root}; {hint}", path=self.root / tag
            )
        raise CorruptCheckpoint(
            f"tag {tag!r} in {self.root} is damaged: {problem}. It was not loaded; {hint}",
            path=self.root / tag,
        )

    def newest(self) -> str | None:
        named, problem, ours = _shared(lambda: _named_and_kind(self.root))
        if problem is None:
            if not ours:
                return str(named)
            found = self._problem(named)
            if found is None:
                return str(named)
            problem = f"tag {named!r} in {self.root} is damaged: {found}"
        whole, aside, others = self._whole(named)
        empty = _shared(lambda: _is_empty(self.root))
        newer = None if aside else whole
        brought = self._brought(pointer=LATEST, newer_than=newer, must=whole is None)
        if brought is not None:
            if not empty:
                _warn(f"{problem}. Loading {brought!r} instead, which a further level had")
            return brought
        problem = "; ".join([problem, *others])
        if whole is not None:
            _warn(f"{problem}. Loading {whole!r} instead, the newest tag that is whole{aside}")
            return whole
        if empty:
            return None
        raise CorruptCheckpoint(
            f"{problem}. No other tag of this engine is whole; nothing was loaded. Name a tag with "
            f"load_checkpoint(tag=)",
            path=self.root,
        )

    def _whole(self, but: str | None) -> tuple[str | None, str, list[str]]:
        """The newest whole tag that `latest` named, or else the newest of the others; what is to be told of
        one of these; and what is wrong with those before it.
        """
        pointed, others, unread = _shared(lambda: _listed(self.root, but))
        problems = [f"tag {name!r} lacks files, or cannot be read" for name in unread]
        for name in [*pointed, *others]:
            problem = self._problem(name)
            if problem is None:
                aside = "" if name in pointed else f": {LATEST!r} was never to name it"
                return name, aside, problems
            problems.append(f"tag {name!r} is damaged too: {problem}")
        return None, "", problems

    def _brought(
        self,
        *,
        directory: str | None = None,
        pointer: str | None = None,
        newer_than: str | None = None,
        must: bool = False,
    ) -> str | None:
        """The tag that levels had, and that is whole here now; None where they have none that is newer.

        Raises:
            RestoreError: levels cannot be asked, and `must`: there is nothing else.
        """
        if not self.levels:
            return None
        how = {"directory": directory, "pointer": pointer, "newer_than": newer_than}

        def bring(beat: Callable[[], None]) -> tuple[str | None, str | None]:
            try:
                return bring_directory(self.root, self.levels, **how, beat=beat), None
            except RestoreError as exc:
                if must:
                    raise
                return None, str(exc)

        name, problem = _after_long(bring)
        if problem is not None:
            _warn(problem)
        return None if name is None else str(name)

    def _problem(self, tag: str) -> str | None:
        """What is wrong with a tag; the ranks that see the same files share them.

        Raises:
            RestoreError: a rank has no memory or no thread to read with, which says nothing of the tag.
        """
        share = self._share()
        found = together(lambda: _first_problem(self.root / tag, share))
        return next((text for text in found if text is not None), None)

    def _share(self) -> tuple[int, int]:
        rank, ranks = _rank_and_ranks()
        if not self.per_node:
            return rank, ranks
        hosts = _everyone(socket.gethostname())
        here = [member for member in range(ranks) if hosts[member] == hosts[rank]]
        return here.index(rank), len(here)


def _listed(root: Path, but: str | None) -> tuple[list[str], list[str], list[str]]:
    """Tags that `latest` was to name, the others, each newest first, and those of this engine that are no
    more to be seen as such. With save_latest=False tags hold what no run is to go on from.
    """
    names = [name for name in committed_directories(root) if name != but]
    pointed = [name for name in committed_directories(root, pointer=LATEST) if name in names]
    others = [name for name in names if name not in pointed]
    return pointed, others, sorted(_ours(root).difference(names, [but]))


def _named(root: Path) -> tuple[str | None, str | None]:
    """What `latest` names, and why that cannot be loaded; None: nothing is known against it."""
    path = root / LATEST
    try:
        text = path.read_bytes().decode().strip()
    except FileNotFoundError:
        return None, f"{root} has no file {LATEST!r}"
    except (OSError, UnicodeDecodeError) as exc:
        return None, f"{path} cannot be read: {exc}"
    shown = repr(text[:_SHOWN])
    if not text:
        return None, f"{path} is empty"
    # A kill may have left nothing of that name, where a directory takes two renames to replace.
    if not os.path.isdir(_brought_back(root, text)):
        return text, f"{path} names {shown}, and there is no such tag"
    return text, None


def _named_and_kind(root: Path) -> tuple[str | None, str | None, bool]:
    """As `_named`, and whether that is ours."""
    name, problem = _named(root)
    return name, problem, problem is None and name is not None and _is_ours(root / name)


def _brought_back(root: Path, tag: str) -> Path:
    """The directory of a tag. If it is missing, and something lies aside that may be it, `root` is repaired
    first, unless somebody saves to it: that takes the lock of those who do.
    """
    path = root / tag
    if not os.path.isdir(path) and any(root.glob(_ASIDE)):
        with contextlib.suppress(CkptError):
            Checkpointer(root).close()
    return path


def _kind(path: Path) -> tuple[bool, bool]:
    """Whether there is such a directory, and whether it is ours."""
    return os.path.isdir(path), _is_ours(path)


def _is_ours(path: Path) -> bool:
    """Whether this engine has made a directory, whatever became of its files since."""
    with contextlib.suppress(OSError, ValueError):
        return any(True for pattern in MANIFESTS for _ in path.glob(pattern))
    return False


def _is_empty(root: Path) -> bool:
    """Whether nothing says that somebody has ever saved here by this engine."""
    if os.path.lexists(root / LATEST):
        return False
    return not _ours(root)


def _ours(root: Path) -> set[str]:
    """Names of the directories that this engine has made in `root`."""
    if not root.is_dir():
        return set()
    return {path.name for path in root.iterdir() if path.is_dir() and _is_ours(path)}


def _first_problem(path: Path, share: tuple[int, int]) -> str | None:
    try:
        # Each rank reads more than its share of the files next.
        report = verify(path, share=share, keep_cached=True)
    except (NotCommitted, OSError) as exc:
        return str(exc)
    if report.ok:
        return None
    bad = [f"{bad.file}: bytes of chunk {bad.index} differ" for bad in report.bad_chunks]
    return [*report.problems, *bad][0]


# -- ranks -----------------------------------------------------------------------------------------


def together(act: Callable[[], Any]) -> list[Any]:
    """Do something on every rank before a load; what it gives on each of them, and what it raises on all.

    Raises:
        CkptError: what it raised here.
        RestoreError: what it raised on another rank.
    """
    mine: Any = None
    error: CkptError | None = None
    try:
        mine = act()
    except CkptError as exc:
        error = exc
    found = _everyone([None if error is None else str(error), mine])
    if error is not None:
        raise error
    for rank, (text, _) in enumerate(found):
        if text is not None:
            raise RestoreError(f"rank {rank}: {text}. Nothing was loaded", rank=rank)
    return [one for _, one in found]


def _shared(look: Callable[[], Any]) -> Any:
    """What the first rank finds, on all; what it raises there, on all as well."""
    rank, ranks = _rank_and_ranks()
    told: list[Any] = [None, None]
    mine: Exception | None = None
    if rank == 0:
        try:
            told = [look(), None]
        except Exception as exc:  # the others wait for an answer, whatever it is
            mine, told = exc, [None, f"{type(exc).__name__}: {exc}"]
    if ranks > 1:
        dist.broadcast_object_list(told, src=0)
    if mine is not None:
        raise mine
    if told[1] is not None:
        raise RestoreError(f"rank 0: {told[1]}. Nothing was loaded", rank=0)
    return told[0]


def _after_long(act: Callable[[Callable[[], None]], Any]) -> Any:
    """As `_shared`, for what takes long: `act` is given what tells the other ranks to wait on.

    It is to be called more often than a collective may take.
    """
    rank, ranks = _rank_and_ranks()
    if ranks == 1:
        return act(lambda: None)

    def tell(*, waits: bool) -> None:
        dist.broadcast_object_list([waits], src=0)

    def led() -> Any:
        try:
            return act(lambda: tell(waits=True))
        finally:
            tell(waits=False)

    waiting = [rank != 0]
    while waiting[0]:
        dist.broadcast_object_list(waiting, src=0)
    return _shared(led)


def _everyone(mine: Any) -> list[Any]:
    """What every rank says, in the order of ranks."""
    ranks = _rank_and_ranks()[1]
    if ranks == 1:
        return [mine]
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, mine)
    return found


def _rank_and_ranks() -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _warn(text: str) -> None:
    if _rank_and_ranks()[0] == 0:
        warnings.warn(text, stacklevel=5)
