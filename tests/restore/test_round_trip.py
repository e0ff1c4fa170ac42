"""What was saved comes back bit for bit, wherever it goes and however the bytes are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.errors import StateMismatch
from ckpt_core.restore import load, verify
from ckpt_core.system.files import Files
from tests.devices.machines import CUDA, machine_of
from tests.restore.harness import (
    SHARD,
    BufferedOnly,
    Cold,
    HalfCached,
    Recipe,
    RefusesDirectReads,
    ShortReads,
    Witness,
    assert_same,
    flip,
    restore,
    restorer,
    small_state,
    write_step,
    zeros_like,
)

LAYERS = {
    "plain": Files,
    "buffered": BufferedOnly,
    "cold": Cold,
    "refuses direct": RefusesDirectReads,
    "half cached": HalfCached,
    "short": lambda: ShortReads(1000, cached=False),
    "short, cached first": lambda: ShortReads(4096, cached=True),
}


@pytest.fixture(params=LAYERS.values(), ids=LAYERS.keys())
def layer(request: pytest.FixtureRequest) -> Files:
    made: Files = request.param()
    return made


def big_state() -> dict[str, Any]:
    """Leaves that span several reads and several units, flat and strided."""
    torch.manual_seed(3)
    return {
        "flat": torch.randn(5_000_001),
        "transposed": torch.randn(900, 1100).t(),
        "image": torch.randn(40, 30, 17, 19).to(memory_format=torch.channels_last),
        "bytes": torch.randint(0, 255, (300_001,), dtype=torch.uint8),
        "last": torch.randn(1025, dtype=torch.float64),
    }


def test_load_gives_the_tree_that_was_saved(root: Path, layer: Files) -> None:
    state = small_state()
    assert_same(load(write_step(root, 3, state), files=layer), state)


def test_load_of_a_root_gives_its_newest_step(root: Path) -> None:
    for step in (9, 10):
        write_step(root, step, small_state(step))
    assert_same(load(root), small_state(10))


def test_leaves_larger_than_a_read_come_back(root: Path, layer: Files) -> None:
    state = big_state()
    write_step(root, 1, state, Recipe(chunk_bytes=1 << 20))
    live = zeros_like(state)
    strides = {name: tensor.stride() for name, tensor in live.items()}
    found = restorer(root, files=layer).restore(live)
    assert found is not None
    assert_same(live, state)
    assert {name: tensor.stride() for name, tensor in live.items()} == strides


@pytest.mark.parametrize("chunk_bytes", [100, 4096, 5000, 1 << 20, 1 << 26])
def test_chunks_of_any_length_are_read(root: Path, layer: Files, chunk_bytes: int) -> None:
    state = {"a": torch.randn(300, 211), "b": torch.randn(211, 300).t(), "c": torch.arange(5)}
    path = write_step(root, 1, state, Recipe(chunk_bytes=chunk_bytes))
    assert_same(load(path, files=layer), state)


def test_a_live_tensor_keeps_its_memory_and_strides(root: Path) -> None:
    torch.manual_seed(0)
    saved = {
        "rows": torch.randn(64, 32),
        "columns": torch.randn(64, 32),
        "every other": torch.randn(7, 9),
        "image": torch.randn(2, 3, 4, 5),
    }
    write_step(root, 1, saved)
    buffer = torch.zeros(7, 18)
    live = {
        "rows": torch.zeros(64, 32),
        "columns": torch.zeros(32, 64).t(),
        "every other": buffer[:, ::2],
        "image": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    before = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in live.items()}
    restore(root, live)
    assert_same(live, saved)
    assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in live.items()} == before
    assert not buffer[:, 1::2].any(), "bytes between the elements were written"


def test_module_and_optimizer_are_filled_in_place(root: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.BatchNorm1d(7))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 9)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    model, optimizer = make()
    train(model, optimizer)
    write_step(root, 3, {"model": model, "optimizer": optimizer, "epoch": 5})
    torch.manual_seed(1)
    other, other_optimizer = make()
    train(other, other_optimizer)
    pointers = [parameter.data_ptr() for parameter in other.parameters()]
    found = restore(root, {"model": other, "optimizer": other_optimizer, "epoch": None})
    assert found is not None
    assert found.state["epoch"] == 5
    assert [parameter.data_ptr() for parameter in other.parameters()] == pointers
    assert_same(other.state_dict(), model.state_dict())
    for left, right in zip(other_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert_same(left, right)


def test_a_graph_that_saved_the_old_values_notices(root: Path) -> None:
    write_step(root, 1, {"w": torch.ones(4)})
    weight = torch.zeros(4, requires_grad=True)
    loss = (weight * weight).sum()
    restore(root, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_made_in_inference_mode_are_filled(root: Path) -> None:
    write_step(root, 1, {"w": torch.ones(4)})
    with torch.inference_mode():
        live = torch.zeros(4)
    restore(root, {"w": live})
    assert live.tolist() == [1.0] * 4


@pytest.mark.parametrize("files", [Files(), Cold()], ids=["cached", "cold"])
def test_ten_thousand_small_leaves_come_back(root: Path, files: Files) -> None:
    state = {f"leaf{index}": torch.full((index % 7,), float(index)) for index in range(10_000)}
    write_step(root, 1, state, Recipe(chunk_bytes=1 << 16))
    live = zeros_like(state)
    restorer(root, files=files).restore(live)
    assert_same(live, state)


@pytest.mark.parametrize("files", [2, 3])
def test_a_rank_may_have_several_files(root: Path, files: int) -> None:
    state = small_state()
    path = write_step(root, 1, state, Recipe(files=files))
    assert_same(load(path), state)


def test_a_state_without_tensors_comes_back(root: Path, layer: Files) -> None:
    path = write_step(root, 1, {"epoch": 3, "name": "x"})
    assert load(path, files=layer) == {"epoch": 3, "name": "x"}


def test_a_step_without_checksums_is_read(root: Path, layer: Files) -> None:
    state = small_state()
    assert_same(load(write_step(root, 1, state, Recipe(checksum=False)), files=layer), state)


def test_a_step_is_protected_while_it_is_read_and_not_after(root: Path) -> None:
    write_step(root, 4, small_state())
    guard = Witness()
    restorer(root, store=guard).restore(zeros_like(small_state()))
    assert guard.seen == [4]
    assert guard.protected == []
    assert guard.suspects == []


def test_one_memory_takes_two_leaves_that_are_equal_in_it_and_no_others(root: Path) -> None:
    def build(value: float) -> dict[str, Any]:
        memory = torch.full((6,), value)
        return {"first": torch.ones(3), "a": memory[:4], "b": memory[2:]}

    write_step(root, 1, {"first": torch.zeros(3), "a": torch.ones(4), "b": torch.zeros(4)})
    live = build(7.0)
    with pytest.raises(StateMismatch, match="b here, and has another value there") as caught:
        restore(root, live)
    assert_same(live, build(7.0))
    assert not getattr(caught.value, "__notes__", [])
    equal = {name: value.clone() for name, value in build(5.0).items()}
    write_step(root, 2, equal)
    restore(root, live)
    assert_same(live, equal)


@pytest.mark.parametrize("name", ["all late", CUDA])
def test_tensors_on_a_device_are_filled_in_place(root: Path, layer: Files, name: str) -> None:
    machine = machine_of(name)
    state = big_state() | small_state()
    write_step(root, 1, state, Recipe(chunk_bytes=1 << 20))
    live = {
        name: machine.put(torch.zeros_like(value)) if torch.is_tensor(value) else None
        for name, value in state.items()
    }
    tensors = {name: value for name, value in live.items() if value is not None}
    pointers = {name: value.data_ptr() for name, value in tensors.items()}
    for value in tensors.values():
        machine.run(value.zero_)
    restorer(root, files=layer, devices=machine.devices).restore(live)
    machine.drain()
    for name, pointer in pointers.items():
        assert live[name].data_ptr() == pointer
        assert_same(live[name].cpu(), state[name])


_DTYPES = (torch.uint8, torch.float16, torch.float32, torch.int64, torch.complex128, torch.bool)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(_DTYPES))
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    whole = torch.randint(0, 2, shape, dtype=torch.uint8).to(dtype).permute(order)
    return whole[..., ::2] if draw(st.booleans()) and whole.dim() else whole


@given(
    tensors=st.lists(_tensors(), max_size=6),
    chunk_bytes=st.sampled_from([64, 4096, 12288]),
    cold=st.booleans(),
)
def test_any_tree_of_tensors_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[torch.Tensor],
    chunk_bytes: int,
    cold: bool,
) -> None:
    root = tmp_path_factory.mktemp("steps")
    write_step(root, 1, {"tensors": tensors}, Recipe(chunk_bytes=chunk_bytes))
    live = [torch.zeros_like(tensor) for tensor in tensors]
    restorer(root, files=Cold() if cold else Files()).restore({"tensors": live})
    assert_same(live, tensors)


def test_a_step_as_an_object_store_lays_it_out_is_read_alike(root: Path) -> None:
    path = write_step(root, 7, small_state(7))
    folder = path / "0123abcd"
    folder.mkdir()
    for file in [*path.glob("shard-*"), *path.glob("rank-*")]:
        file.rename(folder / file.name)
    (path / "ffffffff").mkdir()  # another attempt, never published
    live = zeros_like(small_state())
    assert restore(root, live) is not None
    assert_same(live["weight"], small_state(7)["weight"])
    assert verify(root).ok
    assert_same(load(path)["weight"], small_state(7)["weight"])
    flip(folder / SHARD, 9000)
    assert [bad.file for bad in verify(root).bad_chunks] == [SHARD]


def test_the_folder_of_an_attempt_is_not_looked_for_behind_a_link(root: Path) -> None:
    path = write_step(root, 7, small_state(7))
    folder = root / "elsewhere"
    folder.mkdir()
    for file in [*path.glob("shard-*"), *path.glob("rank-*")]:
        file.rename(folder / file.name)
    (path / "0123abcd").symlink_to(folder)
    assert not verify(root).ok
