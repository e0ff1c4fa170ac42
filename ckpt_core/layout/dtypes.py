"""How each torch dtype lies in a shard file: the one table that every size comes from.

A dtype that the safetensors format has keeps its name there. Any other is stored as a view of the
same bytes with one more dimension, so that every safetensors reader opens the file: complex numbers
as their two parts, the rest as bytes. Names that came late to safetensors (C64, F4, the fnuz ones)
count as missing: a reader that meets an unknown name refuses the whole file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.errors import ConfigError
from ckpt_core.types import LeafSpec

MAX_BYTES = 2**60
"""Bound of every size and offset: safetensors counts a tensor's bits in 64 bits."""

MAX_ELEMENTS = 2**63 - 1
"""Bound of the product of a shape, and of its first dimensions alone: readers have 64 bits."""

MAX_DIMS = 255
"""Most dimensions of a leaf, far above any real one; a hostile shape may not have a million."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where one torch dtype goes: its safetensors dtype, and the last dimension that is added."""

    itemsize: int
    code: str
    trailing: int | None = None


_NATIVE = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}
_AS_BYTES = {
    **dict.fromkeys(("complex32", "bcomplex32"), 4),
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float4_e2m1fn_x2": 1,
    "bits16": 2,
    **dict.fromkeys(("bits8", "bits4x2", "bits2x4", "bits1x8"), 1),
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}
STORAGE: dict[str, Storage] = {
    **{name: Storage(size, code) for code, (name, size) in _NATIVE.items()},
    "complex64": Storage(8, "F32", 2),
    "complex128": Storage(16, "F64", 2),
    **{name: Storage(size, "U8", size) for name, size in _AS_BYTES.items()},
}
"""torch dtype -> its storage. Every itemsize is a power of two: the leaf order relies on it."""

CODE_BITS: dict[str, int] = {
    **{code: 8 * size for code, (_, size) in _NATIVE.items()},
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "C64": 64,
}
"""safetensors dtype -> bits of one element: all that a reader may meet, written by us or not."""

_QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})


def storage(dtype: str) -> Storage:
    """Where a dtype goes.

    Raises:
        ConfigError: the name is none of torch's, or one whose meaning does not lie in its bytes.
    """
    found = STORAGE.get(dtype)
    if found is not None:
        return found
    if dtype in _QUANTIZED:
        raise ConfigError(
            f"dtype {dtype!r} keeps its scale outside its bytes: "
            "save tensor.int_repr() and the scale instead"
        )
    raise ConfigError(
        f"dtype {dtype!r} is unknown to this release: give torch's name, such as 'float32', or save another "
        "view of the tensor, such as tensor.view(torch.uint8)"
    )


def in_header(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a tensor as the header of its shard file has them.

    Raises:
        ConfigError: no dtype of that name can be stored.
    """
    kept = storage(dtype)
    return kept.code, shape if kept.trailing is None else (*shape, kept.trailing)


def itemsize(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        ConfigError: no dtype of that name can be stored.
    """
    return storage(dtype).itemsize


def nbytes(spec: LeafSpec) -> int:
    """Bytes of a leaf.

    Raises:
        ConfigError: unknown dtype, or a shape that no tensor has or that no file can hold.
    """
    size = measure(spec.dtype, spec.shape)
    if size is None:
        raise ConfigError(
            f"leaf {spec.name!r} has shape {spec.shape!r} of {spec.dtype}: "
            f"dimensions are 0 or more, at most {MAX_DIMS} of them, and at most 2**60 bytes"
        )
    return size


def measure(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of `shape` elements of `dtype`; None for a shape outside the format's limits.

    Raises:
        ConfigError: no dtype of that name can be stored.
    """
    elements = count_elements(shape)
    if elements is None or elements * itemsize(dtype) > MAX_BYTES:
        return None
    return elements * itemsize(dtype)


def count_elements(shape: tuple[int, ...]) -> int | None:
    """Product of a shape; None for a negative dimension, too many dimensions, or an overflow."""
    if len(shape) > MAX_DIMS:
        return None
    count = 1
    for dim in shape:
        count *= dim
        if dim < 0 or count > MAX_ELEMENTS:
            return None
    return count
