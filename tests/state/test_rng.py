"""The generators of devices: each type under its name, as many as there are, and none initialized for it."""

from __future__ import annotations

import gc
import pickle
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt_core import Checkpointer, StateMismatch
from ckpt_core.restore import RestoreWarning
from ckpt_core.state import RngState
from ckpt_core.system.devices import Devices

KIND = "hpu"
"""A type of device that torch knows the name of, and has no module for."""


class Backend(ModuleType):
    """Two devices; what they are asked before they are initialized fails, but for their number."""

    def __init__(self, count: int) -> None:
        super().__init__(KIND)
        self.states = [torch.full((16,), index, dtype=torch.uint8) for index in range(count)]
        self.used, self.current = True, 0

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state_all(self) -> list[Tensor]:
        assert self.used
        return self.states

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        raise AssertionError

    def current_device(self) -> int:
        assert self.used
        return self.current

    def set_rng_state(self, state: Tensor, index: int | None = None) -> None:
        self.states[self.current if index is None else index] = state


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    made = Backend(2)
    monkeypatch.setattr(torch, KIND, made, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: getattr(torch, kind))
    monkeypatch.setattr(Devices, "kind", lambda self: KIND)
    return made


def test_the_generators_of_devices_are_kept_under_their_type(backend: Backend) -> None:
    saved = RngState().state_dict()
    assert [int(state[0]) for state in saved[KIND]] == [0, 1]
    backend.states = [torch.zeros(16, dtype=torch.uint8)] * 2
    RngState().load_state_dict(saved)
    assert [int(state[0]) for state in backend.states] == [0, 1]


def test_devices_that_are_not_in_use_are_asked_nothing(backend: Backend) -> None:
    backend.used = False
    assert KIND not in RngState().state_dict()


def test_states_of_more_or_fewer_devices_go_to_those_that_are_there(backend: Backend) -> None:
    saved = RngState().state_dict()
    nine = torch.full((16,), 9, dtype=torch.uint8)
    with pytest.warns(RestoreWarning, match="1 of them were visible .* 2 are"):
        RngState().load_state_dict(saved | {KIND: [nine]})
    assert [int(state[0]) for state in backend.states] == [9, 1]
    with pytest.warns(RestoreWarning, match="3 of them were visible .* 2 are"):
        RngState().load_state_dict(saved | {KIND: [nine, nine, nine]})
    assert [int(state[0]) for state in backend.states] == [9, 9]


@pytest.mark.parametrize(("before", "was"), [(1, 0), (4, 3)])
@pytest.mark.parametrize(("after", "now"), [(1, 0), (4, 2)])
def test_where_other_devices_are_visible_the_current_one_gets_the_state_of_that_of_then(
    backend: Backend, before: int, was: int, after: int, now: int
) -> None:
    backend.states, backend.current = Backend(before).states, was
    saved = RngState().state_dict()
    backend.states = [torch.full((16,), 9, dtype=torch.uint8)] * after
    backend.current = now
    if before == after:
        RngState().load_state_dict(saved)
        assert [int(state[0]) for state in backend.states] == list(range(before))
    else:
        with pytest.warns(RestoreWarning, match=f"{before} of them were .* {after} are"):
            RngState().load_state_dict(saved)
        assert int(backend.states[now][0]) == was


@pytest.mark.parametrize("forged", [[], [torch.zeros(0).byte()], [torch.full((1,), 200).byte()]])
def test_a_current_device_that_is_forged_or_not_told_changes_nothing_else(
    backend: Backend, forged: Any
) -> None:
    saved = RngState().state_dict()
    with pytest.warns(RestoreWarning):
        RngState().load_state_dict(saved | {KIND: saved[KIND][1:], "current": forged})
    assert [int(state[0]) for state in backend.states] == [1, 1]


def test_states_of_a_type_that_is_not_here_are_left_out(backend: Backend) -> None:
    saved = RngState().state_dict()
    RngState().load_state_dict(saved | {"cuda": saved[KIND], "npu": saved[KIND]})


@pytest.mark.parametrize("forged", [3, [3], [torch.zeros(3)], (torch.zeros(3).byte(),)])
def test_forged_states_of_any_type_of_device_are_refused(backend: Backend, forged: Any) -> None:
    saved = RngState().state_dict()
    with pytest.raises(ValueError, match="of another form"):
        RngState().load_state_dict(saved | {"npu": forged})


def test_one_generator_for_all_is_asked_as_its_backend_can(backend: Backend) -> None:
    class One(ModuleType):
        state = torch.full((16,), 5, dtype=torch.uint8)

        def device_count(self) -> int:
            return 1

        def get_rng_state(self) -> Tensor:
            return self.state

        def set_rng_state(self, state: Tensor) -> None:
            self.state = state

    only = One(KIND)
    torch.hpu = only  # type: ignore[attr-defined]
    saved = RngState().state_dict()
    only.state = torch.zeros(16, dtype=torch.uint8)
    RngState().load_state_dict(saved)
    assert int(only.state[0]) == 5


class Door(Devices):
    """Another door, behind which there is one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.state = [torch.full((16,), 7, dtype=torch.uint8)]

    def generators(self) -> dict[str, list[Tensor]]:
        return {KIND: self.state}

    def set_generators(self, states: Mapping[str, Sequence[Tensor]]) -> None:
        self.state = [*states[KIND]]


def test_generators_are_asked_for_through_the_door_that_is_given(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, RngState(devices=Door())).committed.result(60)
        door = Door()
        door.state = []
        ck.restore(RngState(devices=door))
    assert [int(state[0]) for state in door.state] == [7]
    plain = pickle.loads(pickle.dumps(RngState()))
    assert KIND not in plain.state_dict()


def test_another_bit_generator_of_numpys_is_found_before_anything_is_put_back(
    tmp_path: Path,
) -> None:
    other, torchs = np.random.PCG64(5), torch.get_rng_state()
    usual = np.random.get_bit_generator()
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"rng": RngState(), "w": torch.ones(3)}).committed.result(60)
        saved = RngState().state_dict()
        random.seed(7)
        torch.manual_seed(8)
        before, live = (random.getstate(), torch.get_rng_state()), torch.zeros(3)
        np.random.set_bit_generator(other)
        try:
            with pytest.raises(StateMismatch, match=r"rng: NumPy's MT19937 in the .*, PCG64 here"):
                ck.restore({"rng": RngState(), "w": live})
            with pytest.raises(ValueError, match="was a MT19937, and is a PCG64"):
                RngState().load_state_dict(saved)
        finally:
            np.random.set_bit_generator(usual)
        assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
        assert not live.any()
        with pytest.raises(RuntimeError):
            RngState().load_state_dict(saved | {"torch": torchs[:7].clone()})
        assert random.getstate() == before[0]
        ck.restore({"rng": RngState(), "w": live})
    assert random.getstate() == saved["python"] and torch.equal(torch.get_rng_state(), torchs)


def test_a_program_that_bars_numpy_saves_and_restores_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "numpy", None
    )  # as Python has it for what is not to be imported
    model = torch.nn.Linear(3, 3)
    state = {"rng": RngState(), "model": model}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, state).committed.result(60)
        want = torch.rand(3), random.random()
        assert ck.restore(state) is not None
    assert torch.equal(torch.rand(3), want[0]) and random.random() == want[1]


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Generators of two devices that are not in use yet: torch.cuda's own code above another driver."""
    made = [torch.Generator() for _ in range(2)]
    for owner, name, value in [
        (torch.cuda, "_initialized", False),
        (torch.cuda, "_queued_calls", []),
        (torch.cuda, "_lazy_seed_tracker", type(torch.cuda._lazy_seed_tracker)()),
        (torch.cuda, "_cudart", object()),
        (torch.cuda, "_is_in_bad_fork", lambda: False),
        (torch._C, "_cuda_getDeviceCount", lambda: 2),
        (torch._C, "_cuda_init", lambda: None),
        (torch.cuda, "default_generators", tuple(made)),
        (Devices, "kind", lambda self: "cuda"),
        *((module, "device_count", lambda: 2) for module in (torch.cuda, torch.cuda.random)),
        *((module, "current_device", lambda: 1) for module in (torch.cuda, torch.cuda.random)),
    ]:
        monkeypatch.setattr(owner, name, value, raising=False)
    return made


def drawn(generators: list[torch.Generator]) -> list[float]:
    return [torch.rand(1, generator=generator).item() for generator in generators]


def saved_by_a_run(generators: list[torch.Generator]) -> Any:
    """What a run saved whose two devices have drawn, and with it what they draw next."""
    for seed, generator in enumerate(generators):
        generator.manual_seed(100 + seed)
    rows = [generator.get_state() for generator in generators]
    states = RngState().state_dict() | {
        "cuda": rows,
        "current": [torch.ones(1, dtype=torch.uint8)],
    }
    return states, drawn(generators)


def test_a_seed_that_was_set_before_a_device_is_used_does_not_replace_what_is_put_back(
    unused: list[torch.Generator],
) -> None:
    saved, want = saved_by_a_run(unused)
    torch.cuda.manual_seed_all(7)
    torch.cuda.manual_seed(8)
    RngState().load_state_dict(saved)
    assert not torch.cuda.is_initialized()
    torch.cuda.init()
    assert drawn(unused) == want


def test_of_other_devices_not_in_use_the_current_one_goes_on(unused: list[torch.Generator]) -> None:
    saved, want = saved_by_a_run(unused)
    torch.cuda.manual_seed_all(7)
    saved["cuda"] = [saved["cuda"][0]] * 2 + [saved["cuda"][1]]
    saved["current"] = [torch.full((1,), 2, dtype=torch.uint8)]
    with pytest.warns(RestoreWarning, match="3 of them were visible .* 2 are"):
        RngState().load_state_dict(saved)
    torch.cuda.init()
    assert drawn(unused) == want


def test_what_waits_for_a_device_is_saved_until_the_program_seeds_anew(
    unused: list[torch.Generator],
) -> None:
    saved, want = saved_by_a_run(unused)
    RngState().load_state_dict(saved)
    again = RngState().state_dict()
    assert not torch.cuda.is_initialized()
    assert set(again) == set(saved)
    torch.cuda.manual_seed_all(7)
    gc.collect()
    assert "cuda" not in RngState().state_dict()
    RngState().load_state_dict(again)
    torch.cuda.init()
    assert drawn(unused) == want
    assert torch.equal(
        RngState().state_dict()["cuda"][0], torch.cuda.default_generators[0].get_state()
    )
