"""Steps small enough to write by the thousand, and file layers that misbehave under the real store."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from ckpt_core.layout import Manifest, RankEntry, rank_manifest_name, shard_name
from ckpt_core.store import Attempt, StepStore
from ckpt_core.system.files import Files

SHARD = shard_name(0, 0)
RANK = rank_manifest_name(0)
SPARE = 2


def make_store(
    root: Path, files: Files | None = None, *, keep_last: int | None = 2, spare_slots: int = SPARE
) -> StepStore:
    return StepStore(
        root,
        files=files or QuickFiles(),
        keep_last=keep_last,
        keep_every=None,
        spare_slots=spare_slots,
    )


def fill(store: StepStore, attempt: Attempt, *, mark: int, nbytes: int = 4096) -> None:
    """Write a small complete step, the way persist does: slot if any, data, manifests, syncs."""
    files, shard = store._files, attempt.path / SHARD
    data = bytes([mark]) * nbytes
    if store.take_slot(attempt, SHARD, nbytes):
        fd = files.open_write(shard)
        files.pwrite(fd, data, 0)
        files.truncate(fd, nbytes)
        files.sync(fd)
        files.close(fd)
    else:
        files.write_new(shard, data)
    rank = xxhash.xxh3_64_hexdigest(data).encode()
    files.write_new(attempt.path / RANK, rank)
    entry = RankEntry(0, RANK, len(rank), xxhash.xxh3_64_hexdigest(rank))
    manifest = Manifest(attempt.step, attempt.id, float(mark), (entry,), nbytes)
    files.write_new(attempt.path / "manifest.json", manifest.encode())


def save(store: StepStore, step: int, *, mark: int | None = None, nbytes: int = 4096) -> Path:
    attempt = store.begin(step)
    fill(store, attempt, mark=step % 251 if mark is None else mark, nbytes=nbytes)
    return store.publish(attempt)


def mark_of(path: Path) -> int:
    """The mark of a step directory, after a check that every byte of it is there and its own."""
    assert sorted(os.listdir(path)) == sorted([SHARD, RANK, "manifest.json"]), os.listdir(path)
    manifest = Manifest.decode((path / "manifest.json").read_bytes(), path=path)
    assert f"step-{manifest.step:012d}" == path.name
    mark = int(manifest.created_unix_s)
    data = (path / SHARD).read_bytes()
    assert data == bytes([mark]) * manifest.state_bytes
    assert (path / RANK).read_text() == xxhash.xxh3_64_hexdigest(data)
    return mark


class QuickFiles(Files):
    """Real files without the waiting: a kill loses nothing that was written, synced or not."""

    def sync_dir(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))

    def sync(self, fd: int) -> None:
        pass


class NoExchange(QuickFiles):
    """A filesystem without RENAME_EXCHANGE."""

    def exchange(self, first: Path, second: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class Killed(BaseException):
    """The process ended here."""


CHANGES = (
    "mkdir rmdir unlink rename exchange sync_dir create open_write allocate truncate pwrite sync"
).split()


def interrupted(base: type[Files], before: Callable[[str, tuple[Any, ...]], None]) -> Files:
    """Files of class `base` that call `before` ahead of every operation that changes something."""

    def wrap(name: str) -> Callable[..., Any]:
        def operation(self: Files, *args: Any, **options: Any) -> Any:
            before(name, args)
            return getattr(base, name)(self, *args, **options)

        return operation

    made = type("Interrupted", (base,), {name: wrap(name) for name in CHANGES})
    files: Files = made()
    return files


class KillSwitch:
    """Ends the process, as far as files can tell, ahead of operation `at`: none after it happens."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if self.at is not None and self.count >= self.at:
            raise Killed(f"ahead of operation {self.at}, {name}")
        self.count += 1


class Fault:
    """Makes one operation fail with an errno, whenever its name and a part of a path match.

    The first `after` of them succeed.
    """

    def __init__(self, name: str, code: int, *, part: str = "", times: int = 10**9) -> None:
        self.name, self.code, self.part, self.times = name, code, part, times
        self.armed, self.after = True, 0

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if not self.armed or name != self.name or self.times <= 0:
            return
        if any(self.part in str(arg) for arg in args):
            self.after -= 1
            if self.after >= 0:
                return
            self.times -= 1
            raise OSError(self.code, os.strerror(self.code), str(args[0]))


class OrderWatch:
    """Asserts the durable order of the store: it sees operations and knows what is synced.

    - names inside an attempt are synced before it gets a step's name, and slots it took as well;
    - nothing below a step that lost its name is changed before the loss is synced.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.dirty: set[Path] = set()
        self.unpublished: set[Path] = set()
        self.renames = 0

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        paths = [arg for arg in args if isinstance(arg, Path)]
        if name == "sync_dir":
            self._synced(paths[0])
            return
        for path in paths:
            for gone in self.unpublished:
                assert gone not in path.parents, f"{name} {path} before the loss of its name"
        if name in ("rename", "exchange"):
            self._renamed(name, *paths)
        self.dirty.update(path.parent for path in paths)

    def _renamed(self, name: str, source: Path, target: Path) -> None:
        self.renames += 1
        if self._is_step(target):
            assert source not in self.dirty, f"{source} published before a sync of its names"
            assert self.root / ".slots" not in self.dirty, "published before a sync of .slots"
        if self._is_step(source):
            self.unpublished.add(target)
        if name == "exchange" and self._is_step(target):
            self.unpublished.add(source)
        if source in self.unpublished and not self._is_step(target):
            self.unpublished.discard(source)
            self.unpublished.add(target)

    def _synced(self, path: Path) -> None:
        self.dirty.discard(path)
        if path == self.root and self.root / ".inflight" not in self.dirty:
            self.unpublished.clear()

    def _is_step(self, path: Path) -> bool:
        return path.parent == self.root and path.name.startswith("step-")


def faulty(root: Path, fault: Fault, base: type[Files] = QuickFiles) -> StepStore:
    """An open store with two steps, whose files fail as `fault` says from now on."""
    fault.armed = False
    store = make_store(root, interrupted(base, fault))
    store.open()
    save(store, 10)
    save(store, 20)
    fault.armed = True
    return store


def left(root: Path, name: str = ".inflight") -> list[str]:
    return sorted(os.listdir(root / name)) if (root / name).exists() else []


def save_quiet(store: StepStore, fault: Fault, step: int) -> None:
    fault.armed = False
    save(store, step)
    fault.armed = True
