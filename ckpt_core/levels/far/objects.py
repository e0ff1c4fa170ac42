"""`ObjectFar`: a level in an object store, through obstore.

    <prefix>/step-000000000100/0f3a91bc/shard-00000-0.safetensors  under their attempt, first
    <prefix>/step-000000000100/0f3a91bc/rank-00000.json            then these
    <prefix>/step-000000000100/manifest.json                       last, with a condition: the commit point
    <prefix>/latest  run.json  lease.json  .pins/100               pointers, words, pins

Invariant: no key under an attempt is ever written with other bytes, and a manifest is written only with the
condition that its place is as it was seen. So a request that comes late, twice, or from an agent that is
believed dead harms nothing.
A step that is taken away leaves a mark in the manifest's place for an hour, so that nobody who has slept
meanwhile puts the manifest of files that are gone.
A list may lag behind what is written: it only says where to look. What counts is read by key.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from ckpt_core.layout import MANIFEST_NAME, is_directory_name, retired_mark
from ckpt_core.levels.far.bucket import CREATE, Bucket, Refused
from ckpt_core.levels.far.door import Away, Conflict, Copy, Far, Word
from ckpt_core.levels.far.leftovers import abort_leftovers
from ckpt_core.levels.far.manifest_places import (
    ManifestPlace,
    ManifestPlaces,
    manifest_key,
    may_publish,
)
from ckpt_core.system.threads import own_lock
from ckpt_core.types import parse_step_dir

REQUEST_S = 60.0
"""Longest time for one request, and after which none is repeated."""

_RETRIES = 4
_AT_ONCE = 8
_TRIES = 8
_YOUNG = timedelta(hours=1)
_PINS = ".pins"
_FOLDER = re.compile(r"[0-9a-f]{8}")

T = TypeVar("T")
R = TypeVar("R")


class ObjectFar(Far):
    """A level in an object store."""

    def __init__(self, url: str, *, request_s: float = REQUEST_S) -> None:
        self.url = url
        self._bucket = Bucket(url, request_s=request_s, retries=_RETRIES)
        self._lock = own_lock()
        self._places = ManifestPlaces(self._bucket)
        self._put: dict[tuple[str, str], dict[str, int]] = {}
        """Files that this process has put: a list may not show them yet."""
        self._published: set[str] = set()
        """Likewise."""
        self._threads: ThreadPoolExecutor | None = None

    # -- reading ---------------------------------------------------------------------------------

    def folder(self, copy: Copy) -> str:
        """Where the files of a copy lie."""
        return f"{copy.target}/{copy.folder}"

    def steps(self) -> dict[int, str]:
        names = [name for name in self._targets() if parse_step_dir(name) is not None]
        copies = self._each(self._whole, names)
        return {copy.step: copy.attempt for copy in sorted(copies, key=lambda one: one.step)}

    def directories(self) -> dict[str, Copy]:
        names = [name for name in self._targets() if is_directory_name(name)]
        return {copy.target: copy for copy in self._each(self._whole, names)}

    def manifest(self, target: str) -> bytes | None:
        found = self._bucket.get(manifest_key(target))
        whole = found is not None and self._places.understood(target, *found).copy is not None
        return found[0] if found is not None and whole else None

    def files(self, copy: Copy) -> dict[str, int]:
        folder = self.folder(copy)
        there = {name: size for name, (size, _) in self._bucket.below(folder).items()}
        for name in self._put.get((copy.target, copy.folder), {}).keys() - there.keys():
            size = self._bucket.size(f"{folder}/{name}")
            if size is not None:
                there[name] = size
        return there

    def read_into(self, copy: Copy, name: str, buffer: memoryview, offset: int) -> None:
        key, size = f"{self.folder(copy)}/{name}", buffer.nbytes
        if not size:
            return
        if self._bucket.fill(key, buffer.cast("B"), offset) != size:
            raise Away(f"{self.url}: {key} ends before byte {offset + size}", step=copy.step)

    def read_blocks(self, copy: Copy, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        key, left = f"{self.folder(copy)}/{name}", nbytes
        for block in self._bucket.blocks(key, offset, nbytes) if nbytes else ():
            left -= block.nbytes
            yield block
        if left:
            raise Away(f"{self.url}: {key} ends before byte {offset + nbytes}", step=copy.step)

    # -- writing ---------------------------------------------------------------------------------

    def put(self, copy: Copy, name: str, blocks: Iterable[memoryview], nbytes: int) -> None:
        key = f"{self.folder(copy)}/{name}"
        try:
            self._bucket.put_blocks(key, blocks, nbytes)
        except Away:
            # Another sender of this attempt may have ended first, with the same bytes: Azure then forgets
            # the blocks that came here, and refuses to make an object of them.
            if not self._is_whole(key, nbytes):
                raise
        with self._lock:
            self._put.setdefault((copy.target, copy.folder), {})[name] = nbytes

    def take_over(self, copy: Copy, name: str, nbytes: int, *, before: tuple[Copy, str]) -> bool:
        earlier, known = before
        if self._places.at(earlier.target, anew=True).copy != earlier:
            return False
        key = f"{self.folder(copy)}/{name}"
        if not self._bucket.copy(f"{self.folder(earlier)}/{known}", key, nbytes):
            return False
        if self._bucket.size(key) != nbytes:
            return False
        with self._lock:
            self._put.setdefault((copy.target, copy.folder), {})[name] = nbytes
        return True

    def _is_whole(self, key: str, nbytes: int) -> bool:
        try:
            return self._bucket.size(key) == nbytes
        except Away:
            return False

    def publish(self, copy: Copy, manifest: bytes, *, replaces: str | None = None) -> bool:
        for _ in range(_TRIES):
            place = self._places.at(copy.target, anew=True)
            if place.copy is not None and place.copy.attempt == copy.attempt:
                self._note(copy)
                return True
            if not may_publish(place, copy, replaces):
                return False
            try:
                # Commit point: from here on the step is there, and everybody sees it.
                self._bucket.put(manifest_key(copy.target), manifest, over=place.version or CREATE)
            except Refused:
                continue  # somebody was faster; or this very request was, and its answer was lost
            except Away:
                # An answer that was lost leaves open whether it was put: what is there says it.
                if not self._is_there(copy):
                    raise
            self._note(copy)
            return True
        raise Away(f"{self.url}: {copy.target} is written by several at once", step=copy.step)

    def was_retired(self, copy: Copy) -> bool:
        return copy.folder in self._places.at(copy.target).gone

    def point(self, pointer: str, directory: str) -> None:
        self._bucket.put(pointer, directory.encode())

    def pointers(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, size in self._bucket.look()[1].items():
            # Whoever can write to the store chooses the names, and a pull takes them to its root.
            if name.endswith(".json") or not is_directory_name(name) or not 0 < size <= 200:
                continue
            data = self._bucket.get(name)
            text = "" if data is None else data[0].decode(errors="replace")
            if is_directory_name(text):
                found[name] = text
        return found

    def retire(self, targets: Collection[str]) -> None:
        for target in targets:
            self._retire(target)

    def discard(self, copy: Copy, name: str) -> None:
        with self._lock:
            self._put.get((copy.target, copy.folder), {}).pop(name, None)
        self._bucket.delete([f"{self.folder(copy)}/{name}"])

    def begun(self, copy: Copy, name: str, nbytes: int) -> int:
        return self._bucket.begun(f"{self.folder(copy)}/{name}", nbytes)

    def take_up(self, mine: Callable[[str], bool]) -> None:
        self._bucket.take_up(mine)

    def give_up(self) -> None:
        self._bucket.give_up()

    def sweep(self, keep: Collection[Copy]) -> None:
        kept = {(copy.target, copy.folder) for copy in keep}
        names = [name for name in self._targets() if _is_ours(name)]
        places = dict(self._each(lambda name: (name, self._places.at(name, anew=True)), names))
        whole = [place.copy for place in places.values() if place.copy is not None]
        newest = max((copy.step for copy in whole if copy.directory is None), default=-1)
        for target, place in places.items():
            folders = self._bucket.look(target)[0]
            for folder in filter(_FOLDER.fullmatch, folders):
                if (target, folder) not in kept:
                    self._sweep_folder(target, folder, place, newest)
            if place.gone and not folders:
                self._sweep_mark(target, newest)
        abort_leftovers(self.url, keep)

    # -- words: the run, its session, pins ----------------------------------------------------------

    def read_word(self, name: str) -> Word | None:
        found = self._bucket.get(name)
        return None if found is None else Word(found[0], json.dumps(found[1]))

    def write_word(self, name: str, data: bytes, *, over: str | None) -> str:
        try:
            version = CREATE if over is None else json.loads(over)
            return json.dumps(self._bucket.put(name, data, over=version))
        except Refused:
            raise Conflict(f"{self.url}: {name} was written by somebody else meanwhile") from None
        except Away:
            # An answer that was lost leaves open whether the word was written: what is there says it.
            there = self.read_word(name)
            if there is None or there.data != data:
                raise
            return there.tag

    def pins(self, among: Collection[int] | None = None) -> frozenset[int]:
        if among is None:
            listed = self._bucket.below(_PINS)
            steps = {int(name) for name in listed if name.isascii() and name.isdecimal()}
            steps |= set(self.steps())  # a pin that the list does not show yet
        else:
            steps = set(among)
        there = self._each(lambda step: (step, self._bucket.size(f"{_PINS}/{step}")), steps)
        return frozenset(step for step, size in there if size is not None)

    def pin(self, step: int, pinned: bool) -> None:
        if pinned:
            self._bucket.put(f"{_PINS}/{step}", b"")
        else:
            self._bucket.delete([f"{_PINS}/{step}"])

    # -- life ------------------------------------------------------------------------------------

    def check(self) -> None:
        # Only here: nobody else needs it.
        from ckpt_core.levels.far.probing import probe

        probe(self.url)

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        self._bucket.close()

    # -- inside ----------------------------------------------------------------------------------

    def _each(self, act: Callable[[T], R | None], items: Iterable[T]) -> list[R]:
        """What `act` gives of each that is something, several asked at once."""
        items = list(items)
        if len(items) < 2:
            return [one for one in map(act, items) if one is not None]
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ckpt-far")
            threads = self._threads
        return [one for one in threads.map(act, items) if one is not None]

    def _targets(self) -> list[str]:
        names = {*self._bucket.look()[0], *self._published}
        # An agent lives for months: of what has gone nothing is kept.
        self._places.keep(names)
        return sorted(names)

    def _whole(self, target: str) -> Copy | None:
        """What is whole there; of what this process has published and is no more, nothing is kept."""
        copy = self._places.at(target).copy
        if copy is None and target in self._published:
            with self._lock:
                self._published.discard(target)
                for key in [key for key in self._put if key[0] == target]:
                    del self._put[key]
        return copy

    def _is_there(self, copy: Copy) -> bool:
        with contextlib.suppress(Away):
            there = self._places.at(copy.target, anew=True).copy
            return there is not None and there.attempt == copy.attempt
        return False

    def _note(self, copy: Copy) -> None:
        with self._lock:
            self._published.add(copy.target)
            self._places.forget(copy.target)

    def _retire(self, target: str) -> None:
        for _ in range(_TRIES):
            place = self._places.at(target, anew=True)
            if place.version is None:
                return  # what may be left there is swept
            gone = place.gone
            if not gone:
                folders = [place.copy.folder] if place.copy else self._bucket.look(target)[0]
                gone = tuple(folders) or ("",)
                try:
                    # Order matters: without its manifest it is no step any more, and nobody looks for its
                    # files, nor puts it there again. Only the very manifest that was seen is replaced.
                    self._bucket.put(manifest_key(target), retired_mark(gone), over=place.version)
                except Refused:
                    continue
            self._places.forget(target)
            for folder in filter(_FOLDER.fullmatch, gone):
                self._clear(target, folder)
            return
        raise Away(f"{self.url}: {target} is written by several at once")

    def _clear(self, target: str, folder: str) -> None:
        place = f"{target}/{folder}"
        with self._lock:
            mine = self._put.pop((target, folder), {})
        self._bucket.delete(
            [f"{place}/{name}" for name in sorted({*self._bucket.below(place), *mine})]
        )

    def _sweep_folder(self, target: str, folder: str, place: ManifestPlace, newest: int) -> None:
        if folder in place.gone:
            self._clear(target, folder)
            return
        step = parse_step_dir(target)
        if place.copy is None and (step is None or step >= newest):
            return  # somebody may be at it
        if (place.copy and place.copy.folder == folder) or self._is_young(f"{target}/{folder}"):
            return
        if place.version is None:
            try:
                # Whoever was about to publish it finds that out.
                self._bucket.put(manifest_key(target), retired_mark((folder,)), over=CREATE)
            except Refused:
                return
        self._clear(target, folder)

    def _is_young(self, folder: str) -> bool:
        """Whether something was written there within the hour, by the server's own clock."""
        times = [when for _, when in self._bucket.below(folder).values()]
        return bool(times) and max(times) >= self._bucket.now() - _YOUNG

    def _sweep_mark(self, target: str, newest: int) -> None:
        step = parse_step_dir(target)
        written = self._bucket.below(target).get(MANIFEST_NAME)
        # Danger: a delete has no condition. An old step that is taken away is never sent again.
        if written and step is not None and step < newest and not self._is_young(target):
            self._bucket.delete([manifest_key(target)])
            self._places.forget(target)


def _is_ours(target: str) -> bool:
    return parse_step_dir(target) is not None or is_directory_name(target)
