from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.layout import HeaderEntry, ShardLayout, header_length, parse_header
from ckpt_core.types import LeafSpec

PATH = Path("shard-00000-0.safetensors")


def file_of(text: bytes | str, region: int = 0) -> bytes:
    body = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(body)) + body + bytes(region)


def table(**entries: Any) -> str:
    return json.dumps(entries)


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]} | changes


def refused(data: bytes, *, file_bytes: int | None = None) -> CorruptCheckpoint:
    """The error; it names the path, what was expected and what was there."""
    with pytest.raises(CorruptCheckpoint) as caught:
        parse_header(data, file_bytes=len(data) if file_bytes is None else file_bytes, path=PATH)
    error = caught.value
    assert error.path == PATH
    assert error.expected
    assert error.got
    assert str(PATH) in str(error)
    assert len(str(error)) < 500
    return error


def test_entries_of_a_plan_are_found_where_the_plan_put_them() -> None:
    specs = [LeafSpec("w", "complex64", (3, 700)), LeafSpec("é", "bfloat16", (5,))]
    layout = ShardLayout.plan([], specs)
    end = header_length(layout.header[:8], file_bytes=layout.file_bytes, path=PATH)
    assert end == len(layout.header)
    entries = parse_header(layout.header, file_bytes=layout.file_bytes, path=PATH)
    first, second = layout.extents
    assert entries["w"] == HeaderEntry("F32", (3, 700, 2), first.offset, first.nbytes)
    assert entries["é"] == HeaderEntry("BF16", (5,), second.offset, second.nbytes)
    assert {name for name in entries if name.startswith("__pad__")} == entries.keys() - {"w", "é"}


def test_a_file_longer_than_its_header_may_be_given_whole() -> None:
    data = file_of(table(a=entry(0, 8)), 8)
    assert parse_header(data, file_bytes=len(data), path=PATH)["a"].nbytes == 8


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_too_short_for_a_length_is_refused(size: int) -> None:
    assert "at least 8 bytes" in refused(bytes(size)).expected


@pytest.mark.parametrize("length", [0, 1, 3, 100_000_001, 2**63, 2**64 - 1])
def test_a_length_beyond_the_file_or_the_limit_is_refused(length: int) -> None:
    data = struct.pack("<Q", length) + b"{}"
    assert refused(data).got == str(length)
    with pytest.raises(CorruptCheckpoint):
        header_length(data, file_bytes=len(data), path=PATH)


def test_a_length_above_the_limit_is_refused_even_if_the_file_is_larger() -> None:
    refused(struct.pack("<Q", 100_000_001) + b"{}", file_bytes=2**40)


def test_a_header_that_was_not_given_whole_is_refused() -> None:
    data = file_of(table(a=entry(0, 8)), 8)
    refused(data[:20], file_bytes=len(data))


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b" {}",
        b"\xef\xbb\xbf{}",
        b"{}x",
        b"{",
        b"{\xff}",
        b"nul",
        "{}".encode("utf-16"),
        b'{"__metadata__":{"a":NaN}}',
        b'{"__metadata__":{"a":-Infinity}}',
        b'{"__metadata__":{"a":1}}',
        b'{"__metadata__":[]}',
        b'{"__metadata__":null}',
        b'{"__metadata__":{"a":"b","a":"b"}}',
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' + b'{"a":' * 100_000,
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":1e999}',
    ],
    ids=lambda text: repr(text[:24]),
)
def test_text_that_is_no_plain_json_object_is_refused(text: bytes) -> None:
    refused(file_of(text))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        entry(0, 8, dtype="U9"),
        entry(0, 8, dtype=8),
        entry(0, 8, dtype=["U8"]),
        entry(0, 8, shape=None),
        entry(0, 8, shape=[8.0]),
        entry(0, 8, shape=[True] * 3),
        entry(0, 8, shape=["8"]),
        entry(0, 8, shape=[-8]),
        entry(0, 8, shape=[-2, -4]),
        entry(0, 8, shape=[9]),
        entry(0, 8, shape=[2**61 + 1, 8]),
        entry(0, 8, shape=[2**64 + 8]),
        entry(0, 8, shape=[8] + [1] * 1000),
        entry(0, 8, dtype="F4", shape=[15]),
        entry(0, 8, dtype="F64", shape=[8]),
        entry(0, 8, data_offsets=[0]),
        entry(0, 8, data_offsets=[0, 8, 8]),
        entry(0, 8, data_offsets=[0.0, 8]),
        entry(0, 8, data_offsets=[False, 8]),
        entry(0, 8, data_offsets=[8, 0]),
        entry(0, 8, data_offsets=[-8, 0]),
        entry(0, 8, data_offsets=[0, 2**70]),
        entry(0, 9),
        entry(0, 7),
        entry(1, 8),
        entry(0, 8, extra=1),
    ],
    ids=repr,
)
def test_an_entry_that_contradicts_itself_or_the_file_is_refused(value: Any) -> None:
    refused(file_of(table(a=value), 8))


@pytest.mark.parametrize("shape", [[0, 2**63 - 1, 2**63 - 1], [2**62, 2, 0]])
def test_a_product_that_overflows_on_its_way_to_zero_is_refused_or_is_zero(
    shape: list[int],
) -> None:
    data = file_of(table(a=entry(0, 0, shape=shape)))
    if shape[0] == 0:
        assert parse_header(data, file_bytes=len(data), path=PATH)["a"].nbytes == 0
    else:
        refused(data)


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"a": entry(0, 4), "b": entry(5, 8)},
        {"a": entry(0, 4), "b": entry(3, 8)},
        {"a": entry(0, 8), "b": entry(0, 8)},
        {"a": entry(0, 8), "b": entry(4, 4)},
        {"a": entry(2, 8)},
    ],
)
def test_entries_that_do_not_cover_the_region_exactly_once_are_refused(
    entries: dict[str, Any],
) -> None:
    refused(file_of(table(**entries), 8))


def test_empty_tensors_may_lie_between_others() -> None:
    entries = {"a": entry(0, 4), "x": entry(4, 4), "y": entry(4, 4), "b": entry(4, 8)}
    data = file_of(table(**entries, z=entry(8, 8)), 8)
    assert len(parse_header(data, file_bytes=len(data), path=PATH)) == 5


def test_a_name_that_occurs_twice_is_refused() -> None:
    value = json.dumps(entry(0, 8))
    assert "'a' twice" in refused(file_of(f'{{"a":{value},"a":{value}}}', 8)).got


def test_a_name_that_is_no_unicode_text_is_refused() -> None:
    refused(file_of(f'{{"\\ud800":{json.dumps(entry(0, 8))}}}', 8))


SAMPLE = file_of(
    table(a=entry(0, 4), b=entry(4, 8, dtype="F32", shape=[1]), __metadata__={"k": "v"}), 8
)


@given(st.binary(max_size=200), st.integers(0, 2**50))
def test_no_bytes_lead_to_another_error(data: bytes, file_bytes: int) -> None:
    with contextlib.suppress(CorruptCheckpoint):
        parse_header(data, file_bytes=file_bytes, path=PATH)


@given(st.integers(8, len(SAMPLE) - 9), st.binary(max_size=6), st.integers(0, 6))
@example(8, b"", 0)
def test_whatever_passes_after_a_change_is_also_what_safetensors_reads(
    place: int, new: bytes, removed: int
) -> None:
    body = SAMPLE[8:place] + new + SAMPLE[place + removed : -8]
    data = file_of(body, 8)
    try:
        entries = parse_header(data, file_bytes=len(data), path=PATH)
    except CorruptCheckpoint:
        return
    theirs = dict(safetensors.deserialize(data))
    assert {name: (e.dtype, list(e.shape)) for name, e in entries.items()} == {
        name: (e["dtype"], list(e["shape"])) for name, e in theirs.items()
    }
