"""What torch's zip writer does to the file-like object that it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt_core.torch_zip.sink import Sink


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def writer(sink: Sink) -> Any:
    return torch._C.PyTorchFileWriter(sink)


def test_records_have_their_names_in_whatever_order_torch_writes_them(
    sink: Sink, writer: Any
) -> None:
    # Before version 2.7 torch wrote "data/10" in front of "data/2".
    sizes = {"data/0": 5, "data/10": 1 << 40, "data/2": 64}
    for name, nbytes in sizes.items():
        writer.write_record_metadata(name, nbytes)
    writer.write_end_of_file()
    layout = sink.layout()
    assert {extent.name: extent.nbytes for extent in layout.extents} == sizes
    assert layout.file_bytes > 1 << 40


def test_records_with_bytes_and_without_are_frames(sink: Sink, writer: Any) -> None:
    writer.write_record("note", b"PK\x03\x04 is no header here", 24)
    writer.write_record_metadata("data/0", 0)
    writer.write_record_metadata("data/1", 3)
    writer.write_end_of_file()
    layout = sink.layout()
    assert [extent.name for extent in layout.extents] == ["data/1"]
    assert b"PK\x03\x04 is no header here" in layout.frames[0][1]
