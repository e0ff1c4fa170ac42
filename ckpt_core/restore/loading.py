"""`load`: a checkpoint as a fresh tree, without a live state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_core.errors import RestoreError
from ckpt_core.restore.deadline import READ_TIMEOUT_S, within
from ckpt_core.restore.failures import MOST_TRIES, NoMeans, Retired, retired_too_fast
from ckpt_core.restore.filling import Need, fill, plan_reads
from ckpt_core.restore.leaves import StepLeaves
from ckpt_core.restore.manifests import read_manifests
from ckpt_core.restore.reading import ParallelReader
from ckpt_core.restore.telling import telling
from ckpt_core.restore.watch import undisturbed
from ckpt_core.state import Selection, Skeleton
from ckpt_core.store import resolve
from ckpt_core.system.collector import uncollected
from ckpt_core.system.files import Files


@uncollected
def load(
    path: str | Path,
    *,
    rank: int | None = None,
    trusted: bool = False,
    readers: int = 8,
    files: Files | None = None,
    progress: bool = False,
    only: Iterable[str] | None = None,
) -> Any:
    """`ckpt_core.load` of a directory: the arguments, what it returns and its errors are those.

    Args:
        files: how its files are read; also those of a stand-in (`ckpt_core.levels`).
    """
    path = Path(path) if isinstance(path, str) else path
    wanted = _Wanted(rank, trusted, Selection.of(only))
    with telling(shown=progress) as show:
        how = ParallelReader(
            files=files or Files(),
            readers=readers,
            timeout_s=READ_TIMEOUT_S,
            progress=partial(show, f"loading {path.name}"),
        )
        return _load_newest(path, how, wanted)


@dataclass(frozen=True, slots=True)
class _Wanted:
    rank: int | None
    trusted: bool
    selection: Selection | None


def _load_newest(path: Path, how: ParallelReader, wanted: _Wanted) -> Any:
    for _ in range(MOST_TRIES):
        step_dir = within(READ_TIMEOUT_S, lambda: resolve(path), path=path)
        read = partial(_load, step_dir, how, wanted)
        try:
            return undisturbed(step_dir, read, timeout_s=READ_TIMEOUT_S)
        except MemoryError as exc:
            raise NoMeans(step_dir, exc) from exc
        except Retired:
            if step_dir == path:
                raise
    raise retired_too_fast(path)


def _load(step_dir: Path, how: ParallelReader, wanted: _Wanted) -> Any:
    rank = wanted.rank
    step = within(how.timeout_s, lambda: read_manifests(step_dir, files=how.files), path=step_dir)
    leaves = StepLeaves(step)
    there = [manifest.rank for manifest in step.ranks]
    if rank is not None and rank not in there:
        text = f"{step_dir} holds no rank {rank}: ranks {', '.join(map(str, there))} are there"
        raise RestoreError(text, step=step.manifest.step, rank=rank, path=step_dir)
    owner = leaves.owner(there[0] if rank is None else rank)
    skeleton = Skeleton.from_json(owner.skeleton, path=step_dir)
    if wanted.selection is not None:
        skeleton = wanted.selection.cut(skeleton, trusted=wanted.trusted)
        wanted.selection.check_seen()
    names = skeleton.leaf_names()
    named = leaves.of(owner, names, whole=True)
    if wanted.selection is not None:
        named = {name: leaf for name, leaf in named.items() if name in names}
    tensors = skeleton.allocate({name: leaf.spec for name, leaf in named.items()})
    jobs = plan_reads(leaves, [Need(leaf, tensors[name]) for name, leaf in named.items()])
    fill(step, jobs, list(tensors.values()), how=how)
    return skeleton.unflatten(tensors, trusted=wanted.trusted)
