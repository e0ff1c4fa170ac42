"""One step into the live state: up to the point where only `finish` is left to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.errors import RestoreError
from ckpt_core.layout import RankManifest
from ckpt_core.restore.deadline import within
from ckpt_core.restore.failures import Misplaced
from ckpt_core.restore.filling import Need, fill, plan_reads
from ckpt_core.restore.leaves import StepLeaves, StoredLeaf, first_few
from ckpt_core.restore.manifests import read_manifests
from ckpt_core.restore.reading import ParallelReader
from ckpt_core.state import Binding, Selection, Skeleton, bind
from ckpt_core.types import RankInfo
from ckpt_core.units import count_text

if TYPE_CHECKING:
    from ckpt_core.restore.broadcast import Broadcast, Shares


@dataclass(slots=True)
class Search:
    """What one call of `restore` is about, and what it has done so far.

    Attributes:
        live: the state to fill.
        trusted: as in `restore`.
        selection: what of a step is wanted; None: all of it.
        broadcast: the ranks that read for each other; None: each reads for itself.
        borrows: whether private values of another rank will do where this root has none of this one; False: a
            further level has them.
        touched: live tensors may hold bytes of a step that was not restored.
        places: of the live state, which those may be in.
    """

    live: Any
    trusted: bool
    selection: Selection | None = None
    broadcast: Broadcast | None = None
    borrows: bool = True
    touched: bool = False
    places: set[str] = field(default_factory=set)

    def fills(self, places: Iterable[str]) -> None:
        """Bytes of a step go to these places from here on."""
        self.touched = True
        self.places.update(places)


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step whose bytes are in the live tensors, all but those that others will broadcast.

    Attributes:
        path: its directory.
        binding: to finish once all ranks have come so far.
        leaves: of the step.
        owner: whose skeleton and private leaves were taken.
        read_bytes: bytes that were read from shard files.
        shares: what is to be broadcast; None: nothing.
    """

    path: Path
    binding: Binding
    leaves: StepLeaves
    owner: RankManifest
    read_bytes: int
    shares: Shares | None = None


def read_step(path: Path, search: Search, info: RankInfo, *, how: ParallelReader) -> ReadStep:
    """Bind a step to the live state and fill it with this rank's part of the bytes, verified.

    Raises:
        StateMismatch, UntrustedData, UnknownFormat: before anything is changed.
        CorruptCheckpoint: bytes, or what the manifests say of them, are not what was saved.
        NotCommitted: there is no such step.
        RestoreError: a read failed or hangs, needed bytes are in the root of another node, or places that
            an earlier try has filled would be left as they are.
        Misplaced: private values of this rank are in the root of another node, and none are to be borrowed.
    """
    step = within(how.timeout_s, lambda: read_manifests(path, files=how.files), path=path)
    leaves = StepLeaves(step)
    owner = leaves.owner(info.rank)
    skeleton = Skeleton.from_json(owner.skeleton, path=path)
    part = skeleton
    if search.selection is not None:
        part = search.selection.cut(skeleton, trusted=search.trusted)
    named = leaves.of(owner, part.leaf_names())
    # Order matters: every difference is found here, before a live byte changes.
    specs = {name: leaf.spec for name, leaf in named.items()}
    binding = bind(skeleton, specs, search.live, trusted=search.trusted, selection=search.selection)
    _check_left(binding, search, leaves)
    if not search.borrows:
        _check_own(info, leaves, owner, binding)
    if search.selection is not None:
        named = {name: named[name] for name in binding.destinations}
        specs = {name: specs[name] for name in named}
    shares = None
    if search.broadcast is not None:
        # Invariant: all ranks say the same, so it must not depend on how much of a leaf this one holds.
        whole = specs.keys() & leaves.shared.keys() - binding.divided - binding.doubtful
        shares = search.broadcast.share({name: specs[name] for name in whole})
        search.broadcast.prepare(shares, binding.destinations)
    needs = list(_needs(binding, named, shares))
    read_bytes = 0
    if binding.doubtful:
        # Order matters: their values may still be a difference, found before a live byte changes.
        first = [need for need in needs if need.leaf.spec.name in binding.doubtful]
        read_bytes = fill(
            step, plan_reads(leaves, first, how.devices), [n.tensor for n in first], how=how
        )
        binding.check()
    jobs = plan_reads(leaves, needs, how.devices)
    search.fills(binding.filled)
    read_bytes += fill(step, jobs, list(binding.destinations.values()), how=how)
    return ReadStep(path, binding, leaves, owner, read_bytes, shares)


def _check_left(binding: Binding, search: Search, leaves: StepLeaves) -> None:
    """Raise RestoreError if a step leaves places alone that hold bytes of one that was passed over."""
    left = binding.left_of(search.places)
    if left:
        raise RestoreError(
            f"{leaves.step.path} fits the state in part, and would leave {first_few(left)} with bytes of "
            "a newer step that could not be restored. Build the state anew and ask for this step "
            "(step=...), or for a part that both steps hold (only=...)",
            step=leaves.step.manifest.step,
            path=leaves.step.path,
        )


def _check_own(info: RankInfo, leaves: StepLeaves, owner: RankManifest, binding: Binding) -> None:
    """Raise Misplaced if this rank would take what another one had in private, and has saved its own."""
    manifest = leaves.step.manifest
    if owner.rank == info.rank or manifest.world_size != info.world_size:
        return
    if names := borrowed_entries(leaves, owner, binding):
        raise Misplaced(
            f"{leaves.step.path} has {', '.join(names)} of rank {owner.rank}, and not of this one: it was "
            "written on another node",
            step=manifest.step,
            path=leaves.step.path,
        )


def remarks(read: ReadStep, info: RankInfo) -> Iterator[str]:
    """What is to be said of a step that was restored: what it lacks for this rank, and what nobody takes."""
    leaves, saved_by = read.leaves, count_text(read.leaves.step.manifest.world_size, "rank")
    names = (
        [] if read.owner.rank == info.rank else borrowed_entries(leaves, read.owner, read.binding)
    )
    if names:
        yield (
            f"rank {info.rank} took {', '.join(names)} from rank {read.owner.rank}: {read.path} "
            f"was saved by {saved_by} and has none of its own for it here"
        )
    left_out = read.binding.left_out
    if left_out:
        yield (
            f"step {leaves.step.manifest.step} fits the state in part: "
            f"{count_text(len(left_out), 'place')} stay as they were: {first_few(left_out)}"
        )
    unused = unused_ranks(leaves, info.world_size)
    if unused and info.leads:
        yield (
            f"private values of {count_text(len(unused), 'rank')} ({unused[0]} to {unused[-1]}) are not "
            f"used: {read.path} was saved by {saved_by}, and {info.world_size} restore it"
        )


def borrowed_entries(leaves: StepLeaves, owner: RankManifest, binding: Binding) -> list[str]:
    """Top-level entries of the state whose private values were taken from another rank: tensors, and plain
    values that are not equal on all ranks.
    """
    if leaves.step.manifest.world_size > 1:
        names = leaves.private[owner.rank].keys() & binding.destinations.keys()
        first, *others = [_entries(rank) for rank in leaves.step.ranks]
        wanted = binding.skeleton.entries() or first
        plain = {key for key in wanted if any(rows.get(key) != first.get(key) for rows in others)}
        return sorted({name.split(".", 1)[0] for name in names} | plain)
    # One rank saved it and did not say what was its own; generators always are.
    return binding.skeleton.entries_with_generators()


def unused_ranks(leaves: StepLeaves, world_size: int) -> list[int]:
    """Ranks of the step that have private leaves, which none of `world_size` ranks takes."""
    return [rank for rank, own in leaves.private.items() if own and rank >= world_size]


def _entries(rank: RankManifest) -> Mapping[str, object]:
    """The top of what a rank has saved, as JSON: of skeletons that are not used nothing else is known."""
    tree = rank.skeleton.get("tree") if isinstance(rank.skeleton, dict) else None
    rows = tree.get("v") if isinstance(tree, dict) else None
    return rows if isinstance(rows, dict) else {"the state": tree}


def _needs(
    binding: Binding, named: Mapping[str, StoredLeaf], shares: Shares | None
) -> Iterator[Need]:
    for name, leaf in named.items():
        tensor, block = binding.destinations[name], binding.blocks.get(name)
        if shares is None or name not in shares.specs:
            yield Need(leaf, tensor, block, begin=binding.begins.get(name))
        elif (part := shares.mine.get(name)) is not None:
            yield Need(leaf, tensor, block, part)
