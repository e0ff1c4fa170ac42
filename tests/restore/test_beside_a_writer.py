"""Readers beside a job that saves: never torn, and never called damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, NotCommitted, Options
from ckpt_core.cli import main
from ckpt_core.restore import Restorer, RestoreRequest
from ckpt_core.restore.watch import Watch
from ckpt_core.system.files import Buffer, Files
from ckpt_core.types import step_dir_name
from tests.store.harness import QuickFiles

STEP = 2
OLD, NEW = 2.0, 102.0


def state_of(value: float) -> dict[str, Any]:
    return {"a": torch.full((5000,), value), "b": torch.full((3000,), value)}


def value_of(state: dict[str, Any]) -> float:
    """The value that fills a state; fails when there are several."""
    values = {float(x) for tensor in (state["a"], state["b"]) for x in tensor.unique()}
    assert len(values) == 1, f"torn: {values}"
    return values.pop()


def save(ck: Checkpointer, step: int, value: float) -> None:
    ck.save(step, state_of(value)).committed.result(60)
    ck.wait()


# -- one thing that a writer does, between any two operations of a reader ---------------------------


class Door(Files):
    """Calls `act` ahead of the n-th operation of a reader; 0 for never."""

    def __init__(self, at: int, act: Callable[[Door], None]) -> None:
        self.at, self.act, self.count = at, act, 0
        self.undo: Callable[[], None] = lambda: None
        self.back: threading.Timer | None = None
        self._mutex = threading.Lock()

    def _door(self) -> None:
        with self._mutex:
            self.count += 1
            if self.count == self.at:
                self.act(self)
            elif self.count == self.at + 1:
                self.undo()

    def open_read(self, path: Path, *, direct: bool = False) -> int:
        self._door()
        return super().open_read(path, direct=direct)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._door()
        return super().preadv(fd, buffers, offset)

    def preadv_cached(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._door()
        return super().preadv_cached(fd, buffers, offset)


def retire_it(ck: Checkpointer, door: Door) -> None:
    for step in range(STEP + 1, STEP + 5):
        save(ck, step, float(step))


def replace_it(ck: Checkpointer, door: Door) -> None:
    save(ck, STEP, NEW)


def put_it_back(ck: Checkpointer, door: Door) -> None:
    """Away for a moment, as when a pin comes while it is being retired."""
    home = ck.root / step_dir_name(STEP)
    aside = ck.root / ".inflight" / f"{STEP:012d}-01234567.replaced"
    home.rename(aside)
    door.back = threading.Timer(0.02, lambda: aside.rename(home))
    door.back.start()


def replace_it_and_undo(ck: Checkpointer, door: Door) -> None:
    """A newer save of the step that could not be made durable, and takes its place for a while."""
    other = ck.root / ".inflight" / f"{STEP:012d}-76543210"
    newest = ck.root / step_dir_name(STEP)
    subprocess.run(["cp", "-r", str(newest), str(other)], check=True)
    for shard in other.glob("shard-*"):
        data = shard.read_bytes()
        shard.write_bytes(data[:4096] + bytes(len(data) - 4096))
    Files().exchange(other, newest)
    door.undo = partial(Files().exchange, other, newest)


def by_load(path: Path, files: Files) -> float:
    return value_of(ckpt_core.load(path, files=files, readers=1))


def load_step(root: Path, files: Files) -> float:
    return by_load(root / step_dir_name(STEP), files)


def load_root(root: Path, files: Files) -> float:
    return by_load(root, files)


def verify_step(root: Path, files: Files) -> float:
    report = ckpt_core.verify(root / step_dir_name(STEP), files=files, readers=1)
    assert report.ok, report
    return OLD


def verify_root(root: Path, files: Files) -> float:
    report = ckpt_core.verify(root, files=files, readers=1)
    assert report.ok, report
    return OLD


def _restore(root: Path, files: Files, step: int | None) -> float:
    live = state_of(-1.0)
    found = Restorer(root, files=files, readers=1, timeout_s=60).restore(live, RestoreRequest(step))
    assert found is not None
    return value_of(live)


def restore_step(root: Path, files: Files) -> float:
    return _restore(root, files, STEP)


def restore_newest(root: Path, files: Files) -> float:
    return _restore(root, files, None)


READERS = [load_step, load_root, verify_step, verify_root, restore_step, restore_newest]


@pytest.mark.parametrize("act", [retire_it, replace_it, put_it_back, replace_it_and_undo])
@pytest.mark.parametrize("read", READERS)
@pytest.mark.filterwarnings("error")
def test_a_reader_gets_one_save_or_hears_that_it_was_retired(
    tmp_path: Path, read: Callable[[Path, Files], float], act: Callable[[Checkpointer, Door], None]
) -> None:
    at, last = 0, 0
    while at <= last:
        options = Options(keep_last=1, checksum=False, direct_io="off")
        with Checkpointer(tmp_path / str(at), options, files=QuickFiles()) as ck:
            for step in (0, 1, STEP):
                save(ck, step, float(step))
            door = Door(at, partial(act, ck))
            try:
                value = read(ck.root, door)
            except NotCommitted as exc:
                assert "retired" in str(exc), exc  # noqa: PT017
                assert act is not put_it_back and not read.__name__.endswith(("root", "newest"))
            else:
                assert value in (OLD, NEW) or act is retire_it
            if door.back is not None:
                door.back.join()
            last = last or door.count
        at += 1
    assert last > 3


# -- whole processes ---------------------------------------------------------------------------------

SAVING = """
import sys
from pathlib import Path
import torch
from ckpt_core import Checkpointer, Options

root, stop = Path(sys.argv[1]), Path(sys.argv[2])
options = Options(keep_last=3, checksum=sys.argv[3] == "True")
state = {"a": torch.zeros(300_000), "b": torch.zeros(100_000)}
with Checkpointer(root, options) as ck:
    step = 0
    while not stop.exists():
        for tensor in state.values():
            tensor.fill_(step)
        ck.save(step, state)
        ck.wait_staged()
        step += 1
        if step == 3:
            ck.wait()
            print("ready", flush=True)
"""


@pytest.fixture(scope="module", params=[True, False], ids=["checksums", "no checksums"])
def job(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The root of a job that saves as often as it can; tests only look at it."""
    place = tmp_path_factory.mktemp("job")
    root, stop = place / "root", place / "stop"
    command = [sys.executable, "-c", SAVING, str(root), str(stop), str(request.param)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield root
        finally:
            stop.touch()
            assert process.wait(timeout=60) == 0


def test_many_reads_beside_a_job_are_whole_or_of_retired_steps(job: Path) -> None:
    whole = retired = 0
    for number in range(120):
        step = ckpt_core.committed_steps(job)[number % 2]
        path = job / step_dir_name(step) if number % 3 else job
        try:
            if number % 5 == 4:
                report = ckpt_core.verify(path)
                assert report.ok, report
            else:
                value = value_of(ckpt_core.load(path))
                assert value == step or path == job
            whole += 1
        except NotCommitted as exc:
            # A reader that gets no turn for a while may meet five that were retired, one after the other.
            assert path != job or "faster than they can be read" in str(exc), exc  # noqa: PT017
            retired += 1
    assert whole > 30, (whole, retired)


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_commands_beside_a_job_call_nothing_damaged(
    job: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["ckpt-core", command, str(job)])
    for _ in range(10):
        with pytest.raises(SystemExit) as caught:
            main()
        out = capsys.readouterr()
        assert "DAMAGED" not in out.out and "unreadable" not in out.out, out
        assert caught.value.code in (0, None) or "retired or replaced" in out.err, out


MAPPING = """
import sys
from safetensors.torch import load_file
tensors = load_file(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
seen = {float(x) for tensor in tensors.values() for x in tensor.float().unique()}
sys.exit(0 if 1.0 in seen and seen <= {0.0, 1.0} else 1)
"""


def test_tensors_that_safetensors_mapped_from_a_step_keep_its_values(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as ck:
        save(ck, 1, 1.0)
        (shard,) = (ck.root / step_dir_name(1)).glob("shard-*")
        command = [sys.executable, "-c", MAPPING, str(shard)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdin is not None and reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
            for step in range(2, 10):
                save(ck, step, float(step))
            assert 1 not in ck.steps()
            reader.stdin.close()
            assert reader.wait(timeout=60) == 0


def test_a_directory_whose_close_fails_is_no_error_of_what_was_read(tmp_path: Path) -> None:
    with Watch(tmp_path) as watch:
        assert watch._fd is not None
        os.close(watch._fd)
        assert watch.stood_still()
