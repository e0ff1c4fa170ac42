"""A shard file written the plainest way: header, then each leaf's bytes at its place."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from ckpt_core.layout import ShardLayout

Image = Callable[[ShardLayout, Mapping[str, bytes]], bytes]


@pytest.fixture(scope="session")
def image() -> Image:
    """Gives the bytes of a shard file from its layout and the bytes of its leaves."""

    def build(layout: ShardLayout, payload: Mapping[str, bytes]) -> bytes:
        data = bytearray(layout.file_bytes)
        data[: len(layout.header)] = layout.header
        for extent in layout.extents:
            assert len(payload[extent.name]) == extent.nbytes
            data[extent.offset : extent.offset + extent.nbytes] = payload[extent.name]
        return bytes(data)

    return build


@pytest.fixture(scope="session")
def noise() -> Callable[[str, int], bytes]:
    """Gives bytes that depend on a name, so that a leaf at another leaf's place is noticed."""
    return lambda name, size: random.Random(name).randbytes(size)
