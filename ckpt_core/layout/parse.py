"""Reads a safetensors header that anyone may have written; checks it against the real file size."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_core.layout.dtypes import CODE_BITS, MAX_BYTES, MAX_DIMS, count_elements
from ckpt_core.layout.header import LENGTH_BYTES, MAX_HEADER_BYTES, METADATA_KEY
from ckpt_core.layout.strict_json import Invalid, bounded, brief, is_name, note, parse, row

_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file: safetensors' dtype; `offset` counts from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def header_length(data: bytes, *, file_bytes: int, path: Path) -> int:
    """How many bytes from the start of the file `parse_header` needs.

    Args:
        data: the first bytes of the file, 8 or more.
        file_bytes: the file's real size.

    Raises:
        CorruptCheckpoint: the length does not fit the file, or is above safetensors' limit.
    """
    try:
        return _length(data, file_bytes)
    except Invalid as exc:
        raise exc.of(path) from exc


def parse_header(data: bytes, *, file_bytes: int, path: Path) -> dict[str, HeaderEntry]:
    """The entries of a header, padding included, `__metadata__` not.

    Called by verify and by tools that look at one shard file.

    Args:
        data: the first `header_length` bytes of the file, or more.
        file_bytes: the file's real size.

    Raises:
        CorruptCheckpoint: anything that safetensors refuses, and anything ambiguous: duplicate
            names, unknown keys, entries that do not cover the tensor region exactly once.
    """
    try:
        end = _length(data, file_bytes)
        if len(data) < end:
            raise Invalid("header", expected=f"{end} bytes", got=note(f"{len(data)} bytes"))
        return _entries(bytes(data[LENGTH_BYTES:end]), base=end, region_bytes=file_bytes - end)
    except Invalid as exc:
        raise exc.of(path) from exc


def _length(data: bytes, file_bytes: int) -> int:
    if len(data) < LENGTH_BYTES:
        raise Invalid("file", expected="at least 8 bytes", got=note(f"{len(data)} bytes"))
    (length,) = struct.unpack_from("<Q", data)
    bounded(length, "header length", len("{}"), MAX_HEADER_BYTES)
    bounded(length, "header length", len("{}"), file_bytes - LENGTH_BYTES)
    return LENGTH_BYTES + int(length)


def _entries(text: bytes, *, base: int, region_bytes: int) -> dict[str, HeaderEntry]:
    if not text.startswith(b"{"):
        raise Invalid("header", expected="'{' first", got=note(repr(text[:1])))
    table: dict[str, Any] = parse(text)
    _check_metadata(table.pop(METADATA_KEY, {}))
    entries = {name: _entry(name, value, base, region_bytes) for name, value in table.items()}
    _check_coverage(entries, base, base + region_bytes)
    return entries


def _entry(name: str, value: Any, base: int, region_bytes: int) -> HeaderEntry:
    if not is_name(name):
        raise Invalid("name", expected="a text that UTF-8 can hold", got=name)
    if type(value) is not dict or value.keys() != _KEYS:
        raise Invalid(f"entry {brief(name)}", expected="dtype, shape, data_offsets", got=value)
    code, dims = value["dtype"], value["shape"]
    if type(code) is not str or code not in CODE_BITS:
        raise Invalid(f"dtype of {brief(name)}", expected="one of safetensors", got=code)
    if type(dims) is not list:
        raise Invalid(f"shape of {brief(name)}", expected="a list", got=dims)
    shape = tuple([bounded(dim, "dimension", 0, 2**63 - 1) for dim in dims])
    begin, end = row(value["data_offsets"], "data_offsets", 2)
    bounded(begin, f"begin of {brief(name)}", 0, min(region_bytes, MAX_BYTES))
    bounded(end, f"end of {brief(name)}", begin, min(region_bytes, MAX_BYTES))
    _check_size(name, shape, CODE_BITS[code], end - begin)
    return HeaderEntry(code, shape, base + begin, end - begin)


def _check_size(name: str, shape: tuple[int, ...], bits: int, size: int) -> None:
    elements = count_elements(shape)
    if elements is None:
        raise Invalid(
            f"shape of {brief(name)}",
            expected=f"at most {MAX_DIMS} dimensions and 2**63-1 elements",
            got=note(f"{len(shape)} dimensions"),
        )
    if elements * bits != size * 8:
        raise Invalid(f"size of {brief(name)}", expected=f"{elements * bits} bits", got=size * 8)


def _check_metadata(value: Any) -> None:
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise Invalid(METADATA_KEY, expected="an object of texts", got=value)


def _check_coverage(entries: dict[str, HeaderEntry], start: int, stop: int) -> None:
    position = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != position:
            raise Invalid("tensor region", expected=f"an entry at {position}", got=entry.offset)
        position += entry.nbytes
    if position != stop:
        raise Invalid("tensor region", expected=f"entries up to {stop}", got=position)
