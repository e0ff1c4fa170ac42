"""Generators in a state: saved as they are, put back in place, whoever made them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer
from ckpt_core.errors import CorruptCheckpoint, StateMismatch
from ckpt_core.state import RngState, Skeleton
from ckpt_core.state.atoms import to_base64
from ckpt_core.state.generators import are_alike, put_generator
from ckpt_core.state.opaque import pickle_opaque

KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "python": (random.Random, lambda one: one.random()),
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda one: torch.rand(1, generator=one).item(),
    ),
    "numpy": (np.random.default_rng, lambda one: one.random()),
    "numpy, old": (np.random.RandomState, lambda one: one.standard_normal()),
    "numpy, old by PCG64": (
        lambda seed: np.random.RandomState(np.random.PCG64(seed)),
        lambda one: one.standard_normal(),
    ),
    **{
        name: (getattr(np.random, name), lambda one: one.random_raw())
        for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
}
"""How each is made of a seed, and drawn from."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_put_back_in_place_and_loaded(kind: str, tmp_path: Path) -> None:
    make, draw = KINDS[kind]
    live = make(1)
    draw(live)
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"w": torch.ones(2), "deep": [{"g": live}]}).committed.result()
        expected = [draw(live) for _ in range(800)]
        fresh = make(2)
        state = {"w": torch.zeros(2), "deep": [{"g": fresh}]}
        restored = ck.restore(state)
    assert state["deep"][0]["g"] is fresh  # type: ignore[index]
    assert [draw(fresh) for _ in range(800)] == expected
    assert restored is not None
    for trusted in (False, True):
        found = ckpt_core.load(tmp_path, trusted=trusted)["deep"][0]["g"]
        assert type(found) is type(live) and draw(found) == expected[0]
    assert draw(restored.state["deep"][0]["g"]) == expected[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_of_another_kind_is_a_mismatch_and_nothing_is_changed(
    kind: str, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"w": torch.ones(2), "g": KINDS[kind][0](1)}).committed.result()
        for other in KINDS:
            if other == kind:
                continue
            make, draw = KINDS[other]
            state = {"w": torch.zeros(2), "g": make(3)}
            with pytest.raises(StateMismatch, match=r"g: .* in the checkpoint"):
                ck.restore(state)
            assert draw(state["g"]) == draw(make(3)) and not state["w"].any()


@pytest.mark.parametrize("saved", [None, 3, {"seed": 3}, torch.ones(3)])
def test_a_generator_where_none_was_saved_is_a_mismatch(saved: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"w": torch.ones(2), "g": saved}).committed.result()
        with pytest.raises(StateMismatch, match=r"g: .* in the checkpoint"):
            ck.restore({"w": torch.ones(2), "g": torch.Generator()})


def test_any_placeholder_does_for_a_generator(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"w": torch.ones(2), "g": generator}).committed.result()
        restored = ck.restore({"w": torch.ones(2), "g": None})
    assert restored is not None
    assert torch.equal(restored.state["g"].get_state(), generator.get_state())


def test_what_loads_may_draw_from_a_generator_before_it_is_put_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)

    class Draws:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(5, generator=generator)

    with Checkpointer(tmp_path) as ck:
        state = {"g": generator, "draws": Draws(), "rng": RngState()}
        ck.save(1, state).committed.result()
        expected = generator.get_state()
        ck.restore(state)
    assert torch.equal(generator.get_state(), expected)


def test_a_generator_of_a_device_that_is_not_in_use_is_loaded_as_its_state() -> None:
    state = bytes(range(16))
    found = _through("ckpt_core.state.generators", "torch_generator", ("cuda:1", state))
    assert found.dtype == torch.uint8 and bytes(found.tolist()) == state


class _Live(torch.Generator):
    """As one of a device that this machine lacks."""

    device = torch.device("cuda:0")  # type: ignore[assignment]
    given: Any = None

    def set_state(self, state: torch.Tensor) -> Any:
        self.given = state


def test_a_generator_of_a_device_takes_a_state_that_was_read_before_it_was_in_use() -> None:
    state = torch.arange(16, dtype=torch.uint8)
    live = _Live()
    assert are_alike(live, state) and not are_alike(torch.Generator(), state)
    assert not are_alike(live, torch.Generator()) and not are_alike(live, torch.ones(3))
    put_generator(live, state)
    assert torch.equal(live.given, state)


def _through(module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """What the safe unpickler makes of one call."""

    class Called:
        def __reduce__(self) -> Any:
            found = __import__(module, fromlist=[name])
            return getattr(found, name), arguments

    node = {"!": "opaque", "type": "x.Y", "v": to_base64(pickle_opaque(Called(), "x").data)}
    return Skeleton.from_json({"tree": node}, path="some.json").unflatten({}, trusted=False)


HONEST = bytes(torch.Generator().get_state().tolist())


@pytest.mark.parametrize(
    "arguments",
    [
        ("cpu", b""),
        ("cpu", HONEST[:-1]),
        ("cpu", HONEST[:8] + b"\xff\xff\xff\x7f" + HONEST[12:]),
        ("nowhere", HONEST),
        ("cpu:-7", HONEST),
        (7, HONEST),
        ("cpu", 7),
        ("cpu",),
        ("cpu", HONEST, 1),
        ("x" * 10**5, HONEST),
    ],
)
def test_a_forged_generator_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(CorruptCheckpoint):
        _through("ckpt_core.state.generators", "torch_generator", arguments)


@pytest.mark.parametrize("seed", [5, 6, None])
@pytest.mark.parametrize("make", [np.random.default_rng, np.random.PCG64])
def test_children_that_a_generator_spawns_go_on_behind_a_restore(
    make: Callable[[int | None], Any], seed: int | None, tmp_path: Path
) -> None:
    if type(np.random.PCG64(5).__reduce__()[2]) is not tuple:
        pytest.skip("this NumPy does not pickle what children are made of")

    def seeds(one: Any) -> Any:
        return getattr(one, "bit_generator", one).seed_seq

    live, resumed = make(5), make(seed)
    seeds(live).spawn(2)
    seeds(resumed).spawn(3)
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"g": live}).committed.result()
        expected = [np.random.default_rng(child).random() for child in seeds(live).spawn(2)]
        ck.restore({"g": resumed})
    assert [np.random.default_rng(child).random() for child in seeds(resumed).spawn(2)] == expected


def test_a_generator_without_a_seed_takes_the_state_of_one_that_has_one() -> None:
    bits = np.random.RandomState(1)._bit_generator  # type: ignore[attr-defined]
    saved = np.random.MT19937(3)
    put_generator(bits, saved)
    assert bits.random_raw() == saved.random_raw()
