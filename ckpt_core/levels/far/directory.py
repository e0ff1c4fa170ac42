"""`DirectoryFar`: a directory as a further level. It has the format of every root, and all readers read it.

    .inflight/<attempt>/     files of a copy that is under way, each whole and durable; `.part` is being made
    step-<N>/                published by one rename or exchange, under the root's lock, held for a moment
    .levels/<word>           words, each replaced by a rename under a lock of their own

Agents of several nodes may send to it at once, and a Checkpointer may have it as its first root at another
time (`first_root` of its word). So nothing here repairs the whole root: what others have under way stays, and
where a repair of theirs deletes a copy of ours, that copy begins anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_core.errors import CkptError, CorruptCheckpoint, PersistError
from ckpt_core.layout import MANIFEST_NAME, Manifest, is_directory_name
from ckpt_core.levels.far.aside import Aside
from ckpt_core.levels.far.door import Away, Copy, Far, Word
from ckpt_core.levels.far.linking import PART, link, sync_below
from ckpt_core.levels.far.looking import (
    HOPELESS,
    Looked,
    check_place,
    files_in,
    find_disk,
    named_files,
    read_whole,
)
from ckpt_core.levels.far.words import Words, held
from ckpt_core.store import (
    INFLIGHT,
    Attempt,
    KeptSteps,
    RootLock,
    bring_back,
    ensure_dir,
    ensure_root,
    entries,
    file_path,
    find_root,
    give_up_replaced,
    is_real_dir,
    mount_of,
    pinned_steps,
    place,
    sync_names,
    take_away,
)
from ckpt_core.system.files import Files, advice
from ckpt_core.types import Destination, parse_step_dir

_BUSY_S = 20.0
"""How long a publish or a retirement waits for somebody else's lock on the root."""


class DirectoryFar(Far):
    """A level that is a directory. Also how the agent looks at first roots, which it never changes."""

    def __init__(
        self,
        root: Path,
        *,
        files: Files,
        busy_s: float = _BUSY_S,
        mounted: str = "",
        refused: set[str] | None = None,
    ) -> None:
        """Writes nothing, and the directory may be missing.

        Args:
            busy_s: how long to wait for the lock of the root where somebody else holds it.
            mounted: see `Far`.
            refused: see `open_far`.
        """
        self.url = str(root)
        self._root = find_root(root, above=False)
        self._files = files
        self._busy_s = busy_s
        self._looked = Looked(self._root, files=files, refused=refused)
        self._words = Words(self._root, files=files)
        self._aside = Aside(self._root, url=self.url, files=files)
        self.mounted = mounted

    # -- reading ---------------------------------------------------------------------------------

    def steps(self) -> dict[int, str]:
        """As `Far.steps`."""
        with self._asked("list its steps"):
            found = {}
            for name in self._listed():
                step = parse_step_dir(name)
                manifest = None if step is None else self._looked.listed(name)
                if step is not None and manifest is not None:
                    found[step] = manifest.attempt
            return dict(sorted(found.items()))

    def directories(self) -> dict[str, Copy]:
        """As `Far.directories`."""
        with self._asked("list its directories"):
            found = {}
            for name in self._listed():
                if is_directory_name(name) and (manifest := self._looked.listed(name)):
                    found[name] = Copy(manifest.step, manifest.attempt, name)
            return found

    def manifest(self, target: str) -> bytes | None:
        """As `Far.manifest`."""
        with self._asked(f"read the manifest of {target}"):
            if self._looked.manifest(target) is None:
                return None
            return self._looked.read(target)

    def files(self, copy: Copy) -> dict[str, int]:
        """As `Far.files`."""
        with self._asked("list the files of a copy", step=copy.step):
            found = dict(files_in(self._folder(copy)))
            found.pop(MANIFEST_NAME, None)
            return found

    def read_into(self, copy: Copy, name: str, buffer: memoryview, offset: int) -> None:
        """As `Far.read_into`."""
        with self._asked(f"read {name}", step=copy.step):
            fd = self._files.open_read(self._folder(copy) / name)
            try:
                done = self._files.fill(fd, buffer, offset)
            finally:
                self._files.close(fd)
        if done < len(buffer):
            text = f"{self.url}: {name} of {copy.target} ends before {offset + len(buffer)} bytes"
            raise Away(text, step=copy.step)

    # -- writing ---------------------------------------------------------------------------------

    def put(self, copy: Copy, name: str, blocks: Iterable[memoryview], nbytes: int) -> None:
        """As `Far.put`."""
        with self._asked(f"write {name}", step=copy.step):
            attempt = self._begin(copy)
            path = file_path(self._files, attempt, name)
            fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
            try:
                self._write(fresh, blocks, nbytes)
                self._files.rename(fresh, path)
            except BaseException:
                with suppress(OSError):
                    self._files.unlink(fresh)
                raise
            sync_below(self._files, path, attempt.path)

    def take_over(self, copy: Copy, name: str, nbytes: int, *, before: tuple[Copy, str]) -> bool:
        """As `Far.take_over`: a link."""
        earlier, known = before
        with self._asked(f"link {name}", step=copy.step):
            source, attempt = self._root / earlier.target / known, self._begin(copy)
            path = file_path(self._files, attempt, name)
            done = link(self._files, source, path, nbytes=nbytes, is_it=lambda: self._has(earlier))
            if done:
                sync_below(self._files, path, attempt.path)
            return done

    def discard(self, copy: Copy, name: str) -> None:
        """As `Far.discard`."""
        with self._asked(f"delete {name}", step=copy.step), suppress(FileNotFoundError):
            self._files.unlink(file_path(self._files, self._begin(copy), name))

    def publish(self, copy: Copy, manifest: bytes, *, replaces: str | None = None) -> bool:
        """As `Far.publish`. Waits while somebody else has the root locked, and then says who it is."""
        there = Manifest.decode(manifest, path=self._root / copy.target / MANIFEST_NAME)
        with self._asked("publish", step=copy.step):
            # Not under the lock, which others wait for: they may be those of a thousand ranks.
            named = named_files(self._inflight(copy), there, files=self._files)
            with self._names():
                present = self._present(copy)
                if present not in (None, replaces):
                    done, left = present == copy.attempt, None
                else:
                    done, left = True, self._place(copy, named, manifest)
            self._aside.delete(left if left is not None else self._inflight(copy))
            return done

    def point(self, pointer: str, directory: str) -> None:
        """As `Far.point`."""
        with self._asked(f"move {pointer}"), self._names():
            if not is_real_dir(self._root / directory):
                raise Away(f"{self.url}: {directory} is not there, so that {pointer} was not moved")
            ensure_dir(self._files, self._root / INFLIGHT)
            fresh = self._root / INFLIGHT / f".{secrets.token_hex(8)}{PART}"
            self._files.write_new(fresh, directory.encode())
            self._files.rename(fresh, self._root / pointer)  # Commit point of the pointer.
            self._files.sync_dir(self._root)

    def pointers(self) -> dict[str, str]:
        """As `Far.pointers`."""
        with self._asked("read its pointers"):
            found = {}
            for entry in entries(self._root):
                if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                    name = self._pointed(Path(entry.path))
                    if name is not None:
                        found[entry.name] = name
            return found

    def retire(self, targets: Collection[str]) -> None:
        """As `Far.retire`. Steps that are pinned here stay."""
        with self._asked("retire"):
            with self._names():
                there = [name for name in targets if is_real_dir(self._root / name)]
                steps = [step for name in there if (step := parse_step_dir(name)) is not None]
                kept = pinned_steps(self._root)
                # Order matters: once a step is gone, an older save of it that a kill has left would have
                # its name again.
                gone = give_up_replaced(self._root, files=self._files)
                left = take_away(self._root, [s for s in steps if s not in kept], files=self._files)
                gone += left.gone.values()
                gone += [self._aside.retire(name) for name in there if parse_step_dir(name) is None]
                # Order matters: the names are gone for good before any of the bytes is.
                sync_names(self._files, self._root)
            for path in gone:
                self._aside.delete(path)
            for error in left.stuck.values():
                raise error

    def drop(self, copy: Copy) -> None:
        """As `Far.drop`."""
        self._aside.delete(self._inflight(copy))

    def sweep(self, keep: Collection[Copy]) -> None:
        """As `Far.sweep`."""
        mine = {copy.attempt for copy in keep}
        with self._asked("clear up"):
            if not entries(self._root / INFLIGHT):
                return
            with self._names():
                sync_names(self._files, self._root)
                for entry in entries(self._root / INFLIGHT):
                    path = Path(entry.path)
                    if entry.name not in mine and self._aside.is_over(path):
                        self._aside.delete(path)

    # -- words, pins, life -------------------------------------------------------------------------

    def read_word(self, name: str) -> Word | None:
        """As `Far.read_word`."""
        with self._asked(f"read {name}"):
            return self._words.read(name)

    def write_word(self, name: str, data: bytes, *, over: str | None) -> str:
        """As `Far.write_word`."""
        with self._asked(f"write {name}"):
            self._make()
            return self._words.write(name, data, over=over)

    def pins(self, among: Collection[int] | None = None) -> frozenset[int]:
        """As `Far.pins`."""
        with self._asked("read its pins"):
            found = pinned_steps(self._root)
            return found if among is None else found.intersection(among)

    def pin(self, step: int, pinned: bool) -> None:
        """As `Far.pin`.

        Raises:
            NotCommitted: the step is not there, and none that is still to come.
        """
        with self._asked("pin a step" if pinned else "unpin a step", step=step):
            if pinned:
                self._make()
            kept = KeptSteps(self._root, files=self._files)
            kept.pin(step) if pinned else kept.unpin(step)

    def check(self) -> None:
        """As `Far.check`."""
        self.mounted = find_disk(self._root, self.mounted, url=self.url)
        check_place(self._root, url=self.url, files=self._files)

    # -- inside ----------------------------------------------------------------------------------

    def _listed(self) -> list[str]:
        names = [entry.name for entry in entries(self._root)]
        if names and not self.mounted:
            self.mounted = mount_of(self._root)
        self._looked.forget_others(names)
        return names

    def _make(self) -> None:
        """Have the root there."""
        self.mounted = find_disk(self._root, self.mounted, url=self.url)
        ensure_root(self._files, self._root)

    def _inflight(self, copy: Copy) -> Path:
        return self._root / INFLIGHT / copy.attempt

    def _folder(self, copy: Copy) -> Path:
        """Where the files of a copy lie now."""
        return self._looked.home(copy) or self._inflight(copy)

    def _has(self, copy: Copy) -> bool:
        return self._looked.home(copy) is not None

    def _attempt(self, copy: Copy) -> Attempt:
        to = None if copy.directory is None else Destination(copy.directory)
        return Attempt(copy.attempt, copy.step, self._inflight(copy), to)

    def _begin(self, copy: Copy) -> Attempt:
        attempt = self._attempt(copy)
        if not is_real_dir(attempt.path):
            self._make()
            ensure_dir(self._files, attempt.path.parent)
            self._files.sync_dir(self._root)
            ensure_dir(self._files, attempt.path)
            self._files.sync_dir(attempt.path.parent)
        return attempt

    def _write(self, path: Path, blocks: Iterable[memoryview], nbytes: int) -> None:
        fd = self._files.create(path)
        try:
            self._files.allocate(fd, nbytes)
            done = 0
            for block in blocks:
                self._files.pwrite(fd, block, done)
                # Written out little by little: a sync of everything at once would hold up whoever saves.
                self._files.start_writeback(fd, done, len(block))
                done += len(block)
            assert done == nbytes, f"{path.name}: {done} bytes of {nbytes}"
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    @contextmanager
    def _names(self) -> Iterator[None]:
        """The right to change names, and every name in its place that a kill has left aside."""
        self._make()
        with held(RootLock(self._root, files=self._files), busy_s=self._busy_s, url=self.url):
            bring_back(self._root, files=self._files)
            yield

    def _present(self, copy: Copy) -> str | None:
        """The attempt that has the name of a copy."""
        path = self._root / copy.target
        if not is_real_dir(path):
            return None  # a file or a link of that name is found by `place`
        try:
            return self._looked.fresh(copy.target).attempt
        except FileNotFoundError as exc:
            if copy.directory is None:
                self._aside.quarantine(copy.target)
                return None
            text = f"{path} is somebody else's: it has no {MANIFEST_NAME}. Move it away"
            raise Away(f"{self.url}: {text}", hopeless=True, step=copy.step) from exc
        except CorruptCheckpoint:
            self._aside.quarantine(copy.target)
            return None
        except CkptError as exc:
            raise Away(str(exc), hopeless=True, step=copy.step) from exc

    def _place(self, copy: Copy, named: Mapping[str, int], manifest: bytes) -> Path | None:
        """Publish; what had the name before.

        Args:
            named: as from `named_files`.
        """
        attempt = self._attempt(copy)
        # Order matters: looked at under the lock. A repair of this root, by whoever had it before, deletes
        # what is under way, files that were looked at as well.
        found = dict(files_in(attempt.path))
        missing = [name for name, nbytes in named.items() if found.get(name) != nbytes]
        if missing:
            text = f"{self.url}: {missing[0]} of {copy.target} is gone: the copy begins anew"
            raise Away(text, step=copy.step)
        for path in attempt.path.rglob(f".*{PART}"):
            with suppress(FileNotFoundError):
                self._files.unlink(path)
        fresh = attempt.path / f".{MANIFEST_NAME}.{secrets.token_hex(4)}{PART}"
        self._files.write_new(fresh, manifest)
        self._files.rename(fresh, attempt.path / MANIFEST_NAME)
        # Order matters: names in the attempt are durable before it has the step's name.
        self._files.sync_dir(attempt.path)
        return place(self._files, attempt, self._root / copy.target)

    def _pointed(self, path: Path) -> str | None:
        data = read_whole(path, 1000, files=self._files)
        with suppress(UnicodeDecodeError):
            name = (data or b"").decode()
            if is_directory_name(name) and is_real_dir(self._root / name):
                return name
        return None

    @contextmanager
    def _asked(self, doing: str, *, step: int | None = None) -> Iterator[None]:
        """The one boundary at which trouble with this directory becomes `Away`."""
        try:
            yield
        except OSError as exc:
            text = f"{self.url}: could not {doing}: {exc.strerror or exc}. Nothing is lost. {advice(exc)}"
            raise Away(text, hopeless=exc.errno in HOPELESS, step=step) from exc
        except PersistError as exc:
            raise Away(f"{self.url}: could not {doing}: {exc}", step=step) from exc
