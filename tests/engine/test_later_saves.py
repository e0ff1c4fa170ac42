"""Saves of a state that is as it was: what is kept from the last one never says what is not so any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_core
from ckpt_core import Checkpointer, ConfigError, Options, StateMismatch, load, step_path
from tests.engine.files_trees import GatedFiles


def files(root: Path, step: int) -> tuple[bytes, dict[str, Any]]:
    """The shard file of a step, and its rank manifest."""
    folder = root / f"step-{step:012d}"
    manifest = json.loads((folder / "rank-00000.json").read_text())
    return (folder / "shard-00000-0.safetensors").read_bytes(), manifest


def make() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(5, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
    adam = torch.optim.AdamW(net.parameters(), lr=0.5)
    table = {f"{i}": torch.full((i % 7,), float(i)) for i in range(500)}
    return {"net": net, "adam": adam, "table": table, "big": torch.ones(9000), "step": 0}


def train(state: dict[str, Any], step: int) -> None:
    state["net"](torch.ones(3, 5) * step).sum().backward()
    state["adam"].step()
    state["step"] = step
    state["table"]["1"] = torch.full((1,), float(step))
    state["table"]["2"].data = torch.full((2,), float(step))
    state["table"]["3"].fill_(step)
    state["big"].fill_(step)


def test_the_files_of_later_saves_are_those_of_first_ones(tmp_path: Path) -> None:
    state = make()
    with Checkpointer(tmp_path / "one", Options(keep_last=9)) as ck:
        for step in range(1, 6):
            train(state, step)
            if step == 4:
                state["table"]["8"] = torch.ones(3, dtype=torch.int16)
                del state["table"]["9"]
            ck.save(step, state).committed.result(60)
            ck.wait_staged()
            with Checkpointer(tmp_path / f"{step}") as fresh:
                fresh.save(step, state).committed.result(60)
            assert files(tmp_path / "one", step) == files(tmp_path / f"{step}", step)
    found = ckpt_core.load(tmp_path / "one")
    assert found["step"] == 5
    assert torch.equal(found["table"]["2"], torch.full((2,), 5.0))


@pytest.mark.parametrize("count", [0, 1, 1024])
def test_a_state_that_ends_with_empty_leaves_is_saved_again_and_again(
    tmp_path: Path, count: int
) -> None:
    state = {"w": torch.ones(count), "x": torch.empty(0), "y": torch.empty(0, 3)}
    with Checkpointer(tmp_path) as ck:
        for step in range(3):
            state["w"].fill_(step)
            ck.save(step, state).committed.result(60)
            assert ckpt_core.load(tmp_path)["w"].tolist() == [step] * count


@pytest.mark.parametrize("size", [100, 100_000])
@pytest.mark.parametrize("saves_before", [0, 1, 2])
@pytest.mark.parametrize("left_bytes", [0, 396])
def test_a_tensor_without_its_memory_is_refused_by_name_and_later_saves_go_on(
    tmp_path: Path, size: int, saves_before: int, left_bytes: int
) -> None:
    freed, other = torch.randn(size), torch.randn(7)
    state = {"freed": freed, "other": other, "empty": torch.empty(0)}
    with Checkpointer(tmp_path) as ck:
        for step in range(saves_before):
            ck.save(step, state).committed.result()
        nbytes = freed.untyped_storage().nbytes()
        freed.untyped_storage().resize_(left_bytes)
        with pytest.raises(ConfigError, match="'freed': its memory has been freed"):
            ck.save(10, state)
        freed.untyped_storage().resize_(nbytes)
        freed.fill_(3)
        path = ck.save(11, state).committed.result()
    assert torch.equal(ckpt_core.load(path)["freed"], freed)


@pytest.mark.parametrize("left_bytes", [0, 3592])
@pytest.mark.parametrize("step", [1, 3])
def test_a_view_of_memory_that_is_gone_is_refused_too(
    tmp_path: Path, step: int, left_bytes: int
) -> None:
    whole = torch.randn(1000)
    state = {"view": whole[10:900][::step], "other": torch.randn(7)}
    whole.untyped_storage().resize_(left_bytes)
    assert state["view"].data_ptr() != 0
    with Checkpointer(tmp_path) as ck:
        with pytest.raises(ConfigError, match="'view': its memory has been freed"):
            ck.save(1, state)
        with pytest.raises(ConfigError, match="'view': its memory has been freed"):
            ck.begin(1, state)
        whole.untyped_storage().resize_(4000)
        whole.fill_(3)
        path = ck.save(2, state).committed.result()
        whole.untyped_storage().resize_(left_bytes)
        with pytest.raises(StateMismatch, match="view: the memory of the live tensor"):
            ck.restore(state)
    assert torch.equal(ckpt_core.load(path)["view"], torch.full((890,), 3.0)[::step])


@pytest.mark.parametrize("left_bytes", [0, 399_996])
@pytest.mark.parametrize("begin", [0, 10])
def test_a_layer_whose_memory_has_gone_since_begin_is_refused_as_it_is_staged(
    tmp_path: Path, begin: int, left_bytes: int
) -> None:
    whole, other = torch.randn(100_000), torch.randn(100_000)
    state = {"layer": whole[begin:], "other": other}
    with Checkpointer(tmp_path) as ck:
        begun = ck.begin(1, state)
        whole.untyped_storage().resize_(left_bytes)
        begun.stage({"other": other})
        with pytest.raises(ConfigError, match="'layer': its memory has been freed"):
            begun.stage({"layer": state["layer"]})
        whole.untyped_storage().resize_(400_000)
        whole.fill_(3)
        begun.stage({"layer": state["layer"]})
        path = begun.seal().committed.result(timeout=60)
    assert torch.equal(ckpt_core.load(path)["layer"], state["layer"])


def test_a_tensor_without_its_memory_is_not_restored_into(tmp_path: Path) -> None:
    freed, other = torch.ones(100), torch.ones(7)
    state = {"freed": freed, "other": other}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, state).committed.result()
        other.zero_()
        freed.untyped_storage().resize_(0)
        with pytest.raises(StateMismatch, match="freed: the memory of the live tensor"):
            ck.restore(state)
        assert not other.any()


def test_a_save_that_is_late_does_not_take_the_place_of_a_younger_one_of_its_step(
    tmp_path: Path,
) -> None:
    disk = GatedFiles()
    with Checkpointer(tmp_path, Options(writers=4, in_flight=3, timeout=60), files=disk) as ck:
        late = ck.save(5, {"big": torch.zeros(50000)})
        # Only then: the disk holds whichever comes first, and several writers may be overtaken.
        assert disk.holds.wait(60)
        young = ck.save(5, {"big": torch.ones(50000)})
        other = ck.save(6, {"big": torch.ones(9)})
        # Nobody waits for the late one but those of its step.
        other.committed.result(60)
        assert not young.committed.done()
        disk.gate.set()
        for handle in (late, young):
            handle.committed.result(60)
    assert torch.equal(load(step_path(tmp_path, 5))["big"], torch.ones(50000))


def test_a_save_that_is_still_open_holds_up_no_other_of_its_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Options(in_flight=2, timeout=60)) as ck:
        opened = ck.begin(5, {"big": torch.zeros(50000)})
        ck.save(5, {"big": torch.ones(50000)}).committed.result(60)
        assert torch.equal(load(step_path(tmp_path, 5))["big"], torch.ones(50000))
        opened.stage(["big"])
        opened.seal().committed.result(60)
    assert torch.equal(load(step_path(tmp_path, 5))["big"], torch.zeros(50000))


def test_a_save_that_is_ended_behind_one_of_its_step_takes_its_place_however_late_that_is(
    tmp_path: Path,
) -> None:
    disk = GatedFiles()
    with Checkpointer(tmp_path, Options(writers=4, in_flight=3, timeout=60), files=disk) as ck:
        opened = ck.begin(5, {"big": torch.zeros(50000)})
        other = ck.save(5, {"big": torch.ones(50000)})
        assert disk.holds.wait(60)
        opened.stage(["big"])
        ended = opened.seal()
        assert not ended.committed.done()
        disk.gate.set()
        for handle in (other, ended):
            handle.committed.result(60)
    assert torch.equal(load(step_path(tmp_path, 5))["big"], torch.zeros(50000))


def test_small_leaves_are_read_where_they_are_at_each_save(tmp_path: Path) -> None:
    state = {f"w{index}": torch.full((50,), float(index)) for index in range(400)}
    with Checkpointer(tmp_path, Options(keep_last=20)) as ck:
        for step in range(1, 9):
            for index, tensor in enumerate(state.values()):
                tensor.fill_(step * 1000 + index)
            if step % 3 == 0:
                state[f"w{step}"].data = torch.full((50,), -1.0 * step)
                state[f"w{step + 100}"] = torch.full((50,), -2.0 * step)
            expected = {name: tensor.clone() for name, tensor in state.items()}
            ck.save(step, state).committed.result(60)
            found = load(step_path(tmp_path, step))
            assert all(torch.equal(found[name], expected[name]) for name in expected)
