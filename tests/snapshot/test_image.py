"""The image of a shard file: every byte in its place, whatever the leaves and the chunks."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.snapshot import CopyStreams, ImageSpec, Piece, PoolPlan, ShardImage, StagingPool
from ckpt_core.snapshot.copying import buffers_at, copy_range
from ckpt_core.system.devices import Devices

CHUNK = 4096


class Sink:
    """Collects pieces into the file that they are of, and gives the chunks back at once."""

    def __init__(self, nbytes: int) -> None:
        self.file = bytearray(nbytes)
        self.indices: list[int] = []

    def submit(self, piece: Piece) -> None:
        assert piece.memory.nbytes == piece.nbytes
        assert piece.offset % CHUNK == 0
        self.file[piece.offset : piece.offset + piece.nbytes] = piece.memory
        self.indices.append(piece.index)
        if piece.memory.obj is not self.file:
            piece.memory[:] = b"\xff" * piece.nbytes  # what comes next must not depend on it
        piece.release()

    def window(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.file)[offset : offset + nbytes]


def image_of(
    sink: Sink,
    *,
    front: int = 1,
    mapped: bool = False,
    hold: int = 0,
    pool: StagingPool | None = None,
) -> ShardImage:
    fronts = -(-front // CHUNK)
    pool = pool or StagingPool(PoolPlan(CHUNK, fronts, fronts, 1), Devices())
    spec = ImageSpec(
        file_bytes=len(sink.file),
        front_bytes=front,
        hold_bytes=hold,
        mapped=mapped,
        deadline=time.monotonic() + 60,
        cancelled=lambda: False,
    )
    return ShardImage(pool, sink, spec, CopyStreams(Devices()))


def row_major(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def leaves() -> list[torch.Tensor]:
    base = torch.arange(6000, dtype=torch.float32)
    return [
        base,
        base.view(60, 100).t(),
        base[::3],
        base.view(20, 30, 10).permute(2, 0, 1)[1:7, :, 3:],
        torch.tensor(7, dtype=torch.int64),
        torch.empty(0),
        torch.randn(33, 3).to(torch.bfloat16)[:, 1],
        torch.complex(base, -base).view(100, 60).t(),
        base.view(1, 6000).expand(3, 6000)[:, ::2],
    ]


@pytest.mark.parametrize("mapped", [False, True], ids=["pool", "mapped"])
def test_leaves_of_any_strides_lie_in_row_major_order_at_their_offsets(mapped: bool) -> None:
    header = b"h" * CHUNK
    items, expected, cursor = [], bytearray(header), CHUNK
    for tensor in leaves():
        cursor += -cursor % 128
        data = row_major(tensor)
        items.append((tensor, cursor, len(data)))
        expected += bytes(cursor - len(expected)) + data
        cursor += len(data)
    expected += bytes(-len(expected) % CHUNK)
    sink = Sink(len(expected))
    image = image_of(sink, front=CHUNK, mapped=mapped)
    image.header(header)
    image.leaves(items)
    image.finish()
    assert sink.file == expected
    assert sink.indices == list(range(len(expected) // CHUNK))


@given(sizes=st.lists(st.integers(0, 3 * CHUNK), max_size=30), gap=st.integers(0, 300))
def test_any_sizes_and_gaps_give_the_same_file_as_one_buffer(sizes: list[int], gap: int) -> None:
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    expected, items = bytearray(CHUNK), []
    for tensor in data:
        expected += bytes(gap)
        items.append((tensor, len(expected), tensor.numel()))
        expected += tensor.numpy().tobytes()
    expected += bytes(-len(expected) % CHUNK)
    sink = Sink(len(expected))
    image = image_of(sink)
    image.header(bytes(CHUNK))
    image.leaves(items)
    image.finish()
    assert sink.file == expected


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("leaf", [CHUNK // 4, CHUNK, 3 * CHUNK])
def test_a_last_leaf_that_ends_with_the_file_is_handed_over(chunks: int, leaf: int) -> None:
    data = [torch.randint(0, 256, (leaf,), dtype=torch.uint8) for _ in range(4 * chunks)]
    sink = Sink(CHUNK + leaf * len(data))
    pool = StagingPool(PoolPlan(4 * CHUNK, 1, 1, 2), Devices())
    sink_chunk = pool.plan.chunk_bytes
    image = image_of(sink, pool=pool)
    image.header(bytes(CHUNK))
    image.leaves([(tensor, CHUNK + leaf * i, leaf) for i, tensor in enumerate(data)])
    image.finish()
    assert sink.file == bytes(CHUNK) + b"".join(tensor.numpy().tobytes() for tensor in data)
    assert sink.indices == list(range(-(-len(sink.file) // sink_chunk)))


def test_a_held_header_is_filled_in_last_and_its_chunks_go_last() -> None:
    header = bytes(range(256)) * (2 * CHUNK // 256)
    sink = Sink(4 * CHUNK)
    image = image_of(sink, front=2 * CHUNK, hold=2 * CHUNK)
    image.skip_header(2 * CHUNK)
    body = torch.randint(0, 256, (CHUNK + 100,), dtype=torch.uint8)
    image.leaf(body, offset=2 * CHUNK, nbytes=body.numel())
    assert sink.indices == [2]
    image.set_header(header)
    image.finish()
    assert sink.file == header + body.numpy().tobytes() + bytes(CHUNK - 100)
    assert sink.indices == [2, 0, 1, 3]


def test_abandoning_gives_every_chunk_back() -> None:
    sink = Sink(4 * CHUNK)
    image = image_of(sink, front=2 * CHUNK, hold=2 * CHUNK)
    image.skip_header(2 * CHUNK)
    image.leaf(torch.zeros(10, dtype=torch.uint8), offset=2 * CHUNK, nbytes=10)
    image.abandon()
    image.abandon()
    assert image.pool.wait_idle(deadline=time.monotonic())


def test_ten_thousand_small_leaves_make_one_file() -> None:
    data = [torch.full((7,), i, dtype=torch.int16) for i in range(10_000)]
    total = CHUNK + 14 * len(data)
    sink = Sink(total + -total % CHUNK)
    image = image_of(sink, front=total)
    image.header(bytes(CHUNK))
    image.leaves([(tensor, CHUNK + 14 * i, 14) for i, tensor in enumerate(data)])
    image.finish()
    assert sink.file[CHUNK:total] == torch.cat(data).numpy().tobytes()


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_range_of_a_strided_leaf_can_be_copied(shape, order, cut) -> None:  # type: ignore[no-untyped-def]
    dims = list(range(len(shape)))
    order.shuffle(dims)
    count = torch.Size(shape).numel()
    tensor = torch.arange(count, dtype=torch.int32).view(shape).permute(dims)
    start, end = sorted(int(part * count) for part in cut)
    if start == end:
        return
    target = torch.zeros((end - start) * 4, dtype=torch.uint8)
    copy_range(tensor, start * 4, target, devices=Devices())
    assert target.view(torch.int32).tolist() == tensor.flatten()[start:end].tolist()


def test_strided_leaves_are_not_read_as_raw_memory() -> None:
    assert Devices().is_flat(torch.zeros(4, 4))
    assert not Devices().is_flat(torch.zeros(4, 4).t())


@given(
    st.lists(
        st.sampled_from([1, 2, 100, CHUNK - 1, CHUNK, CHUNK + 1, 9000]), min_size=1, max_size=40
    ),
    st.booleans(),
)
def test_leaves_by_their_addresses_lie_where_leaves_one_by_one_do(
    sizes: list[int], as_buffers: bool
) -> None:
    data = [torch.full((size,), i + 1, dtype=torch.uint8) for i, size in enumerate(sizes)]
    offsets = [CHUNK + sum(sizes[:i]) for i in range(len(sizes))]
    total = CHUNK + sum(sizes)
    sink = Sink(total + -total % CHUNK)
    image = image_of(sink, front=total)
    image.header(bytes(CHUNK))
    pointers = [tensor.data_ptr() for tensor in data]
    image.flat(pointers, offsets, sizes, buffers_at(pointers, sizes) if as_buffers else ())
    image.finish()
    assert sink.file[CHUNK:total] == torch.cat(data).numpy().tobytes()
    assert sink.indices == list(range(len(sink.file) // CHUNK))
