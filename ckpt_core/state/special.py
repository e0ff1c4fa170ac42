"""Tensors that are not plain strided memory: refused with advice, or taken apart and rebuilt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ckpt_core.errors import ConfigError
from ckpt_core.state.leaf import dtype_name, dtypes, typed_view
from ckpt_core.state.nodes import MAX_DIMS, MAX_SIZE
from ckpt_core.state.quiet import quietly

QUANTIZED: dict[torch.dtype, torch.dtype] = {
    torch.qint8: torch.int8,
    torch.quint8: torch.uint8,
    torch.qint32: torch.int32,
    torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
}
PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}
_SUBBYTE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
_COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in _COMPRESSED}


def subbyte_dtypes() -> frozenset[torch.dtype]:
    """Dtypes that torch can allocate but not copy; they travel as bytes."""
    return frozenset(dtypes()[name] for name in _SUBBYTE if name in dtypes())


def find_special(tensors: list[Tensor]) -> list[int]:
    """Indices of the tensors that `decompose` must look at; cheap when there are none."""
    odd = subbyte_dtypes() | QUANTIZED.keys()
    strided = {torch.strided}
    if (
        not any(map(Tensor.is_neg, tensors))
        and not any(map(attrgetter("is_meta"), tensors))
        and not any(map(attrgetter("is_nested"), tensors))
        and set(map(attrgetter("layout"), tensors)) <= strided
        and not any(dtype in odd or dtype.is_complex for dtype in set(map(_dtype, tensors)))
    ):
        return []
    return [
        index
        for index, t in enumerate(tensors)
        if t.layout is not torch.strided
        or t.dtype in odd
        or t.is_neg()
        or t.is_conj()
        or t.is_meta
        or t.is_nested
    ]


_dtype = attrgetter("dtype")


def refuse_beyond(name: str, *sizes: int, elements: int = 0) -> None:
    """Raise ConfigError for sizes or strides that a reader, which trusts no bytes, would call damaged."""
    if len(sizes) > MAX_DIMS or max(elements, *sizes, 0) >= MAX_SIZE:
        raise ConfigError(
            f"{name!r} has more than {MAX_DIMS} dimensions, or sizes or strides of 2**62 and more, which no"
            " checkpoint holds: reshape it, and store what is expanded before it is"
        )


def is_uninitialized(tensor: Tensor) -> bool:
    """Whether it is a parameter or buffer of a lazy module, still without a shape."""
    return hasattr(tensor, "materialize") and isinstance(tensor, UninitializedTensorMixin)


def instead_of(tensor: Tensor) -> str:
    """What to store in the place of a tensor of a subclass: every word of it works for this one."""
    if is_uninitialized(tensor):
        return "run one forward pass first, so that its shape is known"
    if tensor.is_nested:
        return "store its .values() and .offsets()"
    if isinstance(tensor, torch.masked.MaskedTensor):
        return "store its .get_data() and .get_mask()"
    wrap = "wrap it in an object with state_dict()"
    if hasattr(tensor, "__tensor_flatten__"):
        return f"store the tensors in it, which its __tensor_flatten__() names, or {wrap}"
    return f"store .as_subclass(torch.Tensor), or {wrap}" if _is_plain_below(tensor) else wrap


def _is_plain_below(tensor: Tensor) -> bool:
    """Whether a tensor of a subclass has memory of its own, and is no wrapper of others."""
    try:
        plain = tensor.as_subclass(Tensor)
        return type(plain) is Tensor and plain.data_ptr() >= 0
    except Exception:
        return False


def clear_bits(tensor: Tensor) -> tuple[Tensor, str]:
    """The memory under lazy conjugation and negation, and the flags to put them back."""
    flags = ""
    if tensor.is_conj():
        tensor, flags = tensor.conj(), "c"
    if tensor.is_neg():
        tensor, flags = torch._neg_view(tensor), flags + "n"
    return tensor, flags


def put_bits(tensor: Tensor, flags: str) -> Tensor:
    """Undo `clear_bits`; a view, so that memory stays shared."""
    if "n" in flags:
        tensor = torch._neg_view(tensor)
    return tensor.conj() if "c" in flags else tensor


def decompose(tensor: Tensor, path: str) -> tuple[str, dict[str, Any], dict[str, Tensor]] | None:
    """(kind, plain metadata, parts) of a tensor that has no plain memory; None if it has.

    Raises:
        ConfigError: it has no bytes here (meta), or a layout that we do not store.
    """
    if tensor.is_meta:
        raise ConfigError(f"{path} is a meta tensor and holds no bytes: call to_empty() first")
    if tensor.is_nested:
        raise ConfigError(f"{path} is a nested tensor: store its .unbind() instead")
    if tensor.dtype in QUANTIZED:
        if "UnknownQuantizer" in _scheme_trouble(tensor):
            raise ConfigError(f"{path} is of {tensor.dtype}, and has no scale: quantize it first")
        return take_quantized(tensor)
    if tensor.layout is torch.sparse_coo:
        meta = {"shape": list(tensor.shape), "coalesced": tensor.is_coalesced()}
        return "coo", meta, {"values": tensor._values(), "indices": tensor._indices()}
    if tensor.layout in _COMPRESSED:
        names = _COMPRESSED[tensor.layout]
        meta = {
            "shape": list(tensor.shape),
            "layout": str(tensor.layout).removeprefix("torch."),
        }
        parts = {"values": tensor.values()} | {name: getattr(tensor, name)() for name in names}
        return "compressed", meta, parts
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{path} has layout {tensor.layout}: convert it with .to_dense() first")
    if tensor.dtype in subbyte_dtypes():
        return "bits", {"dtype": dtype_name(tensor.dtype)}, {"values": tensor.view(torch.uint8)}
    return None


def _scheme_trouble(tensor: Tensor) -> str:
    try:
        tensor.qscheme()
    except RuntimeError as exc:
        return str(exc)
    return ""


def take_quantized(tensor: Tensor) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """As `decompose`, of a quantized tensor."""
    meta: dict[str, Any] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
    raw = QUANTIZED[tensor.dtype]
    if tensor.dtype in PACKED:
        # Packed elements: several to a byte, so the strides mean nothing for the bytes.
        tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        count = -(-tensor.numel() // PACKED[tensor.dtype])
        start = int(tensor.storage_offset())
        values = typed_view(tensor, raw, offset=start, shape=(count,), stride=(1,))
    else:
        offset, shape, stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        values = typed_view(tensor, raw, offset=offset, shape=shape, stride=stride)
    parts = {"values": values}
    if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        meta["axis"] = tensor.q_per_channel_axis()
        parts["scales"] = tensor.q_per_channel_scales()
        parts["zero_points"] = tensor.q_per_channel_zero_points()
    else:
        meta["scale"], meta["zero_point"] = tensor.q_scale(), tensor.q_zero_point()
    return "quantized", meta, parts


def rebuild(kind: str, meta: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
    """The tensor that `decompose` took apart. Raises whatever torch finds wrong with the parts.

    Torch warns that these kinds of tensors are in beta, or deprecated, and 2.11 that invariants of sparse
    ones are not checked, although it is asked to check them.
    """
    values = parts["values"]
    if kind == "bits":
        return values.view(dtypes()[meta["dtype"]])
    if kind == "coo":
        made = quietly(
            lambda: torch.sparse_coo_tensor(
                parts["indices"],
                values,
                tuple(meta["shape"]),
                device=values.device,
                check_invariants=True,
            )
        )
        if meta["coalesced"] and not _is_ordered(made._indices()):
            raise ValueError("coalesced indices that are not in order")
        return made._coalesced_(bool(meta["coalesced"]))
    if kind == "compressed":
        layout = LAYOUTS[meta["layout"]]
        first, second = (parts[name] for name in _COMPRESSED[layout])
        return quietly(
            lambda: torch.sparse_compressed_tensor(
                first,
                second,
                values,
                tuple(meta["shape"]),
                layout=layout,
                device=values.device,
                check_invariants=True,
            )
        )
    return _rebuild_quantized(meta, parts)


def _is_ordered(indices: Tensor) -> bool:
    """Whether each column is lexicographically above the one before: torch believes the flag."""
    steps = indices[:, 1:] - indices[:, :-1]
    if not steps.numel():
        return indices.shape[1] < 2
    first = (steps != 0).byte().argmax(0, keepdim=True)
    return bool((steps.gather(0, first) > 0).all())


def _rebuild_quantized(meta: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
    dtype, shape, values = dtypes()[meta["dtype"]], tuple(meta["shape"]), parts["values"]
    packed = PACKED.get(dtype)
    numel = 1
    for size in shape:
        numel *= size
    if values.dtype is not QUANTIZED[dtype]:
        raise ValueError(f"quantized bytes are {values.dtype}, not {QUANTIZED[dtype]}")
    if values.numel() != (-(-numel // packed) if packed else numel) or (
        packed is None and tuple(values.shape) != shape
    ):
        raise ValueError(f"{values.numel()} quantized values cannot fill shape {shape}")
    made = quietly(lambda: _empty_quantized(dtype, shape, meta, parts))
    if packed:
        made.untyped_storage().copy_(values.contiguous().untyped_storage())
        return made
    offset = values.storage_offset()
    return made.set_(values.untyped_storage(), offset, shape, values.stride())


def _empty_quantized(
    dtype: torch.dtype, shape: tuple[int, ...], meta: Mapping[str, Any], parts: Mapping[str, Tensor]
) -> Tensor:
    if "axis" not in meta:
        return torch._empty_affine_quantized(
            shape, scale=meta["scale"], zero_point=meta["zero_point"], dtype=dtype
        )
    axis, scales, zeros = meta["axis"], parts["scales"], parts["zero_points"]
    # torch checks neither of these and would read past the end.
    if not 0 <= axis < len(shape) or not scales.numel() == zeros.numel() == shape[axis]:
        raise ValueError(f"per-channel axis {axis} does not fit shape {shape}")
    return torch._empty_per_channel_affine_quantized(
        shape, scales=scales, zero_points=zeros, axis=axis, dtype=dtype
    )


def part_items(parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Parts in order, without "values", which takes the place of the tensor itself."""
    return ((name, part) for name, part in parts.items() if name != "values")
