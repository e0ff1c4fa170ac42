"""Roots and levels with steps in them, and restores beside levels, of one process or of several ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt_core.layout import RankManifest
from ckpt_core.levels import BringsBack
from ckpt_core.restore import RestoredStep, Restorer, RestoreRequest
from ckpt_core.store import StepStore, step_path
from ckpt_core.system.files import Files
from ckpt_core.types import RankInfo
from tests.restore.harness import small_state, write_step, zeros_like
from tests.restore.ranks import Job, Ranks, write_all

TIMEOUT_S = 60.0


@contextmanager
def opened(root: Path, *, files: Files | None = None, shared: bool = False) -> Iterator[StepStore]:
    """The store of a first root, locked and repaired."""
    store = StepStore(
        root, files=files or Files(), keep_last=2, keep_every=None, spare_slots=0, shared=shared
    )
    store.open()
    try:
        yield store
    finally:
        store.close()


def brings_back(
    store: StepStore, levels: Sequence[Path | str], *, files: Files | None = None
) -> BringsBack:
    """What one process alone asks of further levels."""
    urls = [str(level) for level in levels]
    return BringsBack(urls, store, RankInfo(), files=files or Files(), timeout_s=TIMEOUT_S)


def restore_alone(
    store: StepStore, levels: Sequence[Path | str], state: Any, **options: Any
) -> RestoredStep | None:
    """A restore of one process that has levels."""
    restorer = Restorer(
        store.root,
        files=Files(),
        readers=2,
        timeout_s=TIMEOUT_S,
        store=store,
        further=brings_back(store, levels),
    )
    return restorer.restore(state, RestoreRequest(**options))


def restored_state(root: Path, levels: Sequence[Path | str], **options: Any) -> tuple[int, Any]:
    """Step and state of a fresh process at `root`."""
    live = zeros_like(small_state())
    with opened(root) as store:
        found = restore_alone(store, levels, live, **options)
    assert found is not None
    return found.step, {**live, "plain": found.state["plain"]}


def fill(root: Path, *steps: int) -> None:
    """Commit steps, each with a state of its own."""
    for step in steps:
        write_step(root, step, small_state(step))


def shard_in(root: Path, step: int, rank: int = 0) -> Path:
    return step_path(root, step) / f"shard-{rank:05d}-0.safetensors"


def gather_roots(level: Path, roots: Sequence[Path], step: int, job: Job) -> None:
    """What the agents of several nodes make of a step: the files of all, and a manifest over all."""
    path = step_path(level, step)
    path.mkdir(parents=True)
    for root in roots:
        for file in step_path(root, step).iterdir():
            if file.name != "manifest.json":
                shutil.copy2(file, path)
    found = [RankManifest.decode(one.read_bytes(), path=one) for one in path.glob("rank-*.json")]
    write_all(path, step, job, sorted(found, key=lambda rank: rank.rank))


class Nodes:
    """Ranks that restore together, each root led by a store of its own, with levels behind them."""

    def __init__(
        self,
        roots: Sequence[Path],
        nodes: Sequence[Sequence[int]] | None,
        levels: Mapping[int, Sequence[Path]] | Sequence[Path],
        *,
        files: Mapping[int, Files] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """
        Args:
            levels: of all nodes, or by the rank that leads each.
            files: rank -> what it brings steps through.
        """
        self.ranks = Ranks(roots, nodes=nodes, timeout_s=timeout_s, equipped=self._equipped)
        self._levels, self._files = levels, files or {}
        self._stores: dict[int, StepStore] = {}

    def restore(self, lives: Sequence[Any], **options: Any) -> Any:
        try:
            return self.ranks.restore(lives, **options)
        finally:
            for store in self._stores.values():
                store.close()

    def _equipped(self, info: RankInfo) -> Mapping[str, Any]:
        if not info.leads:
            return {}
        levels = self._levels
        mine = levels.get(info.rank, ()) if isinstance(levels, Mapping) else levels
        files = self._files.get(info.rank, Files())
        shared = len(info.members) > 1
        store = StepStore(
            self.ranks.roots[info.rank],
            files=files,
            keep_last=2,
            keep_every=None,
            spare_slots=0,
            shared=shared,
        )
        store.open()
        self._stores[info.rank] = store
        urls = [str(level) for level in mine]
        further = BringsBack(urls, store, info, files=files, timeout_s=TIMEOUT_S)
        return {"store": store, "further": further}
