"""A moment without threads: refused when the Checkpointer is made, and without effect on one that is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PROGRAM = """
import os, resource, sys, threading, time
import torch
import ckpt_core
from ckpt_core import Checkpointer, CkptError, Options, PersistError, RestoreError

torch.set_num_threads(1)
where = sys.argv[1]
options = Options(timeout=60, writers=3, readers=2)
state = {"w": torch.arange(5000.0), "step": 1}

with Checkpointer(where + "/warm", options) as ck:  # everything is imported before rights are given up
    ck.save(1, state).committed.result(60)
    ck.restore(dict(state))
os.setuid(54321)

def threads():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))

def limit(count):
    resource.setrlimit(resource.RLIMIT_NPROC, (count, resource.getrlimit(resource.RLIMIT_NPROC)[1]))

def fewest():  # a thread that has been joined may still be counted, for a moment
    found = []
    for _ in range(50):
        found.append(threads())
        time.sleep(0.01)
    return min(found)

most, least = 4096, fewest()
for more in range(0, 6):  # some of the threads can be had, and the next cannot
    while threads() > least:
        time.sleep(0.001)
    limit(least + more)
    before = threading.active_count()
    try:
        Checkpointer(where + "/root", options)
    except PersistError as exc:
        assert "Raise the limit" in str(exc), exc
        assert not os.path.exists(where + "/root"), "something was made"
    else:
        raise AssertionError(f"made with {more} more threads")
    limit(most)
    assert threading.active_count() == before, threading.enumerate()

ck = Checkpointer(where + "/root", options)
limit(fewest())
try:
    threading.Thread(target=int).start()
    raise AssertionError("there are threads to be had")
except RuntimeError:
    pass
ck.save(1, state).committed.result(60)
save = ck.begin(2, {"w": state["w"]})
save.stage(["w"])
save.seal(state).committed.result(60)
files = ck.begin_files(3, "files")
files.add("one.pt", state)
files.seal().committed.result(60)
ck.wait()
try:
    ck.restore(dict(state))
    raise AssertionError("restored without threads")
except RestoreError:
    pass
limit(most)
assert ck.restore(dict(state)).step == 2
ck.close()
while threading.active_count() > 1:  # readers say that they have ended just before they do
    time.sleep(0.001)
Checkpointer(where + "/root", options).close()
print("ok")
"""

NO_STACKS = """
import resource, sys, threading
from ckpt_core import Checkpointer, PersistError
threading.stack_size(64 << 20)
with open("/proc/self/statm") as sizes:
    has = int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (has + (16 << 20), -1))
try:
    Checkpointer(sys.argv[1])
except PersistError as exc:
    print(exc)
"""


@pytest.mark.skipif(
    os.getuid() != 0, reason="needs root, to become a user whose threads are counted"
)
def test_a_moment_without_threads_is_an_error_of_ours_and_nothing_hangs() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path in (Path(folder), Path(folder, "warm")):
            path.mkdir(exist_ok=True)
            os.chown(path, 54321, 54321)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, folder],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    assert done.stdout == "ok\n", done.stderr


def test_where_the_stacks_of_threads_have_no_room_their_limit_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_STACKS, str(tmp_path / "root")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "cannot be started" in done.stdout and "ulimit -v" in done.stdout, done.stderr
    assert not (tmp_path / "root").exists()
