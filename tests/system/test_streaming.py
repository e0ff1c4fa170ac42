"""The copy past the caches: every byte, nothing beside it, and memmove where it cannot be had."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.system import streaming
from ckpt_core.system.machine import processor
from ckpt_core.system.streaming import LEAST_BYTES, Move, load, streaming_move
from tests.quick import drawn

_EDGE = 128
_MOST = 1 << 18
_BYTES = random.Random(0).randbytes(_MOST + 2 * _EDGE)

_PROGRAM = """
import ctypes, sys, torch
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE: no memory becomes executable
    sys.exit(3)
from ckpt_core import Checkpointer, Options
from ckpt_core.system.streaming import load
assert load() is None
state, target = ({"a": make(3, 1 << 20)} for make in (torch.rand, torch.zeros))
with Checkpointer(sys.argv[1], Options()) as ck:
    ck.save(1, state).committed.result()
    ck.restore(target)
assert torch.equal(state["a"], target["a"])
"""


@pytest.fixture(scope="module")
def move() -> Move:
    found = load()
    if found is None:
        pytest.skip("this processor or system has no such copy")
    return found


@settings(max_examples=drawn(400))
@given(
    to=st.integers(0, _EDGE),
    of=st.integers(0, _EDGE),
    nbytes=st.integers(LEAST_BYTES, LEAST_BYTES + 300) | st.integers(LEAST_BYTES, _MOST),
)
def test_what_is_asked_for_is_copied_and_nothing_else(
    move: Move, to: int, of: int, nbytes: int
) -> None:
    source, target = bytearray(_BYTES), bytearray(b"\xa5" * len(_BYTES))
    into, out_of = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (target, source))
    move(into + to, out_of + of, nbytes)
    assert target[:to] == b"\xa5" * to
    assert target[to : to + nbytes] == _BYTES[of : of + nbytes]
    assert target[to + nbytes :] == b"\xa5" * (len(_BYTES) - to - nbytes)
    assert source == _BYTES


def test_it_is_taken_where_it_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor("vendor_id") in Path("/proc/cpuinfo").read_text()
    for maker, taken in [
        ("AuthenticAMD", load() is not None),
        ("GenuineIntel", False),
        ("", False),
    ]:
        monkeypatch.setattr(streaming, "processor", {"vendor_id": maker}.__getitem__)
        assert (streaming_move() is not None) == taken


def test_a_process_that_may_add_no_code_saves_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "root")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if ended.returncode == 3:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
    assert ended.returncode == 0, ended.stderr
