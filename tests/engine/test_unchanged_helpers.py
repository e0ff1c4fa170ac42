"""Writers help to compare what may be unchanged; the barrier holds until none of them reads any more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from ckpt_core import Checkpointer, Options, StagingError, load
from ckpt_core.persist import HeldFile, WriteResult
from ckpt_core.save import still_files
from ckpt_core.save.still_bytes import Comparison, LiveBytes
from ckpt_core.snapshot import CopyStreams, Snapshot
from ckpt_core.store import step_path
from ckpt_core.system.devices import Devices
from ckpt_core.system.files import Files
from tests.engine.test_unchanged import FIRST_SHARED, Job, shards

PIECE, PIECES = 4096, 24
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def helped(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a file is, and however few processors there are."""
    monkeypatch.setattr(still_files, "_helpers", lambda nbytes, pipeline: 3)


class Reading(LiveBytes):
    """Bytes whose readers are known; helpers do what they are told, and the stager waits for one of them.

    Args:
        meet: called in the middle of the first piece that a helper takes.
        alone: the stager does not wait.
    """

    meet: Callable[[], Any] = staticmethod(lambda: None)
    alone = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun = threading.Event()
        self.readers: list[str] = []

    def runs(self, begin: int, end: int) -> Iterator[memoryview]:
        name = threading.current_thread().name
        is_first, is_helper = name not in self.readers, name.startswith("ckpt-writer")
        self.readers.append(name)
        if not is_helper and not self.alone:
            assert self.begun.wait(WAIT_S), "no helper came"
        for run in super().runs(begin, end):
            if is_helper and is_first:
                self.begun.set()
                self.meet()
            yield run


def held(gate: threading.Event) -> type[Reading]:
    """Helpers stand still in their first piece while the gate is shut."""

    class Held(Reading):
        meet = staticmethod(lambda: gate.wait(WAIT_S))

    return Held


def use(monkeypatch: pytest.MonkeyPatch, kind: type[Reading]) -> list[Reading]:
    """All that are made from here on."""
    made: list[Reading] = []

    def make(*args: Any) -> Reading:
        made.append(kind(*args))
        return made[-1]

    monkeypatch.setattr(still_files, "LiveBytes", make)
    return made


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_every_step_is_whole_with_leaves_that_several_threads_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use(monkeypatch, Reading)
    torch.manual_seed(0)
    base = [torch.randn(70, 90).t(), torch.randn(9000), torch.randn(50, 50, 6).transpose(0, 2)]
    base.append(torch.nn.Parameter(torch.randn(80, 60)).t())  # a copy of which might be recorded
    state = {"base": base, "moves": torch.zeros(400)}
    options = Options(share_unchanged=True, eager_leaf_bytes=256, chunk_bytes=4096, keep_last=None)
    expected, inodes = {}, set()
    with Checkpointer(tmp_path, options) as ck:
        for step in range(1, 16):
            ck.wait_staged()
            state["moves"] += 1
            if step == 9:
                with torch.no_grad():
                    base[0][3, 5] += 1
            expected[step] = [leaf.detach().clone() for leaf in (*base, state["moves"])]
            ck.save(step, state)
            if step % 3 == 0:
                ck.wait()
    for step, leaves in expected.items():
        got = load(step_path(tmp_path, step))
        assert all(map(torch.equal, [*got["base"], got["moves"]], leaves)), step
        inodes |= {path.stat().st_ino for path in shards(tmp_path, step)[1:]}
    assert made and all(len(set(one.readers)) > 1 for one in made)
    assert len(inodes) < 8, "hardly anything was shared"


def test_the_barrier_is_shut_while_a_helper_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    with Job(tmp_path) as job:
        job.save_all(range(1, FIRST_SHARED))
        made = use(monkeypatch, held(gate))
        job.adapter += 1
        job.expected[FIRST_SHARED] = torch.cat([*map(torch.flatten, job.base), job.adapter])
        handle = job.ck.save(FIRST_SHARED, job.state)
        until(lambda: bool(made) and made[0].begun.is_set())
        assert not job.ck.is_staged() and not handle.staged.done(), "open while a helper reads"
        gate.set()
        job.ck.wait_staged()
        for leaf in job.base:
            leaf.zero_()
        handle.committed.result(WAIT_S)
        assert job.generations() == [[FIRST_SHARED - 1, FIRST_SHARED]]
        job.check(FIRST_SHARED)


def test_what_a_helper_fails_with_fails_the_save_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no memory here")

    class Failing(Reading):
        meet = staticmethod(fail)

    with Job(tmp_path, on_error="warn") as job:
        job.save_all(range(1, FIRST_SHARED))
        with monkeypatch.context() as patch:
            use(patch, Failing)
            with pytest.raises(StagingError, match="no memory here"):
                job.save(FIRST_SHARED)
        assert job.ck.is_staged()
        job.save(FIRST_SHARED + 1)
        assert job.generations() == [[FIRST_SHARED - 1, FIRST_SHARED + 1]]
        job.check()


def test_an_interrupt_at_the_barrier_leaves_it_shut_until_the_helper_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, gate, once = threading.Event(), threading.Event(), threading.Lock()

    def interrupt() -> None:
        assert waiting.wait(WAIT_S)
        if once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        assert gate.wait(WAIT_S)

    class Interrupting(Reading):
        meet = staticmethod(interrupt)

    with Job(tmp_path) as job:
        job.save_all(range(1, FIRST_SHARED))
        with monkeypatch.context() as patch:
            use(patch, Interrupting)
            job.adapter += 1
            job.expected[FIRST_SHARED] = torch.cat([*map(torch.flatten, job.base), job.adapter])
            handle = job.ck.save(FIRST_SHARED, job.state)

            def wait() -> None:
                waiting.set()
                job.ck.wait_staged()

            with pytest.raises(KeyboardInterrupt):
                wait()
            assert not job.ck.is_staged()
            gate.set()
            job.ck.wait_staged()
        job.base[0] += 1
        handle.committed.result(WAIT_S)
        job.check(FIRST_SHARED)
        job.save(FIRST_SHARED + 1)
        job.check()


class Gated(Files):
    """A disk on which writes of shard files stand still while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        assert self.gate.wait(WAIT_S)
        super().pwrite(fd, data, offset)


def test_helpers_that_come_late_are_not_waited_for_and_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Alone(Reading):
        alone = True

    files = Gated()
    with Job(tmp_path, files, writers=1, staging_bytes="1MiB") as job:
        job.save_all(range(1, FIRST_SHARED))
        made = use(monkeypatch, Alone)
        files.gate.clear()
        job.adapter += 1
        job.expected[FIRST_SHARED] = torch.cat([*map(torch.flatten, job.base), job.adapter])
        handle = job.ck.save(FIRST_SHARED, job.state)
        job.ck.wait_staged()  # the only writer has the adapter, and stands still
        for leaf in job.base:
            leaf.zero_()
        files.gate.set()
        handle.committed.result(WAIT_S)
        assert {name for one in made for name in one.readers} == {"ckpt-stager"}
        job.check(FIRST_SHARED)


# -- one comparison, without an engine ---------------------------------------------------------------


@pytest.fixture
def snapshot() -> Snapshot:
    return Snapshot(1, devices=Devices())


@pytest.fixture
def leaf() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(PIECE * PIECES // 4)


@pytest.fixture
def file(tmp_path: Path, leaf: torch.Tensor) -> Iterator[HeldFile]:
    """A leaf, as it was written."""
    data = leaf.numpy().tobytes()
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    (tmp_path / "file").write_bytes(data)
    digests = [xxhash.xxh3_128(piece).digest() for piece in pieces]
    sums = [[WriteResult(len(piece), None)] for piece in pieces]
    made = HeldFile(tmp_path / "file", digests, sums, files=Files())
    yield made
    made.release()


def live(leaf: torch.Tensor, kind: type[LiveBytes] = LiveBytes) -> LiveBytes:
    return kind(b"", [(leaf, 0, leaf.nbytes)], CopyStreams(Devices()))


def start(comparison: Comparison) -> threading.Thread:
    """A helper."""
    thread = threading.Thread(target=comparison.help, name="ckpt-writer-0", daemon=True)
    thread.start()
    return thread


def test_all_that_differs_is_found_once_whoever_finds_it(
    leaf: torch.Tensor, file: HeldFile, snapshot: Snapshot
) -> None:
    changed = [0, 3, 4, PIECES - 1]
    for piece in changed:
        leaf[piece * PIECE // 4 + piece] += 1
    for helpers in range(4):
        comparison = Comparison(live(leaf), file, snapshot, deadline=time.monotonic() + WAIT_S)
        threads = [start(comparison) for _ in range(helpers)]
        assert comparison.find() == changed
        comparison.help()  # late
        for thread in threads:
            thread.join(WAIT_S)
        assert snapshot.is_clear(None)


def test_a_helper_that_outlasts_the_deadline_keeps_the_barrier_shut(
    leaf: torch.Tensor, file: HeldFile, snapshot: Snapshot
) -> None:
    gate = threading.Event()
    comparison = Comparison(live(leaf, held(gate)), file, snapshot, deadline=time.monotonic())
    thread = start(comparison)
    with pytest.raises(StagingError, match="still being compared"):
        comparison.find()
    snapshot.fail(StagingError("given up"))
    assert not snapshot.is_clear(None), "a helper reads"
    gate.set()
    thread.join(WAIT_S)
    assert snapshot.is_clear(None)


def test_once_a_save_is_given_up_no_helper_begins(
    leaf: torch.Tensor, file: HeldFile, snapshot: Snapshot
) -> None:
    """As an interrupt does it, on the thread that trains."""
    read = live(leaf, Reading)
    assert isinstance(read, Reading)
    comparison = Comparison(read, file, snapshot, deadline=time.monotonic() + WAIT_S)
    snapshot.fail(KeyboardInterrupt())
    start(comparison).join(WAIT_S)
    assert not read.readers and snapshot.is_clear(None)


def test_the_stager_that_fails_ends_its_helpers_and_waits_for_them(
    leaf: torch.Tensor, file: HeldFile, snapshot: Snapshot
) -> None:
    class Breaks(Reading):
        meet = staticmethod(lambda: time.sleep(0.01))

        def runs(self, begin: int, end: int) -> Iterator[memoryview]:
            yield from super().runs(begin, end)
            if not threading.current_thread().name.startswith("ckpt-writer"):
                raise MemoryError

    read = live(leaf, Breaks)
    assert isinstance(read, Reading)
    comparison = Comparison(read, file, snapshot, deadline=time.monotonic() + WAIT_S)
    thread = start(comparison)
    with pytest.raises(MemoryError):
        comparison.find()
    assert snapshot.is_clear(None)
    count = len(read.readers)
    thread.join(WAIT_S)
    assert len(read.readers) == count, "it has read after find"


def test_a_helper_that_came_late_keeps_no_leaf_alive(
    leaf: torch.Tensor, file: HeldFile, snapshot: Snapshot
) -> None:
    copy = leaf.clone()
    comparison = Comparison(live(copy), file, snapshot, deadline=time.monotonic() + WAIT_S)
    assert comparison.find() == []
    storage = torch.multiprocessing.reductions.StorageWeakRef(copy.untyped_storage())
    del copy
    assert storage.expired()
    comparison.help()
