"""Training changes its tensors in place: every committed step is exactly the state at its step."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import BarrierError, Checkpointer, load
from tests.crash.promises import check_clean
from tests.crash.states import options
from tests.faults.layers import Delays

NAMES = tuple(f"layer{index}.weight" for index in range(8))


def make_layers() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(5000 + 100 * index) for index, name in enumerate(NAMES)}


def update(state: dict[str, torch.Tensor], value: int) -> None:
    for tensor in state.values():
        tensor.fill_(value)


def assert_exact(root: Path, ck: Checkpointer) -> None:
    for step in ck.steps():
        tree = load(root / f"step-{step:012d}")
        for name, tensor in tree.items():
            assert torch.equal(tensor, torch.full_like(tensor, step)), f"{name} of step {step}"


def small(**changes: Any) -> Any:
    """A pool of a few chunks, so that staging waits for the writers all the time."""
    settings: dict[str, Any] = {
        "staging_bytes": 8 * 4096,
        "keep_last": None,
        "in_flight": 2,
        "writers": 2,
    }
    return options(**(settings | changes))


@pytest.mark.parametrize("debug_barrier", [False, True])
@pytest.mark.parametrize("mode", ["host", "device", "direct"])
def test_a_loop_that_waits_before_it_updates_saves_every_step_exactly(
    mode: str, debug_barrier: bool, root: Path
) -> None:
    state = make_layers()
    chosen = small(mode=mode, debug_barrier=debug_barrier)
    with Checkpointer(root, chosen, files=Delays(0.003).files()) as ck:
        for step in range(12):
            ck.wait_staged()
            update(state, step)
            ck.save(step, state)
        ck.wait()
        assert ck.steps() == tuple(range(12))
        assert_exact(root, ck)
    check_clean(root)


@pytest.mark.parametrize("mode", ["host", "device", "direct"])
def test_a_missing_wait_is_found_and_names_the_leaves(mode: str, root: Path) -> None:
    state = make_layers()
    chosen = small(mode=mode, debug_barrier=True, on_error="warn")
    errors = []
    with Checkpointer(root, chosen, files=Delays(0.02).files()) as ck:
        for step in range(6):
            update(state, step)
            errors.append(ck.save(step, state).committed)
        ck.wait_staged()
        found = [future.exception(60) for future in errors]
        torn = [error for error in found if error is not None]
        assert torn, "no snapshot met an update: the test proves nothing"
        for error in torn:
            assert isinstance(error, BarrierError)
            assert "layer" in str(error) and "wait_staged()" in str(error)
        assert_exact(root, ck)
    check_clean(root)


def one_step(ck: Checkpointer, state: dict[str, torch.Tensor], step: int, seed: int) -> Any:
    """A training step that updates, stages and waits layer by layer, in some order."""
    order = list(NAMES)
    random.Random(seed).shuffle(order)
    save = ck.begin(step, state)
    for name in order:
        ck.wait_staged([name])
        state[name].fill_(step)
        save.stage([name])
    return save.seal()


@pytest.mark.parametrize("debug_barrier", [False, True])
def test_layers_that_are_staged_one_by_one_make_the_same_step_as_save(
    debug_barrier: bool, root: Path
) -> None:
    state = make_layers()
    chosen = small(debug_barrier=debug_barrier, staging_bytes=16 * 4096)
    with Checkpointer(root, chosen, files=Delays(0.003).files()) as ck:
        handles = [one_step(ck, state, step, seed=step) for step in range(10)]
        for handle in handles:
            handle.committed.result(60)
        ck.save(10, {name: torch.full_like(value, 10) for name, value in state.items()})
        ck.wait()
        assert ck.steps() == tuple(range(11))
        assert_exact(root, ck)


def test_a_name_of_a_tensor_with_two_names_waits_for_that_tensor(root: Path) -> None:
    shared = torch.zeros(30_000)
    state = {"embedding": shared, "head": shared, "other.weight": torch.zeros(10)}
    with Checkpointer(root, small(), files=Delays(0.02).files()) as ck:
        for step in range(1, 5):
            ck.wait_staged(["head"])
            shared.fill_(step)
            state["other.weight"] = torch.full((10,), float(step))
            ck.save(step, state)
        ck.wait()
        assert_exact(root, ck)


def test_names_as_given_to_begin_are_the_names_to_wait_for(root: Path) -> None:
    shared = torch.zeros(30_000)
    tensors = {"a.b": torch.zeros(20_000), "a": torch.zeros(9_000), "x": shared, "y": shared}
    with Checkpointer(root, small(), files=Delays(0.02).files()) as ck:
        for step in range(4):
            save = ck.begin(step, tensors)
            for name in ("y", "a.b", "a"):
                ck.wait_staged([name])
                tensors[name].fill_(step)
                save.stage([name])
            save.stage(["x"])
            save.seal()
        ck.wait()
        assert_exact(root, ck)


@pytest.mark.parametrize("kind", ["save", "layerwise"])
def test_a_larger_state_right_behind_a_smaller_one_leaves_its_staging_memory_alone(
    kind: str, root: Path
) -> None:
    gate = threading.Event()
    with Checkpointer(root, options(in_flight=4, keep_last=None, timeout=60)) as ck:
        # The stager is late: nothing has been copied, and no chunk is held, when the pool is outgrown.
        ck._engine.pipeline.stager.submit(gate.wait)
        state = {"w": torch.full((2000,), 1.0)}
        if kind == "save":
            first = ck.save(1, state)
        else:
            save = ck.begin(1, state)
            save.stage(["w"])
            first = save.seal()
        threading.Timer(0.5, gate.set).start()
        front = {f"b{index}": torch.full((100,), 2.0) for index in range(50)}
        second = ck.save(2, {"w": torch.full((90_000,), 2.0), **front})
        first.committed.result(60)
        second.committed.result(60)
        assert_exact(root, ck)
