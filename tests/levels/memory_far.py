"""`MemoryFar`: a level in this process, filled from a root; it counts requests, and can go away."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from ckpt_core.levels import Away, Copy, Far, Word
from ckpt_core.store import committed_steps, step_path
from ckpt_core.types import parse_step_dir


class MemoryFar(Far):
    """Holds the targets of a root as they were when it was made.

    Attributes:
        targets: name -> file -> bytes.
        requests: what was asked for, by the kind of call.
        ranges: every range that was read: file, offset, length.
        gone_after: this many ranges are read before the level is away; None: it never is.
    """

    url = "s3://bucket/run"

    def __init__(self, root: Path, extra: Collection[str] = ()) -> None:
        folders = [*(step_path(root, step) for step in committed_steps(root))]
        folders += [root / name for name in extra]
        self.targets = {folder.name: _contents(folder) for folder in folders}
        self.requests: Counter[str] = Counter()
        self.ranges: list[tuple[str, int, int]] = []
        self.gone_after: int | None = None
        self.pinned: set[int] = set()

    def steps(self) -> dict[int, str]:
        self._asked("steps")
        found = {parse_step_dir(name): self._attempt(name) for name in sorted(self.targets)}
        return {step: attempt for step, attempt in found.items() if step is not None}

    def directories(self) -> dict[str, Copy]:
        self._asked("directories")
        names = [name for name in self.targets if parse_step_dir(name) is None]
        return {name: Copy(0, self._attempt(name), name) for name in names}

    def manifest(self, target: str) -> bytes | None:
        self._asked("manifest")
        return self.targets.get(target, {}).get("manifest.json")

    def files(self, copy: Copy) -> dict[str, int]:
        self._asked("files")
        held = self.targets[copy.target]
        return {name: len(data) for name, data in held.items() if name != "manifest.json"}

    def read_into(self, copy: Copy, name: str, buffer: memoryview, offset: int) -> None:
        if self.gone_after is not None and len(self.ranges) >= self.gone_after:
            raise Away(f"{self.url} cannot be reached: connection refused")
        self.ranges.append((name, offset, len(buffer)))
        try:
            data = self.targets[copy.target][name]
        except KeyError as exc:
            raise Away(f"{self.url}: {name} is not there") from exc
        assert offset + len(buffer) <= len(data)
        buffer[:] = data[offset : offset + len(buffer)]

    def put(self, copy: Copy, name: str, blocks: Iterable[memoryview], nbytes: int) -> None:
        raise AssertionError("a reader writes nothing")

    def discard(self, copy: Copy, name: str) -> None:
        raise AssertionError("a reader writes nothing")

    def publish(self, copy: Copy, manifest: bytes, *, replaces: str | None = None) -> bool:
        raise AssertionError("a reader writes nothing")

    def point(self, pointer: str, directory: str) -> None:
        raise AssertionError("a reader writes nothing")

    def pointers(self) -> dict[str, str]:
        return {}

    def retire(self, targets: Collection[str]) -> None:
        raise AssertionError("a reader writes nothing")

    def sweep(self, keep: Collection[Copy]) -> None:
        raise AssertionError("a reader writes nothing")

    def read_word(self, name: str) -> Word | None:
        return None

    def write_word(self, name: str, data: bytes, *, over: str | None) -> str:
        raise AssertionError("a reader writes nothing")

    def pins(self, among: Collection[int] | None = None) -> frozenset[int]:
        return frozenset(self.pinned if among is None else self.pinned.intersection(among))

    def pin(self, step: int, pinned: bool) -> None:
        raise AssertionError("a reader writes nothing")

    def check(self) -> None:
        return

    def _asked(self, what: str) -> None:
        self.requests[what] += 1
        if self.gone_after == 0:
            raise Away(f"{self.url} cannot be reached: connection refused")

    def _attempt(self, name: str) -> str:
        return str(json.loads(self.targets[name]["manifest.json"])["attempt"])


def _contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
