"""Memory goes back only when no copy can touch it, however a save ends."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, CkptError, Options
from ckpt_core.errors import StagingError
from ckpt_core.persist import HeldBack, WriteJob, WriterPool
from ckpt_core.save.reading import Reading, stage_items
from ckpt_core.snapshot import (
    CopyStreams,
    ImageSpec,
    LeafWatch,
    Piece,
    PoolPlan,
    ShardImage,
    Snapshot,
    StageItem,
    StagingPool,
    pool,
)
from ckpt_core.snapshot.pool import Chunk, Part
from tests.devices.late_devices import LateDevices, LateEvent

CHUNK = 4096
MARK = 0x11


@dataclass
class Sink:
    """Keeps the pieces; its windows are `file`."""

    file: bytearray = field(default_factory=lambda: bytearray(4 * CHUNK))
    pieces: list[Piece] = field(default_factory=list)

    def submit(self, piece: Piece) -> None:
        self.pieces.append(piece)

    def window(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.file)[offset : offset + nbytes]


@dataclass
class Bench:
    """An image of device leaves, its staging memory and what lies below."""

    where: str = "open"
    chunks: int = 4
    devices: LateDevices = field(default_factory=LateDevices)
    sink: Sink = field(default_factory=Sink)

    def __post_init__(self) -> None:
        self.pool = StagingPool(PoolPlan(CHUNK, 0, 0, self.chunks), self.devices)
        self.streams = CopyStreams(self.devices)
        spec = ImageSpec(
            file_bytes=4 * CHUNK,
            front_bytes=0,
            hold_bytes=4 * CHUNK if self.where == "held" else 0,
            mapped=self.where == "mapped",
            deadline=time.monotonic() + 30,
            cancelled=lambda: True,
        )
        self.image = ShardImage(self.pool, self.sink, spec, self.streams)

    def leaf(self, nbytes: int, index: int = 0) -> StageItem:
        return self.devices.place(torch.ones(nbytes, dtype=torch.uint8), index), 0, nbytes

    def use_again(self) -> bool:
        """Whether memory that has been given back keeps what others put there."""
        views = [memoryview(self.sink.file)] if self.where == "mapped" else self._free()
        for view in views:
            view[:] = bytes([MARK]) * len(view)
        self.devices.drain()
        return all(bytes(view) == bytes([MARK]) * len(view) for view in views)

    def _free(self) -> list[memoryview]:
        """All chunks, which must be free."""
        deadline = time.monotonic() + 10
        chunks = [
            self.pool.acquire(Part.STREAM, deadline=deadline, cancelled=lambda: True)
            for _ in range(self.chunks)
        ]
        return [chunk.memory for chunk in chunks]


def abandon_and_use_again(where: str) -> None:
    bench = Bench(where)
    bench.image.leaves([bench.leaf(CHUNK // 2 if where == "open" else 2 * CHUNK + 100)])
    bench.image.abandon()
    for piece in bench.sink.pieces:  # Of a mapped file: on their way to the writers.
        piece.ready.wait()
    assert bench.use_again()


@pytest.mark.parametrize("where", ["open", "held", "mapped"])
def test_an_image_that_is_abandoned_gives_memory_back_behind_its_copies(where: str) -> None:
    abandon_and_use_again(where)


def cancel_and_use_again(*, held_back: bool) -> None:
    bench = Bench()
    first, _, _ = bench.leaf(CHUNK, 0)
    second, _, _ = bench.leaf(3 * CHUNK, 1)
    bench.image.leaves([(first, 0, CHUNK), (second, CHUNK, 3 * CHUNK)])
    pool = WriterPool(1)
    pool.start()
    held = HeldBack(pool)
    done = threading.Semaphore(0)
    shard: Any = None  # It is not written to.
    for piece in bench.sink.pieces:
        job = WriteJob(shard, piece, lambda: True, lambda _: done.release())
        (held if held_back else pool).submit(job)
    held.let_go()
    assert all(done.acquire(timeout=60) for _ in bench.sink.pieces)
    pool.close(timeout_s=30)
    assert len(bench.sink.pieces) == 4
    assert bench.use_again()


@pytest.mark.parametrize("held_back", [False, True])
def test_a_piece_that_is_not_written_goes_back_behind_its_copies(held_back: bool) -> None:
    cancel_and_use_again(held_back=held_back)


def test_a_chunk_with_leaves_of_two_devices_is_ready_when_both_are() -> None:
    bench = Bench()
    first, _, _ = bench.leaf(1000, 0)
    second, _, _ = bench.leaf(3096, 1)
    bench.image.leaves([(first, 0, 1000), (second, 1000, 3096)])
    (piece,) = bench.sink.pieces
    piece.ready.wait()
    assert bytes(piece.memory) == b"\x01" * CHUNK


def test_leaves_are_free_after_an_error_only_when_no_copy_reads_them() -> None:
    bench = Bench(chunks=1)  # The second chunk never comes.
    snapshot = Snapshot(1, devices=bench.devices)
    snapshot.expect(["leaf"], [None])
    watch = LeafWatch(1, None, devices=bench.streams.devices)
    reading = Reading(bench.streams, watch, on_devices=True)
    with pytest.raises(StagingError):
        stage_items(snapshot, bench.image, [bench.leaf(2 * CHUNK)], reading)
    assert bench.devices.copies_into(0, 1 << 63) == 0
    snapshot.fail(StagingError("given up"))
    assert snapshot.is_clear(None)


class Dead(LateDevices):
    """Devices that report an error in every wait of some thread."""

    thread = ""

    def record(self, device: torch.device, stream: Any = None) -> LateEvent:
        return _DeadEvent(**vars(super().record(device)))


class _DeadEvent(LateEvent):
    def synchronize(self) -> None:
        assert isinstance(self.owner, Dead)
        if threading.current_thread().name.startswith(self.owner.thread):
            raise RuntimeError("an illegal memory access was encountered")
        super().synchronize()


@pytest.mark.parametrize("thread", ["ckpt-stager", "ckpt-writer", "ckpt-"])
def test_a_device_that_fails_fails_the_save_and_keeps_its_memory(
    root: Path, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Dead()
    devices.thread = thread
    state = {"large": devices.place(torch.randn(50_000), 0), "host": torch.randn(100)}
    # Copied into the front of the file.
    state["small"] = devices.place(torch.randn(100), 0)
    options = Options(on_error="warn", timeout=60, chunk_bytes="16KiB", staging_bytes="64KiB")
    with caplog.at_level(logging.CRITICAL), Checkpointer(root, options, devices=devices) as ck:
        handle = ck.save(1, state)
        error = handle.committed.exception(60)
        assert isinstance(error, StagingError)
        assert "illegal memory access" in str(error)
        ck.wait_staged()
        ck.save(2, {"host": state["host"]}).committed.result(60)
    devices.drain()
    assert not devices.failures
    assert [path.name for path in root.glob("step-*")] == ["step-000000000002"]


def test_a_device_that_fails_again_and_again_does_not_use_up_the_host() -> None:
    staging = StagingPool(PoolPlan(CHUNK, 0, 0, 2), LateDevices())

    def acquire() -> Chunk:
        deadline = time.monotonic() + 60
        return staging.acquire(Part.STREAM, deadline=deadline, cancelled=lambda: False)

    taken = []
    for _ in range(4):
        taken.append(acquire())
        staging.lose(taken[-1])
    assert len({chunk.address for chunk in taken}) == 4
    assert staging.wait_idle(deadline=time.monotonic())
    with pytest.raises(StagingError, match="lost to a device that has failed"):
        acquire()


def test_the_memory_of_clones_is_kept_from_save_to_save(root: Path) -> None:
    devices = LateDevices()
    asked: list[int] = []
    make = devices.flat
    devices.flat = lambda *args: asked.append(args[0]) or make(*args)  # type: ignore[method-assign]
    state = {"large": devices.place(torch.randn(50_000), 0)}
    with Checkpointer(root, Options(mode="device"), devices=devices) as ck:
        for step in range(4):
            devices.run(0, lambda: state["large"].add_(1))
            ck.save(step, state).committed.result(60)
            assert ck.gauges.mode == "device"
    assert asked == [200_000]


@pytest.mark.parametrize("mode", ["host", "device"])
def test_nothing_of_a_save_is_kept_once_it_is_staged(root: Path, mode: str) -> None:
    devices = LateDevices()
    state = {"large": devices.place(torch.randn(50_000), 0), "host": torch.randn(50_000)}
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in state.values()]
    with Checkpointer(root, Options(mode=mode), devices=devices) as ck:
        ck.save(1, state).committed.result(60)
        devices.drain()
        devices._placed.clear()
        state.clear()
        deadline = time.monotonic() + 30
        while any(ref() is not None for ref in gone) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(ref() is None for ref in gone)


class Pinning(LateDevices):
    """Devices that note who has memory page-locked for them, and may refuse."""

    def __init__(self, *, refuse: bool = False) -> None:
        super().__init__()
        self.refuse = refuse
        self.locked: list[tuple[str, int]] = []

    def ask_to_lock(self, address: int, nbytes: int, device: torch.device) -> int | None:
        self.locked.append((threading.current_thread().name, nbytes))
        return 2 if self.refuse else super().ask_to_lock(address, nbytes, device)


@pytest.mark.parametrize("prepared", [False, True])
def test_memory_is_page_locked_behind_training_and_only_what_is_used(
    root: Path, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_SEGMENT_BYTES", 64 * 1024)
    devices = Pinning()
    state = {"large": devices.place(torch.randn(50_000), 0)}
    options = Options(chunk_bytes="16KiB", staging_bytes="4MiB", in_flight=1)
    with Checkpointer(root, options, devices=devices) as ck:
        if prepared:
            ck.prepare(state)
        ck.save(1, state).committed.result(60)
        ck.save(2, state).committed.result(60)
    assert {name for name, _ in devices.locked} == {"ckpt-stager"}
    assert 0 < sum(nbytes for _, nbytes in devices.locked) < 2**20
    assert not devices.failures
    assert not devices._pinned


def test_memory_that_may_not_be_page_locked_serves_as_it_is_and_one_warning_says_so(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Pinning(refuse=True)
    large = torch.randn(50_000)
    state = {"large": devices.place(large, 0)}
    with Checkpointer(root, Options(mode="host"), devices=devices) as ck:
        for step in (1, 2):
            ck.save(step, state).committed.result(60)
        assert len(devices.locked) == 1
        # Memory of another size is made, and refused, too.
        state["larger"] = devices.place(torch.randn(9_000_000), 1)
        ck.save(3, state).committed.result(60)
    assert len(devices.locked) == 2
    assert sum("could not be page-locked" in line for line in caplog.messages) == 1
    assert torch.equal(ckpt_core.load(root)["large"], large)


class Stuck(LateDevices):
    """Devices that do nothing until `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def record(self, device: torch.device, stream: Any = None) -> LateEvent:
        return _StuckEvent(**vars(super().record(device)))


class _StuckEvent(LateEvent):
    def synchronize(self) -> None:
        assert isinstance(self.owner, Stuck)
        self.owner.free.wait(60)
        super().synchronize()


def test_a_save_that_the_watchdog_gives_up_keeps_its_memory_from_the_next(root: Path) -> None:
    devices = Stuck()
    large, other = torch.randn(50_000), {"host": torch.randn(3_000), "more": torch.randn(30_000)}
    small = [devices.place(torch.randn(200), index % 2) for index in range(40)]
    state = {"large": devices.place(large, 1), "small": small}
    options = Options(on_error="warn", timeout=12, chunk_bytes="8KiB", staging_bytes="128KiB")
    with Checkpointer(root, options, devices=devices) as ck:
        with pytest.raises(CkptError):
            ck.save(1, state).committed.result(60)
        # Copied inside `save`, and held by the stager until the device is free again.
        handle = ck.save(2, other)
        devices.free.set()
        handle.committed.result(60)
    devices.drain()
    tree = ckpt_core.load(root)
    assert all(torch.equal(tree[name], other[name]) for name in other)


class Untouchable(LateDevices):
    """Devices that are in use, by somebody else."""

    def _refuse(self, *args: Any, **more: Any) -> Any:
        raise AssertionError("a device was asked for something")

    new_stream = use = record = pin = _refuse


def on_host() -> dict[str, torch.Tensor]:
    return {
        "large": torch.randn(40_000),
        "small": torch.randn(10),
        "turned": torch.ones(30, 70).t(),
    }


Save = Callable[[Checkpointer, dict[str, torch.Tensor]], Any]


def by_layers(ck: Checkpointer, state: dict[str, torch.Tensor]) -> Any:
    save = ck.begin(1, {"large": state["large"]})
    save.stage(["large"])
    return save.seal(state)


def by_files(ck: Checkpointer, state: dict[str, torch.Tensor]) -> Any:
    save = ck.begin_files(1, "tag")
    save.add("one", state)
    return save.seal()


@pytest.mark.parametrize("mode", ["host", "device", "auto", "direct"])
@pytest.mark.parametrize("save", [lambda ck, state: ck.save(1, state), by_layers, by_files])
def test_a_state_on_the_host_asks_nothing_of_devices(root: Path, mode: str, save: Save) -> None:
    options = Options(mode=mode, chunk_bytes="16KiB", staging_bytes="128KiB")
    with Checkpointer(root, options, devices=Untouchable()) as ck:
        save(ck, on_host()).committed.result(60)
        ck.restore(on_host())


def test_training_goes_on_in_the_stream_that_it_was_in(root: Path) -> None:
    devices = LateDevices()
    devices.own_stream(1)
    device = devices.devices[1]
    before = devices.record(device).stream
    state = {"large": devices.place(torch.randn(50_000), 1)}
    with Checkpointer(root, Options(mode="device"), devices=devices) as ck:
        ck.save(1, state).committed.result(60)
        assert ck.restore(state) is not None
    assert devices.record(device).stream is before
