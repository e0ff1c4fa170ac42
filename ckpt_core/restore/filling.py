"""One step's leaves into tensors, verified on the way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ckpt_core.errors import CorruptCheckpoint, RestoreError, StagingError
from ckpt_core.layout import FileEntry, itemsize, needed_ranges
from ckpt_core.restore.deadline import wait_for_devices
from ckpt_core.restore.destinations import Run, TensorSink
from ckpt_core.restore.failures import ReadRefused, check_means
from ckpt_core.restore.leaves import LeafPlace, StepLeaves, StoredLeaf, first_few
from ckpt_core.restore.manifests import StepManifest
from ckpt_core.restore.reading import Outcome, ParallelReader, page_buffer
from ckpt_core.restore.sending import Sender
from ckpt_core.restore.slots import SLOT_BYTES, SLOTS
from ckpt_core.restore.trail import warn
from ckpt_core.restore.units import BadChunk, ReadJob
from ckpt_core.system.devices import Devices
from ckpt_core.system.memory_limit import free_memory
from ckpt_core.types import Block, Slice
from ckpt_core.units import ALIGN_BYTES

_SHARE = 8
"""Of the free memory, one part in so many at most is page-locked to fill devices from."""


class Need(NamedTuple):
    """What is wanted of a leaf, and where it goes.

    Attributes:
        leaf: where its bytes lie.
        tensor: takes them, in row-major order.
        block: the box of the leaf that `tensor` is; None: all of it.
        part: `(begin, nbytes)` of the tensor's bytes that are wanted; None: all of them.
        begin: the element of the leaf that `tensor` begins with, if it takes a run of them; None: it takes
            the block.
    """

    leaf: StoredLeaf
    tensor: Tensor
    block: Block | None = None
    part: tuple[int, int] | None = None
    begin: int | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether it is all of the leaf."""
        return self.block is None and self.part is None and self.begin is None


def plan_reads(
    leaves: StepLeaves, needs: Sequence[Need], devices: Devices | None = None
) -> list[ReadJob]:
    """What to read. Files of a step that one rank saved are read whole, unless a part of a leaf is all
    that is wanted: padding is verified too then.

    Raises:
        CorruptCheckpoint: needed bytes are stored nowhere.
        RestoreError: they lie in the root of another node.
    """
    step = leaves.step
    whole = step.manifest.world_size == 1 and len(needs) == len(leaves.shared)
    runs: dict[tuple[int, int], list[Run]] = {}
    for need in needs:
        place = need.leaf.places[0]
        if place.part is None and need.is_leaf:
            # A line for itself, since ten thousand leaves go this way.
            run = Run(place.offset, need.tensor, 0, need.leaf.nbytes)
            runs.setdefault((place.rank, place.file), []).append(run)
            continue
        whole = whole and need.is_leaf
        for place, run in _runs(leaves, need):
            runs.setdefault((place.rank, place.file), []).append(run)
    jobs, sender = [], Sender(devices or Devices())
    for rank, index, entry in step.files():
        mine = runs.get((rank.rank, index), [])
        wanted = None if whole else _chunks_of(entry, mine)
        if wanted is None or wanted:
            jobs.append(ReadJob(step.path / entry.name, entry, TensorSink(mine, sender), wanted))
    return jobs


def fill(
    step: StepManifest, jobs: Sequence[ReadJob], tensors: Sequence[Tensor], *, how: ParallelReader
) -> int:
    """Read what `plan_reads` planned into `tensors`; the bytes that were read from files.

    Returns with every chunk verified, and on devices with every copy done: any stream finds the bytes
    there. Or raises with the tensors partly overwritten, and no copy to them under way.

    Raises:
        CorruptCheckpoint: bytes differ from what was saved; the text says where.
        RestoreError: the system refused a read (its cause is the OSError), a read hangs, or a
            device failed, has no room, or does not come to an end of what training has queued.
    """
    devices = how.devices or Devices()
    used = devices.of_all(tensors)
    if used:
        # Order matters: what training has queued writes to the tensors before the readers do.
        wait_for_devices(devices, used, how.timeout_s)
        how = _with_buffers(how, devices, used[0])
    try:
        outcome = how.run(jobs)
    except (StagingError, RuntimeError) as exc:
        if not used:
            raise
        # What torch says need not name a device.
        names = ", ".join(map(str, used))
        text = f"filling tensors on {names} failed: {exc}. They are partly overwritten"
        raise RestoreError(text, path=step.path) from exc
    # Written behind autograd's back: a graph that saved the old values must notice.
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
    _raise_findings(step, outcome)
    return outcome.done_bytes


def _with_buffers(how: ParallelReader, devices: Devices, device: torch.device) -> ParallelReader:
    """With page-locked buffers that are filled while devices copy from others."""
    share = free_memory() // (_SHARE * SLOTS * how.readers)
    slot_bytes = max(ALIGN_BYTES, min(SLOT_BYTES, share // ALIGN_BYTES * ALIGN_BYTES))

    def new_buffer(nbytes: int) -> memoryview:
        try:
            return devices.buffer(nbytes, device)
        except RuntimeError as exc:
            warn(
                f"{nbytes} bytes of memory to fill devices from could not be page-locked: {exc}. Other "
                f"memory is used, which is slower"
            )
            return page_buffer(nbytes)

    return replace(how, new_buffer=new_buffer, slot_bytes=slot_bytes)


def _runs(leaves: StepLeaves, need: Need) -> Iterator[tuple[LeafPlace, Run]]:
    """Where each wanted byte of a leaf comes from; each of them once, whatever is stored twice."""
    tensor = need.tensor
    position, nbytes = need.part or (0, tensor.nbytes)
    end = position + nbytes
    for to, at, size, place in sorted(_ranges(need), key=itemgetter(0)):
        if to > position:
            break
        stop = min(to + size, end)
        if stop > position:
            yield place, Run(place.offset + at + position - to, tensor, position, stop - position)
            position = stop
    if position < end:
        raise _lacking(leaves, need)


def _ranges(need: Need) -> Iterator[tuple[int, int, int, LeafPlace]]:
    """Byte in the tensor (of a run: or before it, or behind it), byte behind the place's offset, length."""
    spec = need.leaf.spec
    item = itemsize(spec.dtype)
    first = (need.begin or 0) * item
    for place in need.leaf.places:
        part = place.part or Slice(0, need.leaf.nbytes)
        if need.block is None and part.block is None:
            yield part.begin - first, 0, part.nbytes, place
            continue
        for at, to, size in needed_ranges(part, spec.shape, item, need.block):
            yield to - first, at, size, place


def _lacking(leaves: StepLeaves, need: Need) -> RestoreError:
    name = need.leaf.spec.name
    if leaves.is_partial:
        return leaves.elsewhere([name])
    return leaves.lacks(name, leaves.gap(need.leaf) or "a wanted part")


def _chunks_of(entry: FileEntry, runs: Sequence[Run]) -> frozenset[int]:
    """Numbers of the chunks that hold bytes of the runs."""
    ends = list(accumulate(chunk.nbytes for chunk in entry.chunks))
    wanted: set[int] = set()
    for run in runs:
        if run.nbytes:
            first = bisect_right(ends, run.offset)
            wanted.update(range(first, bisect_right(ends, run.offset + run.nbytes - 1) + 1))
    return frozenset(wanted)


def _raise_findings(step: StepManifest, outcome: Outcome) -> None:
    if outcome.bad:
        bad = outcome.bad[0]
        raise CorruptCheckpoint(
            f"{bad}{_leaves_in(step, bad)}",
            path=bad.path,
            expected=bad.expected,
            got=bad.got,
            step=step.manifest.step,
        )
    if outcome.failed:
        path, error = outcome.failed[0]
        check_means(path, error)
        raise ReadRefused(path, error) from error


def _leaves_in(step: StepManifest, bad: BadChunk) -> str:
    names = [name for rank in step.ranks for name in bad.leaves_of(rank)]
    return f"; it holds bytes of {first_few(names)}" if names else ""
