"""A job in a control group with a limit of memory, as in a container: the kernel kills who goes beyond it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.system.files import Files
from tests.faults.test_exit import ended

_MOUNT = Path("/sys/fs/cgroup")
_VERSIONS = ((_MOUNT / "memory", "memory.limit_in_bytes"), (_MOUNT, "memory.max"))

_SAVE = """
import sys, torch
from pathlib import Path
from ckpt_core import Checkpointer, Options
torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()  # in the group from here on
state = {"weight": torch.ones(200 * 2**18), "step": 0}
limit = Path(sys.argv[2])  # room for a tenth more than the state
limit.write_text(str(int(limit.with_name(sys.argv[3]).read_text()) + 220 * 2**20))
ck = Checkpointer(sys.argv[1], Options(in_flight=2))
ck.prepare(state)
for step in (1, 2):
    ck.save(step, state)
    ck.wait_staged()
ck.close()
print(ck.steps(), flush=True)
"""

_FILL = """
import sys, torch
from pathlib import Path
from ckpt_core import Checkpointer, Options
torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()
state = {"weight": torch.ones(100 * 2**18)}
limit = Path(sys.argv[2])  # room for two and a half of three steps
limit.write_text(str(int(limit.with_name(sys.argv[3]).read_text()) + 280 * 2**20))
options = Options(keep_last=None, in_flight=1, staging_bytes="32MiB", on_error="warn")
with Checkpointer(sys.argv[1], options) as ck:
    errors = [ck.save(step, state).committed.exception(60) for step in range(1, 5)]
print(errors[0], {type(error).__name__ for error in errors[1:] if error}, flush=True)
"""


@contextlib.contextmanager
def _group() -> Iterator[tuple[Path, str]]:
    """A control group of its own, and the file of its limit."""
    there = [(top, limit) for top, limit in _VERSIONS if os.access(top, os.W_OK)]
    if not there:
        pytest.skip(
            "no control group can be made here: that takes root, and a writable /sys/fs/cgroup"
        )
    top, limit = there[0]
    folder = top / f"ckpt-core-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as exc:
        pytest.skip(f"no control group can be made in {top}: {exc}")
    try:
        if not (folder / limit).exists():
            pytest.skip(f"control groups have no {limit} here: the memory controller is not on")
        yield folder, limit
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def _run(program: str, root: Path) -> str:
    """What a program prints in a group of its own, within whatever limit it sets."""
    with _group() as (folder, limit):
        used = "memory.current" if limit == "memory.max" else "memory.usage_in_bytes"
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(root), str(folder / limit), used],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            (folder / "cgroup.procs").write_text(str(process.pid))
            process.stdin and process.stdin.write("go\n")
            code, text = ended(process)
        finally:
            process.kill()
            process.wait()
    assert code != -signal.SIGKILL, "the kernel killed it: out of memory in its group"
    assert code == 0, text
    return text


def test_a_save_stays_within_the_limit_of_its_control_group(root: Path) -> None:
    assert _run(_SAVE, root) == "(1, 2)\n"


def test_a_root_in_memory_is_not_filled_beyond_the_limit_of_the_control_group() -> None:
    memory = Path("/dev/shm")
    if not Files().in_memory(memory) or Files().free_bytes(memory) < 2**29:
        pytest.skip("/dev/shm is no tmpfs with 512 MiB free")
    with tempfile.TemporaryDirectory(dir=memory) as place:
        assert _run(_FILL, Path(place) / "root").startswith("None {'PersistError'}\n")
