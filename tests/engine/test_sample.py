"""What changes too early and is no optimizer's: copied inside `save`, or found by a sample and named."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_training import Gate
from torch.optim.swa_utils import AveragedModel

import ckpt_core
from ckpt_core import BarrierError, Checkpointer, Options
from ckpt_core.snapshot.sampling import MOST, Sampler
from ckpt_core.system.devices import Devices

SETTINGS = Options(chunk_bytes=4096, staging_bytes="64KiB", keep_last=None, on_error="warn")
BIG = 40_000


def filler() -> torch.Tensor:
    """Comes first in the file, and fills the staging memory."""
    return torch.zeros(BIG)


def test_numpy_arrays_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    arrays = {"table": np.zeros(BIG), "rows": [np.zeros(BIG, np.float32)]}
    gate, first = Gate(), torch.zeros(1_000_000)
    settings = dataclasses.replace(SETTINGS, staging_bytes="2MiB")
    with Checkpointer(tmp_path, settings, files=gate) as ck:
        for step in range(1, 5):
            gate.shut_for(0.05)
            handle = ck.save(step, {"first": first, **arrays})
            arrays["table"] += 1
            arrays["rows"][0] += 1  # type: ignore[index]
            handle.committed.result(60)
    for step in range(1, 5):
        tree = ckpt_core.load(tmp_path / f"step-{step:012d}")
        assert (tree["table"] == step - 1).all() and (tree["rows"][0] == step - 1).all()


def plain_buffers() -> tuple[Any, Callable[[], Any]]:
    """A module's state_dict does not say which tensors are buffers."""
    norm = torch.nn.BatchNorm1d(BIG)
    return dict(norm.state_dict()), lambda: norm(torch.randn(4, BIG))


def average() -> tuple[Any, Callable[[], Any]]:
    """No optimizer makes a step between the save and the average."""
    model = torch.nn.Linear(200, 200)
    average = AveragedModel(model)
    average.update_parameters(model)
    other = torch.nn.Linear(200, 200)
    return {"average": average}, lambda: average.update_parameters(other)


def by_hand() -> tuple[Any, Callable[[], Any]]:
    """An update that is no optimizer's."""
    model = torch.nn.Linear(200, 200)
    return {"model": model}, lambda: model.weight.data.mul_(0.9)


def loaded() -> tuple[Any, Callable[[], Any]]:
    model, other = torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)
    return {"model": model}, lambda: model.load_state_dict(other.state_dict())


def strided() -> tuple[Any, Callable[[], Any]]:
    weights = torch.zeros(64, 64, 3, 3).to(memory_format=torch.channels_last)
    columns = torch.zeros(300, 300)[:, 100:200]
    return {"weights": weights, "columns": columns}, lambda: (weights.add_(1), columns.add_(1))


def memory_of_an_array() -> tuple[Any, Callable[[], Any]]:
    array = np.zeros(BIG)
    return {"tensor": torch.from_numpy(array)}, lambda: np.add(array, 1, out=array)


KINDS = (plain_buffers, average, by_hand, loaded, strided, memory_of_an_array)


@pytest.mark.parametrize("way", ["save", "layers", "files"])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_what_changes_too_early_fails_the_save_and_is_named(
    tmp_path: Path, make: Callable[[], Any], way: str
) -> None:
    part, change = make()
    gate = Gate()
    with Checkpointer(tmp_path, SETTINGS, files=gate) as ck:
        gate.shut()
        if way == "save":
            handle = ck.save(1, {"filler": filler(), "part": part})
        elif way == "layers":  # what only `seal` brings
            first = filler()
            save = ck.begin(1, {"filler": first})
            save.stage(["filler"])
            handle = save.seal({"filler": first, "part": part})
        else:
            files = ck.begin_files(1, "tag")
            files.add("filler.pt", {"filler": filler()})
            files.add("part.pt", {"part": part})
            handle = files.seal()
        change()
        gate.open_up()
        name = "part.pt: part" if way == "files" else r"part\."
        with pytest.raises(BarrierError, match=rf"lea(f|ves) changed.*{name}"):
            handle.committed.result(60)
        assert ck.steps() == ()
        ck.save(2, {"filler": filler(), "part": part}).committed.result(60)


def test_what_does_not_change_is_never_reported(tmp_path: Path) -> None:
    states = [make()[0] for make in KINDS]
    with Checkpointer(tmp_path, SETTINGS) as ck:
        for step in range(20):
            ck.save(step, {"states": states, "more": [torch.zeros(5000) for _ in range(9)]})
            ck.wait_staged()
            for state in states[:1]:
                state["running_mean"].add_(1)
        ck.wait()
        assert ck.steps() == tuple(range(20))


def views(count: int) -> list[Any]:
    """Leaves of many forms, each in memory whose other bytes belong to somebody else."""
    drawn = random.Random(1)
    found = []
    for index in range(count):
        base = torch.zeros(drawn.randint(1, 40), drawn.randint(1, 40), dtype=torch.bfloat16)
        kind = drawn.randrange(4)
        view = (base, base.t(), base[:, :1], base[::2, 1:])[kind]
        found.append((view, index * 10_000, view.nbytes))
    return found


def bytes_of(tensor: torch.Tensor) -> set[int]:
    """Addresses of a leaf's own bytes."""
    size = tensor.element_size()
    places = (np.dot(index, tensor.stride()) for index in np.ndindex(*tensor.shape))
    return {
        tensor.data_ptr() + int(place) * size + byte for place in places for byte in range(size)
    }


def test_a_sample_looks_at_nothing_but_the_leaf() -> None:
    for item in views(200):
        own = bytes_of(item[0])
        for _ in range(10):
            looks = Sampler(Devices()).take([item])
            assert len(looks) == (item[2] > 0)
            for _, (place, found) in looks:
                begin = item[0].data_ptr() + place
                assert found and own.issuperset(range(begin, begin + len(found)))


def test_every_leaf_is_looked_at_in_its_turn() -> None:
    count = 3 * MOST + 7
    items = [(torch.zeros(100), index * 400, 400) for index in range(count)]
    sampler, seen = Sampler(Devices()), set()
    for _ in range(4):
        looks = [offset for offset, _ in sampler.take(items)]
        assert len(looks) == len(set(looks)) == MOST
        seen |= set(looks)
    assert len(seen) == count


@pytest.mark.parametrize("count", [MOST + 1, 2 * MOST, 2 * MOST + 1, 1500])
def test_each_sample_is_spread_over_all_leaves(count: int) -> None:
    """The stager copies in their order: an update that comes too early tears the rest of them."""
    items = [(torch.zeros(100), index * 400, 400) for index in range(count)]
    sampler, apart, seen = Sampler(Devices()), -(-count // MOST), set[int]()
    for _ in range(apart):
        sampler.take(views(MOST + 9))  # another file of the same save
        looks = sorted(offset // 400 for offset, _ in sampler.take(items))
        assert len(set(looks)) == MOST and looks[0] < apart and looks[-1] >= count - apart
        assert max(after - before for before, after in pairwise(looks)) <= apart
        seen.update(looks)
    assert len(seen) == count


def test_files_of_as_many_leaves_have_turns_of_their_own() -> None:
    sampler, count = Sampler(Devices()), 2 * MOST
    files = [[(torch.zeros(100), index * 400, 400) for index in range(count)] for _ in range(2)]
    seen = [set[int](), set[int]()]
    for _ in range(2):
        for items, looked in zip(files, seen, strict=True):
            looked.update(offset for offset, _ in sampler.take(items))
    assert [len(looked) for looked in seen] == [count, count]


def test_the_sample_draws_no_random_numbers_of_the_program() -> None:
    before = random.getstate(), torch.get_rng_state()
    Sampler(Devices()).take(views(10))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
