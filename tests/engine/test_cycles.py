"""What a save or a restore has made goes with the last who has it: nothing waits for the garbage collector.

That comes when it likes, on the training thread, and holds up device memory and locks until then.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, Options

SOON_S = 60.0
ROUNDS = 5
STATE = {
    **{f"w{n}": torch.full((1500 + n,), float(n)) for n in range(3)},
    **{f"b{n}": torch.full((n + 5,), -float(n)) for n in range(2)},
}


def plain(ck: Checkpointer, step: int) -> None:
    ck.save(step, {**STATE, "step": step}).committed.result(SOON_S)


def layers(ck: Checkpointer, step: int) -> None:
    begun = ck.begin(step, STATE)
    begun.stage(["w0"])
    begun.stage([name for name in STATE if name != "w0"])
    begun.seal({**STATE, "step": step, "late": torch.ones(3)}).committed.result(SOON_S)


def files(ck: Checkpointer, step: int) -> None:
    begun = ck.begin_files(step, f"named-{step}")
    begun.add("model.pt", dict(STATE))
    begun.seal().committed.result(SOON_S)


def restored(ck: Checkpointer, step: int) -> None:
    plain(ck, step)
    into = {name: torch.zeros_like(value) for name, value in STATE.items()} | {"step": 0}
    assert ck.restore(into) is not None


def loaded(ck: Checkpointer, step: int) -> None:
    plain(ck, step)
    assert ckpt_core.load(ck.root)["step"] == step


def waited(ck: Checkpointer, step: int) -> None:
    handle = ck.save(step, {**STATE, "step": step})
    ck.wait_staged()
    handle.committed.add_done_callback(lambda future: None)
    ck.wait()


HOW: list[tuple[Callable[[Checkpointer, int], None], dict[str, Any]]] = [
    (plain, {}),
    (plain, {"mode": "direct"}),
    (plain, {"share_unchanged": True}),
    (plain, {"pipelined": False}),
    (plain, {"blocking": True}),
    (layers, {}),
    (layers, {"share_unchanged": True}),
    (files, {}),
    (files, {"share_unchanged": True}),
    (restored, {}),
    (loaded, {}),
    (waited, {}),
]


@contextlib.contextmanager
def left_to_the_collector() -> Iterator[list[Any]]:
    """What only it would have freed of what was made within."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("act", "changes"), HOW, ids=[f"{act.__name__} {changes or ''}" for act, changes in HOW]
)
def test_nothing_of_it_waits_for_the_garbage_collector(
    tmp_path: Path, act: Callable[[Checkpointer, int], None], changes: dict[str, Any]
) -> None:
    options = Options(chunk_bytes=4096, staging_bytes="256KiB", eager_leaf_bytes=256, **changes)
    with Checkpointer(tmp_path, options) as ck:
        act(ck, 1)
        act(ck, 2)
        with left_to_the_collector() as left:
            for step in range(3, 3 + ROUNDS):
                act(ck, step)
            until_idle(ck)
        ours = [
            type(one)
            for one in left
            if isinstance(one, torch.Tensor) or type(one).__module__.startswith("ckpt_core")
        ]
        left.clear()
    # A thread that an earlier test has left behind may come to its end meanwhile, once.
    assert not [kind for kind, count in Counter(ours).items() if count >= ROUNDS]


def until_idle(ck: Checkpointer) -> None:
    """A save has ended for its threads too, which tell of it before they are through."""
    deadline = time.monotonic() + SOON_S
    while ck._engine.flights.active():
        assert time.monotonic() < deadline
        time.sleep(0.001)
