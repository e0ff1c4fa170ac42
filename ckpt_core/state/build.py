"""Nodes and tensors -> the state tree. Imports nothing and calls no constructor of the user's."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ckpt_core.errors import CkptError, CorruptCheckpoint, RestoreError, UntrustedData
from ckpt_core.state.atoms import thaw
from ckpt_core.state.generators import check_states
from ckpt_core.state.keys import Keys, Work
from ckpt_core.state.kinds import KINDS
from ckpt_core.state.leaf import dtypes, empty_leaf, extent, typed_view
from ckpt_core.state.nodes import (
    MOST_FLAG_BITS,
    PLAIN,
    Array,
    Atom,
    Map,
    Member,
    Node,
    Obj,
    Opaque,
    Record,
    Ref,
    RefTable,
    Seq,
    View,
)
from ckpt_core.state.opaque import open_opaque
from ckpt_core.state.plain import is_generators
from ckpt_core.state.special import put_bits, rebuild

_KEY_UNITS = 2**25
_SHOWN = 400
_FREE_ELEMENTS = 2**28
_TIMES = 16
"""How often the bytes of all leaves may be parts of sparse tensors, whose indices are looked at."""


class Builder:
    """Builds trees over one set of tensors; the trees share the tensors, but no container."""

    def __init__(
        self,
        refs: RefTable,
        tensors: Mapping[str, Tensor],
        *,
        trusted: bool,
        path: str,
        rehearsal: bool = False,
    ) -> None:
        self._rehearsal = rehearsal
        self._refs = refs
        self._tensors = tensors
        self._trusted = trusted
        self._path = path
        self._made: dict[int, Tensor] = {}
        self._aligned: dict[str, Tensor] = {}
        self._moved: dict[tuple[str, int], Tensor] = {}
        self._work = Work(_KEY_UNITS)
        leaf_bytes = sum(tensor.nbytes for tensor in tensors.values()) if refs.composites else 0
        self._elements = Work(_FREE_ELEMENTS + _TIMES * leaf_bytes)

    def tree(self, node: Node) -> Any:
        """As `build`, of a whole tree, and with every error one of ours."""
        try:
            return self.build(node)
        except CkptError:
            raise
        except MemoryError as exc:
            raise RestoreError(
                f"there is not enough memory for the values of this checkpoint: {exc}. Nothing on "
                "storage was changed; free some memory, then load it again",
                path=self._path,
            ) from exc
        except Exception as exc:
            what = f"values that cannot be made: {type(exc).__name__}: {str(exc)[:200]}"
            raise self.corrupt(what) from exc

    def keys(self, nodes: Sequence[Node]) -> list[Any]:
        """Values of nodes that a dict or a set is about to be made of."""
        made = [self.build(node) for node in nodes]
        if not self._trusted and not all(type(key) is str for key in made):
            Keys(self._work).add(made)
        return made

    def build(self, node: Node) -> Any:
        """The value of a node.

        Raises:
            CorruptCheckpoint: parts do not belong together.
            UntrustedData: it needs a type that is not there, or a pickle that is not harmless.
            RestoreError: a type is there and is another one than was saved.
        """
        if type(node) in PLAIN:
            return node
        return _BUILDERS[type(node)](self, node)

    def corrupt(self, message: str) -> CorruptCheckpoint:
        """The error for contents that contradict each other."""
        text = f"the skeleton of this checkpoint has {message[:_SHOWN]}"
        return CorruptCheckpoint(text, path=self._path)

    # -- containers ----------------------------------------------------------------------------

    def seq(self, node: Seq) -> Any:
        kind = KINDS[node.kind]
        try:
            items = self.keys(node.items) if kind.hashed else list(map(self.build, node.items))
            return kind.build(items, node.extra)
        except TypeError as exc:
            raise self.corrupt(f"a {node.kind} of values that cannot be in one") from exc

    def map(self, node: Map) -> Any:
        try:
            keys = self.keys(node.keys)
            items = dict(zip(keys, map(self.build, node.values), strict=True))
        except TypeError as exc:
            raise self.corrupt("a dict with a key that cannot be one") from exc
        if len(items) != len(keys):
            raise self.corrupt("a dict with a key that occurs twice")
        return (
            items if node.kind == "dict" else KINDS[node.kind].build(items, self.build(node.extra))
        )

    def record(self, node: Record) -> Any:
        kept = _FIELDS[node.kind]
        cls = self._type(node.type_name, f"{node.kind} type", lambda c: kept(c) is not None)
        here = kept(cls) or []
        if here != list(node.fields):
            raise RestoreError(
                f"the checkpoint holds a {node.type_name[:_SHOWN]} with the fields "
                f"{', '.join(node.fields)[:_SHOWN]}; here it has {', '.join(here)}. Nothing is damaged, and "
                "nothing was changed: restore it with the class as it was, or leave it out with only=",
                path=self._path,
            )
        values = [self.build(value) for value in node.values]
        if node.kind == "namedtuple":
            return tuple.__new__(cls, values)
        made = object.__new__(cls)
        for name, value in zip(node.fields, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    def obj(self, node: Obj) -> Any:
        made = self.build(node.state)
        if is_generators(node) and not self._rehearsal:
            # Whoever gets it hands it to native code.
            check_states(made)
        return made

    # -- values --------------------------------------------------------------------------------

    def atom(self, node: Atom) -> Any:
        return thaw(node.tag, node.value)

    def member(self, node: Member) -> Any:
        if node.name is None:
            cls = self._type(node.type_name, "Flag type", lambda c: issubclass(c, enum.Flag))
            if node.value is None or node.value.bit_length() > MOST_FLAG_BITS:
                raise self.corrupt("a flag of too many bits")
            try:
                return cls(node.value)
            except ValueError as exc:
                raise self._no_member(node) from exc
        cls = self._type(node.type_name, "Enum type", lambda c: issubclass(c, enum.Enum))
        members: Mapping[str, Any] = cls.__members__
        if node.name not in members:
            raise self._no_member(node)
        return members[node.name]

    def _no_member(self, node: Member) -> RestoreError:
        member, name = repr(node.value if node.name is None else node.name), node.type_name
        return RestoreError(
            f"the checkpoint holds the member {member[:_SHOWN]} of {name[:_SHOWN]}, which has no such here. "
            "Nothing is damaged, and nothing was changed: restore it with the class as it was",
            path=self._path,
        )

    def opaque(self, node: Opaque) -> Any:
        return open_opaque(node, trusted=self._trusted, path=self._path)

    def _type(self, name: str, kind: str, fits: Callable[[Any], bool]) -> Any:
        """A type that is loaded already; only trusted=True may import its module."""
        module_name, _, qualname = name.partition(":")
        shown = name[:_SHOWN]
        if self._trusted:
            try:
                importlib.import_module(module_name)
            except Exception as exc:
                raise UntrustedData(
                    f"the checkpoint holds a {shown}, whose module cannot be imported: {exc}",
                    type_name=shown.replace(":", "."),
                    path=self._path,
                ) from exc
        module = sys.modules.get(module_name)
        try:
            # Plain lookups in the modules' and classes' own dicts: no __getattr__ of theirs runs.
            found: Any = module
            for part in qualname.split("."):
                found = vars(found)[part]
        except (KeyError, TypeError):
            found = None
        if not isinstance(found, type) or not fits(found):
            advice = "import its module first, or pass trusted=True to let us import it"
            if self._trusted:
                advice = "restore it with the class where it was, or leave it out with only="
            raise UntrustedData(
                f"the checkpoint holds a {shown}, but no {kind} of that name is loaded: {advice}",
                type_name=shown.replace(":", "."),
                path=self._path,
            )
        return found

    # -- tensors -------------------------------------------------------------------------------

    def array(self, node: Array) -> Any:
        made = self.ref(node.ref).numpy()
        if node.readonly:
            made.flags.writeable = False
        return made

    def ref(self, number: Ref) -> Tensor:
        """The tensor of an occurrence, the same one each time."""
        made = self._made.get(number)
        if made is None:
            made = self._made[number] = self._flagged(self._composed(number), number)
        return made

    def _composed(self, number: Ref) -> Tensor:
        composite = self._refs.composites.get(number)
        if composite is None:
            return self.part(number)
        parts = {name: self.part(part) for name, part in composite.parts.items()}
        if self._rehearsal:  # The indices of a sparse tensor mean nothing before they are read.
            return torch.empty(0, device="cpu")
        # An expanded part may have any number of elements, and a leaf be a part any number of times.
        self._elements.spend(sum(part.numel() for part in parts.values()))
        try:
            return rebuild(composite.kind, composite.meta, parts)
        except (RuntimeError, ValueError, TypeError, IndexError) as exc:
            raise self.corrupt(f"a {composite.kind} tensor of unfit parts: {exc}") from exc

    def _flagged(self, tensor: Tensor, number: Ref) -> Tensor:
        flags = self._refs.flags.get(number)
        if flags is None or self._rehearsal:
            return tensor
        try:
            tensor = put_bits(tensor, flags)
            if "p" in flags:
                return Parameter(tensor, requires_grad="g" in flags)
            return tensor.detach().requires_grad_() if "g" in flags else tensor
        except RuntimeError as exc:
            raise self.corrupt(f"a tensor whose dtype does not allow its flags: {exc}") from exc

    def part(self, number: Ref) -> Tensor:
        """The leaf, or view of a leaf, of an occurrence; without its flags."""
        name = self._refs.leaf[number]
        leaf = self._tensors.get(name)
        if leaf is None:
            raise self.corrupt(f"a tensor of the leaf {name!r}, which the checkpoint does not list")
        view = self._refs.views.get(number)
        return leaf if view is None else self._view(leaf, view, name)

    def _view(self, leaf: Tensor, view: View, name: str) -> Tensor:
        dtype = dtypes()[view.dtype]
        check_view(view, leaf.nbytes, name, self._path)
        leaf = self._aligned.get(name, leaf)
        if not leaf.is_contiguous():
            leaf = self._aligned[name] = leaf.contiguous()
        start = leaf.storage_offset() * leaf.itemsize + view.offset
        if start % dtype.itemsize:
            shift = -view.offset % dtype.itemsize
            leaf = self._aligned[name] = self._shifted(leaf, name, shift)
            start = shift + view.offset
        offset = start // dtype.itemsize
        return typed_view(leaf, dtype, offset=offset, shape=view.shape, stride=view.stride)

    def _shifted(self, leaf: Tensor, name: str, shift: int) -> Tensor:
        """The bytes of a leaf past an aligned address; made once, however many views ask for it."""
        moved = self._moved.get((name, shift))
        if moved is None:
            moved = empty_leaf(torch.uint8, (leaf.nbytes,), shift_bytes=shift)
            moved.copy_(leaf.view(torch.uint8).reshape(-1))
            self._moved[name, shift] = moved
        return moved


_BUILDERS: dict[type, Callable[[Builder, Any], Any]] = {
    Seq: Builder.seq,
    Map: Builder.map,
    Record: Builder.record,
    Obj: Builder.obj,
    Atom: Builder.atom,
    Member: Builder.member,
    Array: Builder.array,
    Opaque: Builder.opaque,
    Ref: Builder.ref,
}


def check_view(view: View, leaf_bytes: int, name: str, path: str) -> None:
    """Raise CorruptCheckpoint unless the view lies inside its leaf."""
    size = extent(view.shape, view.stride) * dtypes()[view.dtype].itemsize
    if view.offset + size > leaf_bytes:
        raise CorruptCheckpoint(
            f"the skeleton has a view of bytes {view.offset} to {view.offset + size} of the leaf"
            f" {name[:60]!r}, which has {leaf_bytes}",
            path=path,
            expected=f"at most {leaf_bytes}",
            got=str(view.offset + size),
        )


def _fields_of_dataclass(cls: Any) -> list[str] | None:
    return [one.name for one in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else None


def _fields_of_namedtuple(cls: Any) -> list[str] | None:
    found = getattr(cls, "_fields", None) if issubclass(cls, tuple) else None
    return None if found is None else list(found)


_FIELDS = {"dataclass": _fields_of_dataclass, "namedtuple": _fields_of_namedtuple}
"""Names of the fields of a type, by the kind of record that its values are; None: it is no such type."""
