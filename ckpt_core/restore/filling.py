"""One step's leaves into tensors, verified on the way."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ckpt_core.errors import CorruptCheckpoint, RestoreError
from ckpt_core.restore.destinations import TensorSink
from ckpt_core.restore.failures import ReadRefused
from ckpt_core.restore.manifests import StepManifest
from ckpt_core.restore.reading import Outcome, ParallelReader
from ckpt_core.restore.units import BadChunk, ReadJob
from ckpt_core.types import ALIGN_BYTES, LeafSpec

_NAMES_SHOWN = 3


def specs_of(step: StepManifest) -> dict[str, LeafSpec]:
    """The leaves of a step by name.

    Raises:
        RestoreError: several ranks saved it.
    """
    if len(step.ranks) != 1:
        raise RestoreError(
            f"{step.path} was saved by {len(step.ranks)} ranks together, and this release "
            "restores what one rank saved: use a release that restores sharded checkpoints. "
            "Nothing was changed",
            step=step.manifest.step,
            path=step.path,
        )
    return {leaf.spec.name: leaf.spec for leaf in step.ranks[0].leaves}


def fill(step: StepManifest, destinations: Mapping[str, Tensor], *, how: ParallelReader) -> None:
    """Read every file of a step, whole, into `destinations`; leaves without one are only verified.

    Returns with every chunk verified, or raises with the destinations partly overwritten.

    Raises:
        CorruptCheckpoint: bytes differ from what was saved; the text says where.
        RestoreError: the system refused a read (its cause is the OSError), or a read hangs.
    """
    if any(tensor.is_cuda for tensor in destinations.values()):
        how = replace(how, new_buffer=_pinned_buffer)
    outcome = how.run(_jobs(step, destinations))
    tensors = [tensor for tensor in destinations.values() if not tensor.is_inference()]
    # Written behind autograd's back: a graph that saved the old values must notice.
    torch.autograd.graph.increment_version(tensors)
    _raise_findings(step, outcome)


def _jobs(step: StepManifest, destinations: Mapping[str, Tensor]) -> list[ReadJob]:
    placed: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    for rank in step.ranks:
        for leaf in rank.leaves:
            tensor = destinations.get(leaf.spec.name)
            if tensor is not None:
                assert tensor.nbytes == leaf.nbytes, leaf.spec.name
                placed.setdefault((rank.rank, leaf.file), []).append((leaf.offset, tensor))
    return [
        ReadJob(step.path / entry.name, entry, TensorSink(placed.get((rank.rank, index), [])))
        for rank, index, entry in step.files()
    ]


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
        raise ReadRefused(path, error) from error


def _leaves_in(step: StepManifest, bad: BadChunk) -> str:
    names = [
        leaf.spec.name
        for rank in step.ranks
        for leaf in rank.leaves
        if leaf.nbytes
        and rank.files[leaf.file].name == bad.file
        and leaf.offset < bad.offset + bad.nbytes
        and leaf.offset + leaf.nbytes > bad.offset
    ]
    if not names:
        return ""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"; it holds bytes of {', '.join(names[:_NAMES_SHOWN])}{more}"


def _pinned_buffer(nbytes: int) -> memoryview:
    tensor = torch.empty(nbytes + ALIGN_BYTES, dtype=torch.uint8, pin_memory=True)
    start = tensor.data_ptr() + -tensor.data_ptr() % ALIGN_BYTES
    memory: Any = (ctypes.c_char * nbytes).from_address(start)
    memory.keeps_alive = tensor
    return memoryview(memory).cast("B")
