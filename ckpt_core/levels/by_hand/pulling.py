"""One step of a level to a root now, by hand (`ckpt-core pull`); what a restore does when it needs one.

    .pulling/<attempt>/      in the root: what has come of the step; it stays when a pull is cut short

The next pull of the same save reads what is there, and fetches only what is missing or not right: every
chunk is verified, wherever it comes from. Then it is published like a save that has written its last byte.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ckpt_core.errors import (
    ConfigError,
    CorruptCheckpoint,
    NotCommitted,
    PersistError,
    RestoreError,
)
from ckpt_core.layout import MANIFEST_NAME, FileEntry, Manifest, RankManifest
from ckpt_core.levels.bring.fetching import PATIENCE_S, RANGE_BYTES, Wanted, fetch
from ckpt_core.levels.bring.named_bringing import Wish, bring_named
from ckpt_core.levels.errands import Progress
from ckpt_core.levels.far.door import Copy, Far
from ckpt_core.levels.far.looking import files_in, named_files
from ckpt_core.levels.far.opening import open_far
from ckpt_core.levels.named import NamedFiles
from ckpt_core.store import (
    INFLIGHT,
    StepStore,
    check_layout,
    ensure_dir,
    entries,
    opened_by_hand,
    remove_tree,
    step_path,
)
from ckpt_core.system.files import Files, advice
from ckpt_core.types import parse_step_dir, step_dir_name

PULLING = ".pulling"
"""The folder in the root; readers of steps ignore it."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came of it.

    Attributes:
        copy: which save it was.
        path: where it is.
        nbytes: of its shard files.
        resumed_bytes: of these, what an earlier pull had brought.
        already: it was there before, as long as it has to be.
    """

    copy: Copy
    path: Path
    nbytes: int = 0
    resumed_bytes: int = 0
    already: bool = False


def pull(
    url: str,
    name: str | None,
    root: Path,
    *,
    replace: bool,
    progress: Progress,
    patience_s: float = PATIENCE_S,
) -> Pulled:
    """Bring a step from a level and make it a committed step of a root, every byte verified.

    Locks the root, which is made if it is missing. When this raises, or is killed, nothing of the step can
    be seen there; what has come of it stays, and the next call goes on from there. A directory of files comes
    with the pointer that names it at the level; there the next call begins anew.

    Args:
        name: number of a step, or name of a directory of files; None: the newest step.
        replace: even if the root has that save, or another one of that name.
        patience_s: how long the level may be away.

    Raises:
        ConfigError: the root has another save of that name, or is kept for another node.
        NotCommitted: the level has nothing of that name (any more), or only a part of it.
        CorruptCheckpoint: what the level has is not what was saved.
        UnknownFormat: a newer release wrote it.
        RootBusy: somebody else writes to the root.
        PersistError, CommitError: the root cannot be written to.
        Away: the level cannot be reached, or this user may not read what is meant there.
    """
    check_layout(root)
    files, refused = _OverLeftovers(), set[str]()
    with open_far(url, files=files, refused=refused) as far:
        copy = _find(far, name, refused)
        if copy.directory is not None:
            path = root / copy.directory
            if _is_there(path, copy, far, replace=replace):
                return Pulled(copy, path, already=True)
            return _pull_directory(far, copy, root, progress)
        with opened_by_hand(root, files=files) as store:
            path = step_path(store.root, copy.step)
            if _is_there(path, copy, far, replace=replace):
                return Pulled(copy, path, already=True)
            return _Pulling(far, copy, store, files).run(progress, patience_s)


def _is_there(path: Path, copy: Copy, far: Far, *, replace: bool) -> bool:
    """Whether the root has this very save whole, and it is not to be brought anyway.

    Raises ConfigError if it has another one that is not to be replaced.
    """
    there = _attempt_of(path)
    if there not in (None, copy.attempt) and not replace:
        raise ConfigError(
            f"{path} is another save, {there}, than that at {far.url}, {copy.attempt}: --force replaces it. "
            "Nothing was changed",
            path=path,
        )
    return there == copy.attempt and not replace and _is_whole(path)


def _pull_directory(far: Far, copy: Copy, root: Path, progress: Progress) -> Pulled:
    assert copy.directory is not None
    pointers = [name for name, named in far.pointers().items() if named == copy.directory]
    sizes = [0]

    def tell(done: int, total: int) -> None:
        sizes[0] = total
        progress(done, total)

    wish = Wish(root, copy.directory, pointers[0] if pointers else None)
    if bring_named([far], wish, files=Files(), progress=tell).directory is None:
        raise _no_directory(far, copy)
    return Pulled(copy, root / copy.directory, sizes[0])


def _no_directory(far: Far, copy: Copy) -> NotCommitted:
    """Why there was nothing to bring of a directory that was listed."""
    found = {one.name: one for one in NamedFiles(far).look()}.get(copy.target)
    if copy.target not in far.directories():
        why = "is not there any more: it was retired there"
    elif found is None:
        why = "was not saved under that name: somebody has copied it"
    elif not found.here:
        why = "is only what some of the ranks wrote: other nodes have the rest"
    else:
        why = "has only just come there: try again"
    text = f"{copy.target} at {far.url} {why}. Nothing was brought"
    return NotCommitted(text, step=copy.step)


class _Pulling:
    def __init__(self, far: Far, copy: Copy, store: StepStore, files: _OverLeftovers) -> None:
        self._far, self._copy, self._store, self._files = far, copy, store, files
        self._folder = store.root / PULLING / copy.attempt

    def run(self, progress: Progress, patience_s: float) -> Pulled:
        with self._writing():
            left = self._leftovers()
        far = _Resumed(self._far, left)
        count = self._manifest().world_size
        wanted = Wanted(self._copy, self._folder, tuple(range(count)), count, patience_s)
        nbytes = fetch(cast("Far", far), wanted, progress, files=self._files)
        with self._writing():
            self._check_lengths()
            attempt = self._store.begin(self._copy.step, self._copy.attempt, brought=True)
            self._files.rmdir(attempt.path)
            self._files.rename(self._folder, attempt.path)
            # Order matters: all names in it are durable before it becomes a step.
            self._files.sync_dir(attempt.path)
            self._files.sync_dir(self._store.root / INFLIGHT)
        path = self._store.publish(attempt)
        with suppress(OSError):
            remove_tree(self._files, self._folder.parent)
        return Pulled(self._copy, path, nbytes, far.resumed_bytes)

    def _leftovers(self) -> dict[str, Path]:
        """Files of an earlier pull of this very save, of which each chunk can be told right from wrong."""
        ensure_dir(self._files, self._folder.parent)
        for entry in entries(self._folder.parent):
            if entry.name != self._copy.attempt:
                remove_tree(self._files, Path(entry.path))
        ensure_dir(self._files, self._folder)
        for name in entries(self._folder):
            if name.name.endswith(".json"):
                self._files.unlink(Path(name.path))
        there = {entry.name for entry in entries(self._folder)}
        if not there:
            return {}
        return {
            entry.name: self._folder / entry.name
            for entry in self._entries()
            if entry.name in there and _is_checked(entry)
        }

    def _entries(self) -> Iterator[FileEntry]:
        for row in self._manifest().ranks:
            data = self._far.read(self._copy, row.file, row.nbytes)
            yield from RankManifest.decode(data, path=self._folder / row.file).files

    def _manifest(self) -> Manifest:
        data = self._far.manifest(self._copy.target)
        if data is None:
            text = (
                f"step {self._copy.step} is not at {self._far.url} any more: it was retired there"
            )
            raise NotCommitted(text, step=self._copy.step)
        return Manifest.decode(data, path=Path(self._far.url) / self._copy.target)

    def _check_lengths(self) -> None:
        # By what the manifests name: others may have put files beside them.
        lengths = {row.file: row.nbytes for row in self._manifest().ranks}
        lengths |= {entry.name: entry.nbytes for entry in self._entries()}
        for name, nbytes in lengths.items():
            path = self._folder / name
            if path.stat().st_size != nbytes:
                got = f"{path.stat().st_size} bytes"
                text = f"{path}: expected {nbytes} bytes, got {got}: remove {self._folder} and pull again"
                raise CorruptCheckpoint(text, path=path, expected=f"{nbytes} bytes", got=got)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise PersistError(
                f"step {self._copy.step} cannot be brought to {self._store.root}: {exc.strerror or exc}. "
                f"Committed steps are safe, and the next pull goes on from here. {advice(exc)}",
                step=self._copy.step,
                path=self._store.root,
            ) from exc


class _OverLeftovers(Files):
    """Makes a file that an earlier pull has left by opening it: its bytes are still to be read."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        """As ever, but in the folder of pulls a file that is there is taken over."""
        if path.parent.parent.name != PULLING:
            return super().create(path, direct=direct)
        with suppress(FileNotFoundError):
            return self.open_write(path, direct=direct)
        return super().create(path, direct=direct)


class _Resumed:
    """A level, of which some ranges are read from what an earlier pull has left; once each.

    Whoever verifies a range and finds it wrong reads it again, and then gets what is at the level.
    """

    def __init__(self, far: Far, left: dict[str, Path]) -> None:
        self.resumed_bytes = 0
        self._far, self._left = far, left
        self._lock = threading.Lock()
        self._given: dict[str, list[tuple[int, int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._far, name)

    def read_blocks(self, copy: Copy, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """In blocks from here, if it is to be had here; else as it comes from the level."""
        if not self._is_left(name, offset, nbytes):
            return self._far.read_blocks(copy, name, offset, nbytes)
        return Far.read_blocks(cast("Far", self), copy, name, offset, nbytes)

    def places(self, copy: Copy, name: str) -> tuple[_Resumed]:
        """As `Readable.places`: this one, which then asks the level."""
        return (self,)

    def read_into(self, copy: Copy, name: str, buffer: memoryview, offset: int) -> None:
        """From here, unless that was given before; else from the level."""
        nbytes = len(buffer)
        if self._is_left(name, offset, nbytes) and _read_here(self._left[name], buffer, offset):
            with self._lock:
                self.resumed_bytes += nbytes
                self._given.setdefault(name, []).append((offset, offset + nbytes))
            return
        self._far.read_into(copy, name, buffer, offset)

    def _is_left(self, name: str, offset: int, nbytes: int) -> bool:
        """Whether a range was left here and is asked for the first time; else it was wrong."""
        if name not in self._left:
            return False
        with self._lock:
            given = self._given.get(name, ())
            again = any(first < offset + nbytes and offset < last for first, last in given)
            self.resumed_bytes -= nbytes if again else 0
        return not again


def _read_here(path: Path, buffer: memoryview, offset: int) -> bool:
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        return os.preadv(file.fileno(), [buffer], offset) == len(buffer)
    return False


def _find(far: Far, name: str | None, refused: Collection[str]) -> Copy:
    steps = far.steps()
    hidden = {step for one in refused if (step := parse_step_dir(one)) is not None}
    if (name is not None and not name.isdecimal()) or not (steps or hidden):
        return _find_directory(far, name, refused)
    number = max({*steps, *hidden}) if name is None else int(name)
    if number in hidden:
        far.manifest(step_dir_name(number))  # raises, and says that it may not be read
    if number not in steps:
        known = ", ".join(map(str, sorted(sorted(steps, key=lambda one: abs(one - number))[:4])))
        raise NotCommitted(f"step {number} is not at {far.url}; nearest: {known}", step=number)
    return Copy(number, steps[number])


def _find_directory(far: Far, name: str | None, refused: Collection[str]) -> Copy:
    there = far.directories()
    if name is not None and name in refused:
        far.manifest(name)  # raises, and says that it may not be read
    if name in there:
        return there[name]
    known = f"; it holds directories of files: {', '.join(sorted(there))}" if there else ""
    if name is None or name.isdecimal():
        raise NotCommitted(f"{far.url} holds no committed step{known}")
    raise NotCommitted(f"{name} is not at {far.url}{known}")


def _attempt_of(path: Path) -> str | None:
    """Of the step that is there; None: there is none."""
    with suppress(OSError, RestoreError):
        data = (path / MANIFEST_NAME).read_bytes()
        return Manifest.decode(data, path=path / MANIFEST_NAME).attempt
    return "which cannot be read" if os.path.lexists(path) else None


def _is_whole(path: Path) -> bool:
    """Whether the files of all ranks are there, each of its length. Their bytes are for `verify`."""
    with suppress(OSError, RestoreError):
        manifest = Manifest.decode((path / MANIFEST_NAME).read_bytes(), path=path / MANIFEST_NAME)
        named = named_files(path, manifest, files=Files())
        return (
            len(manifest.ranks) == manifest.world_size
            and named.items() <= dict(files_in(path)).items()
        )
    return False


def _is_checked(entry: FileEntry) -> bool:
    """Whether each of its chunks is verified before it counts, and read again if it is wrong."""
    return all(chunk.xxh3 is not None and chunk.nbytes <= RANGE_BYTES for chunk in entry.chunks)
