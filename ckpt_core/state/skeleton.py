"""`Skeleton`: a state tree without its tensors' bytes, and how to put them back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_core.errors import CorruptCheckpoint, RestoreError
from ckpt_core.state.atoms import NotHere
from ckpt_core.state.build import Builder
from ckpt_core.state.checks import Malformed, sizes, want
from ckpt_core.state.codec import Decoder, Encoder
from ckpt_core.state.leaf import dtypes, empty_leaf, extent, overlaps_itself, row_major, typed_view
from ckpt_core.state.memory import refuse_fake
from ckpt_core.state.nodes import LeafTable, Node, Pool, RefTable
from ckpt_core.state.plain import fields_of, holds_generators
from ckpt_core.types import LeafSpec

Json = Any
_POOL_SLACK_BYTES = 4096
_MAX_LEAF_BYTES = 2**62
_MAX_SHIFT = 16


class Skeleton:
    """The frozen tree. Immutable: any thread may encode it while training goes on."""

    def __init__(
        self,
        tree: Node,
        refs: RefTable,
        leaves: LeafTable,
        *,
        path: str | Path = "memory",
        names: frozenset[str] | None = None,
    ) -> None:
        """
        Args:
            refs: may have more occurrences than the tree.
            path: names the file in errors.
            names: of the leaves that the tree refers to, if those are not all that `refs` knows.
        """
        self._names = names
        self.tree = tree
        self.refs = refs
        self.leaves = leaves
        self.path = str(path)

    def to_text(self) -> str:
        """JSON of less than 512 levels; may be made in the background, long after `flatten`."""
        rows = [f'"tree":{Encoder(self.refs).encode(self.tree)}']
        strides, shifts, pools = self.leaves.strides, self.leaves.shifts, self.leaves.pools
        found = [{"bytes": pool.nbytes, "offsets": pool.offsets} for pool in pools]
        for name, value in (("strides", strides), ("shifts", shifts), ("pools", found)):
            if value:
                rows.append(f'"{name}":{json.dumps(value, separators=(",", ":"))}')
        return f"{{{','.join(rows)}}}"

    def to_json(self) -> Json:
        """What `to_text` spells."""
        return json.loads(self.to_text())

    @classmethod
    def from_json(cls, obj: Json, *, path: str | Path) -> Skeleton:
        """The skeleton of `to_json`'s result, whoever wrote it; `path` names the file in errors.

        Raises:
            CorruptCheckpoint: it is not such a result. Nothing was allocated.
            RestoreError: it names what this torch does not have; likewise.
        """
        try:
            if not isinstance(obj, dict) or "tree" not in obj:
                raise Malformed("no tree")
            decoder = Decoder()
            tree = decoder.decode(obj["tree"])
            return cls(tree, decoder.refs, _decode_leaves(obj), path=path)
        except NotHere as exc:
            raise RestoreError(
                f"this checkpoint holds {exc}, which torch {torch.__version__} does not have here. Nothing "
                "is damaged, and nothing was changed: restore it with the torch that saved it",
                path=path,
            ) from exc
        except (ValueError, RecursionError) as exc:
            raise CorruptCheckpoint(
                f"the skeleton of this checkpoint has {exc}: it was damaged, or not written by us",
                path=path,
            ) from exc

    def leaf_names(self) -> set[str]:
        """Names of the leaves that the tree refers to, staged ones included."""
        return set(self.refs.leaf if self._names is None else self._names)

    def entries(self) -> list[str]:
        """Top-level entries of the state; none where it is no mapping."""
        return [key for key in fields_of(self.tree) if type(key) is str]

    def entries_with_generators(self) -> list[str]:
        """Top-level entries of the state in which an `RngState` was saved."""
        rows = fields_of(self.tree).items()
        return sorted(key for key, node in rows if type(key) is str and holds_generators(node))

    def allocate(self, specs: Mapping[str, LeafSpec]) -> dict[str, Tensor]:
        """Fresh CPU tensors for all `specs`, with the strides and shared storages that were saved.

        Each may be filled through a row-major copy of its bytes, from any thread.

        Raises:
            CorruptCheckpoint: the skeleton does not fit the specs.
            RestoreError: there is not so much memory, or this torch lacks a dtype.
            ConfigError: as `refuse_fake`.
        """
        refuse_fake()
        try:
            return self._allocate(specs)
        except (MemoryError, RuntimeError) as exc:  # torch raises a RuntimeError
            wanted = sum(
                math.prod(spec.shape) * dtypes()[spec.dtype].itemsize for spec in specs.values()
            )
            raise RestoreError(
                f"{wanted:,} bytes of memory for the leaves of this checkpoint are not to be had: {exc}. "
                "Nothing was changed; free some memory, or restore on a larger machine",
                path=self.path,
            ) from exc

    def _allocate(self, specs: Mapping[str, LeafSpec]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for pool in self.leaves.pools:
            if all(name in specs for name in pool.offsets):
                made.update(self._allocate_pool(pool, specs))
        for name, spec in specs.items():
            if name not in made:
                shape, dtype = self.check_spec(spec), dtypes()[spec.dtype]
                stride = self._stride(name, shape)
                shift = self.leaves.shifts.get(name, 0) if dtype is torch.uint8 else 0
                made[name] = empty_leaf(dtype, shape, stride, shift_bytes=shift)
        return {name: made[name] for name in specs}

    def unflatten(self, tensors: Mapping[str, Tensor], *, trusted: bool) -> Any:
        """The state tree over these tensors (of `allocate`, filled); objects are plain state dicts.

        Args:
            tensors: by leaf name; they become part of the tree.
            trusted: unpickle any type and import modules: only for checkpoints of known origin.

        Raises:
            CorruptCheckpoint: leaves are missing, or parts contradict each other.
            UntrustedData: it holds something that only `trusted=True` loads.
        """
        return self.builder(tensors, trusted=trusted).tree(self.tree)

    def builder(
        self, tensors: Mapping[str, Tensor], *, trusted: bool, rehearsal: bool = False
    ) -> Builder:
        """For `bind`, which builds the tree in pieces, and once before the bytes are there."""
        return Builder(self.refs, tensors, trusted=trusted, path=self.path, rehearsal=rehearsal)

    def check_spec(self, spec: LeafSpec) -> tuple[int, ...]:
        """The shape of a spec that torch can allocate.

        Raises:
            CorruptCheckpoint: no tensor has such a shape.
            RestoreError: this torch has no such dtype.
        """
        if spec.dtype not in dtypes():
            raise RestoreError(
                f"leaf {spec.name!r} is of dtype {spec.dtype!r}, which torch {torch.__version__} does not "
                "have. Nothing is damaged, and nothing was changed: restore it with a newer torch",
                path=self.path,
            )
        nbytes = math.prod(spec.shape) * dtypes()[spec.dtype].itemsize
        if min(spec.shape, default=0) < 0 or nbytes > _MAX_LEAF_BYTES or len(spec.shape) > 64:
            raise self.corrupt(f"the leaf {spec.name!r} has an impossible shape")
        return tuple(spec.shape)

    def corrupt(self, message: str) -> CorruptCheckpoint:
        """The error for specs and skeleton that contradict each other."""
        return CorruptCheckpoint(f"this checkpoint is damaged: {message[:400]}", path=self.path)

    def _stride(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The strides that were saved, if they are dense; they may not reach outside the leaf."""
        stride = self.leaves.strides.get(name)
        if stride is None:
            return row_major(shape)
        if len(stride) != len(shape) or extent(shape, stride) != math.prod(shape):
            raise self.corrupt(f"the strides of the leaf {name!r} do not fit its shape")
        if overlaps_itself(shape, stride):
            raise self.corrupt(f"the strides of the leaf {name!r} leave gaps or overlap")
        return stride

    def _allocate_pool(self, pool: Pool, specs: Mapping[str, LeafSpec]) -> dict[str, Tensor]:
        shapes = {name: self.check_spec(specs[name]) for name in pool.offsets}
        sizes_of = {
            name: math.prod(shape) * dtypes()[specs[name].dtype].itemsize
            for name, shape in shapes.items()
        }
        if pool.nbytes > 2 * sum(sizes_of.values()) + _POOL_SLACK_BYTES:
            raise self.corrupt("leaves of one storage are far apart")
        end = 0
        for name, offset in sorted(pool.offsets.items(), key=lambda item: item[1]):
            if offset < end or offset % dtypes()[specs[name].dtype].itemsize:
                raise self.corrupt(f"the leaf {name!r} overlaps another one of its storage")
            end = offset + sizes_of[name]
        if end > pool.nbytes:
            raise self.corrupt("a leaf lies outside its storage")
        storage = torch.empty(pool.nbytes, dtype=torch.uint8, device="cpu")
        return {
            name: typed_view(
                storage,
                dtype := dtypes()[specs[name].dtype],
                offset=offset // dtype.itemsize,
                shape=shapes[name],
                stride=self._stride(name, shapes[name]),
            )
            for name, offset in pool.offsets.items()
        }


def _decode_leaves(obj: dict[str, Any]) -> LeafTable:
    table = LeafTable()
    if "strides" in obj:
        table.strides = {name: sizes(row) for name, row in want(obj, "strides", dict).items()}
    if "shifts" in obj:
        for name, shift in want(obj, "shifts", dict).items():
            if type(shift) is not int or not 0 <= shift < _MAX_SHIFT:
                raise Malformed("a shift out of range")
            table.shifts[name] = shift
    seen: set[str] = set()
    for row in want(obj, "pools", list) if "pools" in obj else []:
        if not isinstance(row, dict):
            raise Malformed("a storage of unknown form")
        offsets = want(row, "offsets", dict)
        if not seen.isdisjoint(offsets):
            raise Malformed("a leaf in two storages")
        seen.update(offsets)
        places = dict(zip(offsets, sizes_any(list(offsets.values())), strict=True))
        table.pools.append(Pool(sizes([row.get("bytes")])[0], places))
    return table


def sizes_any(values: list[Any]) -> tuple[int, ...]:
    """As `sizes`, of any number of values."""
    return tuple(sizes([value])[0] for value in values)
