"""`bind`: where the bytes of a checkpoint go in a live state, and what remains to do after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt_core.errors import RestoreError, StateMismatch
from ckpt_core.state.aliasing import overlaps_itself
from ckpt_core.state.distributed import is_distributed, local_of, take_box
from ckpt_core.state.leaf import dtype_name, extent
from ckpt_core.state.match import Home, Load, Matcher
from ckpt_core.state.skeleton import Skeleton
from ckpt_core.state.special import subbyte_dtypes
from ckpt_core.types import Block, LeafSpec

_SHOWN = 20


def bind(skeleton: Skeleton, specs: Mapping[str, LeafSpec], live: Any, *, trusted: bool) -> Binding:
    """Pair a checkpoint with a live state; changes nothing yet. Called by `restore`.

    Args:
        specs: every leaf of the checkpoint, by name, of its whole shape if ranks store it in parts.
        live: the state tree to fill, of the structure that was saved. A plain value in it takes
            whatever was saved, in the tree that `finish` returns. A DTensor takes its local part of
            a leaf of its whole shape, whether the leaf was one when it was saved or not.
        trusted: unpickle any type and import modules.

    Raises:
        StateMismatch: names, shapes, dtypes or kinds differ; `.problems` lists all differences.
        CorruptCheckpoint: skeleton and leaves contradict each other.
        UntrustedData: it holds something that only `trusted=True` loads.
    """
    matcher = Matcher(skeleton, specs, trusted=trusted)
    matcher.check_refs()
    matcher.match(skeleton.tree, live, "")
    if matcher.problems:
        raise _mismatch(matcher.problems, skeleton)
    direct, rest = _choose(skeleton, specs, matcher.homes)
    fresh = skeleton.allocate({name: spec for name, spec in specs.items() if name not in direct})
    targets = _Targets(
        {name: direct[name].tensor if name in direct else fresh[name] for name in specs},
        {name: home.block for name, home in direct.items() if home.block is not None},
        {name: home.whole for name, home in direct.items() if home.whole is not None},
    )
    # What cannot be built must show before anything is filled.
    skeleton.builder(targets.shown, trusted=trusted, rehearsal=True).tree(skeleton.tree)
    return Binding(skeleton, targets, copies=rest, loads=matcher.loads, trusted=trusted)


@dataclass(frozen=True)
class _Targets:
    """Memory to fill, the boxes it takes, and the DTensors that it is the local part of; by leaf."""

    tensors: dict[str, Tensor]
    blocks: dict[str, Block]
    wholes: dict[str, Tensor]

    @property
    def shown(self) -> dict[str, Tensor]:
        """What the tree that is returned holds."""
        return self.tensors | self.wholes


class Binding:
    """Destinations to fill, then `finish`.

    Attributes:
        destinations: leaf name -> tensor of any strides and device; live where there is a live
            tensor of the same dtype and shape, else fresh. Its elements take the leaf's bytes in
            row-major order. No two of them overlap, so they may be filled in parallel.
        blocks: leaf name -> the box of the leaf that its destination takes, where that is the local
            part of a DTensor. Other destinations take the whole leaf.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        targets: _Targets,
        *,
        copies: list[Home],
        loads: list[Load],
        trusted: bool,
    ) -> None:
        self.destinations = targets.tensors
        self.blocks = targets.blocks
        self._shown = targets.shown
        self._skeleton = skeleton
        self._copies = copies
        self._loads = loads
        self._trusted = trusted

    def finish(self) -> Any:
        """Complete the live state and return the tree as loaded; call when all bytes are there.

        Tensors of the tree that were filled in place are the live ones; containers are always new.

        Raises:
            RestoreError: a `load_state_dict` failed; names the object, which may be half loaded.
            CorruptCheckpoint: parts of a composite tensor contradict each other.
        """
        builder = self._skeleton.builder(self._shown, trusted=self._trusted)
        with torch.no_grad():
            for home in self._copies:
                _fill_copy(home, builder.ref(home.number))
        for load in self._loads:
            try:
                load.live.load_state_dict(builder.tree(load.node))
            except Exception as exc:
                raise RestoreError(
                    f"{load.path or 'the state itself'}: {type(load.live).__name__}.load_state_dict"
                    f" refused the saved state: {type(exc).__name__}: {exc}",
                    path=self._skeleton.path,
                ) from exc
        return builder.tree(self._skeleton.tree)


def _mismatch(problems: list[str], skeleton: Skeleton) -> StateMismatch:
    lines = "\n  ".join(problems[:_SHOWN])
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return StateMismatch(
        f"the checkpoint does not fit the state, in {len(problems)} places; nothing was changed:\n"
        f"  {lines}{more}\nBuild the state as it was when it was saved, or read the checkpoint with"
        " ckpt_core.load(path) and pick what fits.",
        problems=problems,
    )


def _choose(
    skeleton: Skeleton, specs: Mapping[str, LeafSpec], homes: list[Home]
) -> tuple[dict[str, Home], list[Home]]:
    """One home for each leaf, where the bytes go directly; the others are filled by copies."""
    direct: dict[str, Home] = {}
    undivided = _undivided(skeleton, homes)
    rest: list[Home] = []
    claimed: dict[int, list[tuple[int, int]]] = {}
    known: dict[str, tuple[object, ...]] = {}
    for home in homes:
        name = skeleton.refs.leaf[home.number]
        place = _place(home.tensor)
        if place is not None and known.get(name) == place:
            continue  # The same live tensor again: tied weights.
        fits = name not in direct and _is_direct(skeleton, specs[name], home)
        fits = fits and (home.whole is None or name not in undivided)
        if fits and _claim(home.tensor, claimed):
            direct[name] = home
            known[name] = place or ()
        else:
            rest.append(home)
    return direct, rest


def _undivided(skeleton: Skeleton, homes: list[Home]) -> set[str]:
    """Leaves that something else needs whole, or another part of, than a DTensor that is a home."""
    refs = skeleton.refs
    if all(home.whole is None for home in homes):
        return set()
    found = {refs.leaf[number] for number in (*refs.views, *refs.composites)}
    forms: dict[str, tuple[bool, Block | None]] = {}
    for home in homes:
        name, form = refs.leaf[home.number], (home.whole is None, home.block)
        if forms.setdefault(name, form) != form:
            found.add(name)
    return found


def _is_direct(skeleton: Skeleton, spec: LeafSpec, home: Home) -> bool:
    refs, tensor = skeleton.refs, home.tensor
    if home.number in refs.views or home.number in refs.composites:
        return False
    flags = refs.flags.get(home.number, "")
    return (
        not ("c" in flags or "n" in flags or tensor.is_conj() or tensor.is_neg())
        and tensor.layout is torch.strided
        and dtype_name(tensor.dtype) == spec.dtype
        and not overlaps_itself(tensor.shape, tensor.stride())
    )


def _place(tensor: Tensor) -> tuple[object, ...] | None:
    if tensor.layout is not torch.strided:
        return None
    bits = (tensor.is_conj(), tensor.is_neg())
    where = (tensor.untyped_storage()._cdata, tensor.storage_offset(), *bits)
    return (*where, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _claim(tensor: Tensor, claimed: dict[int, list[tuple[int, int]]]) -> bool:
    """Whether no other leaf goes to any of these bytes; two writers would race."""
    low = tensor.data_ptr()
    high = low + extent(tensor.shape, tensor.stride()) * tensor.itemsize
    taken = claimed.setdefault(tensor.untyped_storage()._cdata, [])
    if any(start < high and low < end for start, end in taken):
        return False
    taken.append((low, high))
    return True


def _fill_copy(home: Home, source: Tensor) -> None:
    """Fill a live tensor from the tensor of an occurrence, which may be distributed alike."""
    if is_distributed(type(source)):
        source = local_of(source)
    elif home.block is not None:
        source = take_box(source, home.block)
    _copy(home.tensor, source)


def _copy(home: Tensor, source: Tensor) -> None:
    """Fill a live tensor of any form from one of equal dtype and shape."""
    source = source.detach()
    if home.layout is torch.strided and not home.is_quantized:
        for dim, step in enumerate(home.stride()):
            if step == 0 and home.shape[dim] > 1:  # An expanded dimension is one element.
                home, source = home.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        if home.dtype in subbyte_dtypes():
            home, source = home.view(torch.uint8), source.view(torch.uint8)
    home.copy_(source)
