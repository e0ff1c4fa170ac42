"""Live tensors that share memory: whether what was saved for each can be in it at the same time.

Tied in the checkpoint as well: nothing to do. Else their values decide, once they are read: equal
where they meet, they are what a program saved that untied them, or that keeps arrays and tensors
over one memory; different, one of them would overwrite the other in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ckpt_core.state.homes import Home, fill_home, source_of
from ckpt_core.state.leaf import meeting, overlaps_itself, row_major, typed_view
from ckpt_core.state.nodes import RefTable
from ckpt_core.state.special import put_bits, subbyte_dtypes
from ckpt_core.types import LeafSpec

Shape = tuple[int, ...]
_Span = tuple[str, int, int, int, Home]
"""Device, addresses of the first byte and behind the last one, place in the tree, home."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Where a home lies, and what of the checkpoint it shows.

    Attributes:
        place: address of its first byte; sizes and strides in bytes, those of 1 left out.
        saved: the leaf, the view of it, the box of that.
        shift: how far the leaf's first byte would be from address 0, if it lay in memory as it is stored;
            None: memory and leaf are ordered in different ways.
        twist: lazy conjugation or negation in one and not in the other.
    """

    place: tuple[int, tuple[tuple[int, int], ...]]
    saved: tuple[object, ...]
    shift: int | None
    twist: frozenset[str]

    def agrees(self, other: _Look) -> bool:
        """Whether each byte in both has one origin in the checkpoint."""
        if self.saved[0] != other.saved[0] or self.twist != other.twist:
            return False
        if self.saved == other.saved and self.place == other.place:
            return True
        return self.shift is not None and self.shift == other.shift


def find_doubtful(
    homes: Iterable[Home], refs: RefTable, specs: Mapping[str, LeafSpec]
) -> list[list[Home]]:
    """Groups of homes that meet in live memory and not in the checkpoint, in order of the tree."""
    spans = [
        (str(home.tensor.device), *_ends(home), index, home)
        for index, home in enumerate(homes)
        if _has_memory(home)
    ]
    spans.sort(key=itemgetter(0, 1))
    doubtful = []
    for cluster in _clusters(spans):
        cluster.sort(key=itemgetter(1, 3))
        looks = [_look(home, refs, specs) for *_, home in cluster]
        if not _agree(looks):
            doubtful.append([home for *_, home in sorted(cluster, key=itemgetter(3))])
    return doubtful


def _has_memory(home: Home) -> bool:
    tensor = home.tensor
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return plain and tensor.numel() > 0


def _look(home: Home, refs: RefTable, specs: Mapping[str, LeafSpec]) -> _Look:
    tensor, number = home.tensor, home.number
    strides, low = _geometry(home)[1], _ends(home)[0]
    rows = zip(tensor.shape, strides, strict=True)
    used = tuple((size, step) for size, step in rows if size > 1)
    view, leaf = refs.views.get(number), refs.leaf[number]
    shape = tuple(specs[leaf].shape) if view is None else view.shape
    steps = row_major(shape) if view is None else view.stride
    stored = [
        (size, step * tensor.itemsize) for size, step in zip(shape, steps, strict=True) if size > 1
    ]
    offset = 0 if view is None else view.offset
    alike = home.block is None and list(used) == stored
    flags = refs.flags.get(number, "")
    bits = {"c": tensor.is_conj(), "n": tensor.is_neg()}
    return _Look(
        (low, used),
        (leaf, view, home.block, home.begin),
        low - offset if alike else None,
        frozenset(flag for flag, live in bits.items() if live != (flag in flags)),
    )


def _geometry(home: Home) -> tuple[int, Shape]:
    """Address of the first element, and strides in bytes."""
    if home.array is not None:
        return home.array.__array_interface__["data"][0], tuple(home.array.strides)
    tensor = home.tensor
    return tensor.data_ptr(), tuple(step * tensor.itemsize for step in tensor.stride())


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Those whose byte ranges meet, and single ones whose elements may."""
    for cluster in meeting(spans, itemgetter(0, 1, 2)):
        if len(cluster) > 1 or _may_repeat(cluster[0][4]):
            yield cluster


def _may_repeat(home: Home) -> bool:
    return home.array is not None or not home.tensor.is_contiguous()


def _agree(cluster: list[_Look]) -> bool:
    """Whether it is enough to look at places: nothing meets, or all of it in the checkpoint too."""
    if len(cluster) == 1 or all(a.agrees(b) for a, b in pairwise(cluster)):
        return all(look.shift is not None or not _repeats(look) for look in cluster)
    return False


def _repeats(look: _Look) -> bool:
    """Whether elements of one home may lie at one place."""
    sizes, steps = zip(*look.place[1], strict=True) if look.place[1] else ((), ())
    return overlaps_itself(sizes, [abs(step) for step in steps])


def first_contradiction(cluster: list[Home], values: Sequence[Tensor]) -> tuple[Home, Home] | None:
    """Two homes that cannot both hold their values; the values are written to a copy of the memory.

    Either may be the same home, when its own elements lie at one place.
    """
    ends = list(map(_ends, cluster))
    low, high = min(ends)[0], max(high for _, high in ends)
    low -= low % 16  # As aligned as it is, for typed views.
    memory = torch.zeros(high - low, dtype=torch.uint8, device="cpu")
    copies = [_moved(home, memory, low) for home in cluster]
    for home, value in zip(copies, values, strict=True):
        fill_home(home, value)
    for index, (home, value) in enumerate(zip(copies, values, strict=True)):
        if _holds(home, value):
            continue
        fill_home(home, value)
        if not _holds(home, value):
            return cluster[index], cluster[index]
        for later in range(index + 1, len(copies)):
            fill_home(copies[later], values[later])
            if not _holds(home, value):
                return cluster[index], cluster[later]
    return None


def _ends(home: Home) -> tuple[int, int]:
    """Addresses of its first byte and behind its last one; strides of arrays may be negative."""
    if home.array is None and home.tensor.is_contiguous():  # As nearly all are.
        address = home.tensor.data_ptr()
        return address, address + home.tensor.nbytes
    address, strides = _geometry(home)
    reach = [step * (size - 1) for size, step in zip(home.tensor.shape, strides, strict=True)]
    low = address + sum(step for step in reach if step < 0)
    return low, address + sum(step for step in reach if step > 0) + home.tensor.itemsize


def _moved(home: Home, memory: Tensor, low: int) -> Home:
    """The same home in a copy of its memory."""
    address, strides = _geometry(home)
    tensor, array = home.tensor, home.array
    if array is not None:
        import numpy as np

        buffer: Any = memory.numpy()
        array = np.ndarray(array.shape, array.dtype, buffer, address - low, strides)
    else:
        flags = ("c" if tensor.is_conj() else "") + ("n" if tensor.is_neg() else "")
        offset = (address - low) // tensor.itemsize
        plain = typed_view(
            memory, tensor.dtype, offset=offset, shape=tensor.shape, stride=tensor.stride()
        )
        tensor = put_bits(plain, flags)
    return replace(home, tensor=tensor, array=array)


def _held(home: Home) -> Tensor:
    if home.array is None:
        return home.tensor
    import numpy as np

    return torch.from_numpy(np.array(home.array, order="C"))


def _holds(home: Home, value: Tensor) -> bool:
    """Whether it has the value to the bit."""
    return torch.equal(_raw(_held(home)), _raw(source_of(home, value)))


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of all elements in row-major order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype in subbyte_dtypes():
        tensor = tensor.view(torch.uint8)
    # Contiguous, but where sizes are 1 its strides may be any.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
