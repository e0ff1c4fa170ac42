"""Restoring a part of a step, what fits of it, and under other names. What is left out stays as it is, to the
bit, and its bytes are not read."""

from __future__ import annotations

import copy
import enum
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_core
from ckpt_core import Checkpointer, ConfigError, RestoreError, StateMismatch
from ckpt_core.restore import RestoreWarning
from tests.restore.harness import flip


class Net(nn.Module):
    """An encoder and a head, trained for some steps."""

    def __init__(self, classes: int = 3, *, hidden: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, hidden), nn.BatchNorm1d(hidden))
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def made(seed: int, classes: int = 3) -> dict[str, Any]:
    """A state after two steps of training."""
    torch.manual_seed(seed)
    model = Net(classes)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": seed}


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """What each entry says of itself, copied."""
    given = {
        name: entry.state_dict() if hasattr(entry, "state_dict") else entry
        for name, entry in state.items()
    }
    return copy.deepcopy(given)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path) as ck:
        ck.save(5, made(1)).committed.result(60)
    return tmp_path


def restore(root: Path, state: Any, **how: Any) -> Any:
    with Checkpointer(root) as ck:
        return ck.restore(state, **how)


SAVED = plain(made(1))


def test_what_is_named_is_restored_and_nothing_else_is_read_or_changed(root: Path) -> None:
    state = made(2)
    before = plain(state)
    found = restore(root, state, only=["model"])
    after = plain(state)
    assert same(after["model"], SAVED["model"])
    assert same(after["optimizer"], before["optimizer"])
    assert same(after["scheduler"], before["scheduler"])
    assert found.state.keys() == {"model"} and found.left_out == ()


@pytest.mark.parametrize("only", ["model.encoder", ["model.encoder.0", "model.encoder.1"]])
def test_a_part_of_a_module_is_restored_alone(root: Path, only: Any) -> None:
    state = made(2)
    before = plain(state)
    restore(root, state, only=only)
    after = plain(state)["model"]
    for name, value in after.items():
        source = SAVED if name.startswith("encoder.") else before
        assert torch.equal(value, source["model"][name]), name


def test_a_state_of_fewer_entries_takes_its_part(root: Path) -> None:
    model = Net()
    found = restore(root, {"model": model}, only=["model"])
    assert same(model.state_dict(), SAVED["model"]) and found.state.keys() == {"model"}
    with pytest.raises(StateMismatch, match="optimizer"):
        restore(root, {"model": model})


def test_what_fits_is_filled_and_what_does_not_is_told_and_left(root: Path) -> None:
    state = made(2, classes=5)
    state["extra"] = torch.ones(3)
    before = plain(state)
    with pytest.warns(RestoreWarning, match="fits the state in part: 4 places stay") as told:
        found = restore(root, state, partial=True)
    assert len(told) == 1
    after = plain(state)
    for name, value in after["model"].items():
        source = before if name.startswith("head.") else SAVED
        assert torch.equal(value, source["model"][name]), name
    # It has moments of the old head: as a whole or not at all.
    assert same(after["optimizer"], before["optimizer"])
    assert same(after["scheduler"], SAVED["scheduler"])
    assert torch.equal(state["extra"], torch.ones(3))
    assert found.state["epoch"] == 1 and "optimizer" not in found.state
    text = "\n".join(found.left_out)
    for part in (
        "model.head.weight: shape [3, 64]",
        "model.head.bias: shape [3]",
        "extra: missing",
    ):
        assert part in text
    assert "optimizer: left as a whole, for optimizer.state." in text


def test_nothing_is_told_or_left_where_all_fits(root: Path) -> None:
    state = made(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = restore(root, state, partial=True)
    after = plain(state)
    assert found.left_out == ()
    assert all(same(after[name], SAVED[name]) for name in ("model", "optimizer", "scheduler"))


def test_a_step_of_which_nothing_fits_is_refused(root: Path) -> None:
    other = {"net": torch.ones(2)}
    with pytest.raises(StateMismatch, match="net: missing"):
        restore(root, other, partial=True)
    assert torch.equal(other["net"], torch.ones(2))


@pytest.mark.parametrize("other", [{"net": torch.ones(2)}, [torch.ones(2)]])
def test_where_nothing_fits_partial_is_not_advised_to_who_has_asked_for_it(
    root: Path, other: Any
) -> None:
    with pytest.raises(StateMismatch, match=r"say what .*restore\(only=.*or partial=True"):
        restore(root, other)
    with pytest.raises(StateMismatch, match=r"partial=True fills .*nothing does") as caught:
        restore(root, other, partial=True)
    assert "rename=" in str(caught.value) and "or partial=True" not in str(caught.value)


class Custom(Net):
    """A module whose `load_state_dict` does more than fill tensors."""

    loads = 0

    def _load_from_state_dict(self, *args: Any) -> None:
        self.loads += 1
        super()._load_from_state_dict(*args)


class Strict(Custom):
    """Its `load_state_dict` is for all of it."""

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state)


class Lenient(Custom):
    """Its `load_state_dict` is for any part of it, and cannot be told so."""

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state, strict=False)


@pytest.mark.parametrize("how", [{"partial": True}, {"only": ["model.encoder"]}])
@pytest.mark.parametrize("cls", [Custom, Strict, Lenient])
def test_a_module_that_loads_itself_takes_a_part_too(
    root: Path, cls: type[Custom], how: dict[str, Any]
) -> None:
    model = cls(5)
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RestoreWarning)
        restore(root, {"model": model}, **how)
    assert model.loads
    for name, value in model.state_dict().items():
        source = before if name.startswith("head.") else SAVED["model"]
        assert torch.equal(value, source[name]), name


class Renamed(nn.Module):
    """The same model, called otherwise."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.body, self.top = net.encoder, net.head


BY_FUNCTION: list[Callable[[str], str]] = [
    lambda path: path.replace("model.encoder", "model.body").replace("model.head", "model.top")
]


@pytest.mark.parametrize(
    "rename", [{"model.encoder": "model.body", "model.head": "model.top"}, *BY_FUNCTION]
)
def test_names_of_the_checkpoint_are_mapped_to_names_here(root: Path, rename: Any) -> None:
    model = Renamed()
    restore(root, {"model": model}, only=["model"], rename=rename)
    assert torch.equal(model.top.weight, SAVED["model"]["head.weight"])
    assert torch.equal(model.body[1].running_mean, SAVED["model"]["encoder.1.running_mean"])


def test_an_entry_and_what_is_in_it_are_renamed_together(root: Path) -> None:
    net = Renamed()
    names = {"model": "net", "model.encoder": "net.body", "model.head": "net.top"}
    restore(root, {"net": net}, only=["net.body"], rename=names)
    assert torch.equal(net.body[0].weight, SAVED["model"]["encoder.0.weight"])
    assert not torch.equal(net.top.weight, SAVED["model"]["head.weight"])


def test_a_wrapper_is_taken_off_by_name(tmp_path: Path) -> None:
    wrapped = nn.Module()
    wrapped.module = Net()
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"model": wrapped}).committed.result(60)
    bare = Net()
    restore(tmp_path, {"model": bare}, rename={"model.module": "model"})
    assert same(bare.state_dict(), wrapped.module.state_dict())


def test_tied_weights_are_tied_and_items_of_lists_keep_their_places(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"a": tied, "b": tied, "rows": [torch.ones(2), torch.ones(3)]}).committed.result(
            60
        )
    live = torch.zeros(6)
    state = {"a": live, "b": live, "rows": [torch.zeros(4), torch.zeros(3), torch.zeros(1)]}
    with pytest.warns(RestoreWarning):
        found = restore(tmp_path, state, partial=True)
    assert torch.equal(live, tied)
    assert [row.tolist() for row in state["rows"]] == [[0] * 4, [1] * 3, [0]]
    assert found.state["rows"][0] is None and len(found.left_out) == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"only": ["models"]}, r"only='models'.*there is model"),
    ({"only": ["model.encodr"]}, r"only='model.encodr'.*model.encoder"),
    ({"only": []}, r"only=\[\]: name entries"),
    ({"only": [3]}, r"only=\[3\]: name entries"),
    ({"only": ["optimizer.state"]}, r"only='optimizer.state'.*AdamW.*name 'optimizer'"),
    ({"rename": 3}, "rename=3: give a mapping"),
    ({"rename": {"model.head": "head"}}, "'model.head.weight' cannot become 'head.weight'"),
    ({"rename": {"model.head": "model.encoder.0"}}, "both be 'model.encoder.0.weight'"),
    ({"rename": lambda path: None}, "cannot become None"),
]


@pytest.mark.parametrize(("how", "text"), WRONG)
def test_what_makes_no_sense_is_refused_before_anything_changes(
    root: Path, how: dict[str, Any], text: str
) -> None:
    state = made(2)
    before = plain(state)
    with pytest.raises(ConfigError, match=text):
        restore(root, state, **how)
    assert same(plain(state), before)


@pytest.mark.parametrize(
    ("only", "rename", "text"),
    [
        (
            "net.body",
            {"model.encoder": "net.body"},
            "'model.encoder.0.weight' cannot become 'net.body.0",
        ),
        (
            "bare",
            {"model.encoder": "bare"},
            "'model.encoder.0.weight' cannot become 'bare.0.weight'",
        ),
        ("bare", {"deep.er.one": "bare"}, "'deep.er.one' cannot become 'bare': .* 'deep.er' here"),
        (
            "bare",
            lambda path: path.replace("model.encoder", "bare"),
            "'model.encoder.0.weight' cannot become 'bare.0.weight': it is in what is 'model' here",
        ),
    ],
)
def test_what_rename_takes_out_of_a_container_that_is_not_wanted_is_told_as_that(
    tmp_path: Path, only: str, rename: Any, text: str
) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"model": Net(), "deep": {"er": {"one": torch.ones(2)}}}).committed.result(60)
    net = Renamed()
    state = {"net": net, "bare": net.body}
    before = plain(state)
    with pytest.raises(ConfigError, match=text):
        restore(tmp_path, state, only=[only], rename=rename)
    assert same(plain(state), before)


def test_a_rename_that_is_not_wanted_is_not_blamed(root: Path) -> None:
    names = {"model.head": "elsewhere", "model.encoder": "model.body"}
    with pytest.raises(ConfigError, match=r"only='epochs': nothing of that name.*there is epoch"):
        restore(root, made(2), only=["epochs"], rename=names)
    with pytest.raises(StateMismatch, match="nothing: missing"):
        restore(root, {"nothing": torch.ones(2)}, only=["nothing"], rename=names)


def test_where_memory_is_shared_and_values_differ_only_is_advised_and_helps(tmp_path: Path) -> None:
    memory = torch.zeros(2, 3)
    live = {"a": memory, "b": memory.t(), "c": torch.zeros(2)}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, 2), "c": torch.ones(2)})
        ck.wait()
        with pytest.raises(StateMismatch, match=r"(?s)a: shares.*restore\(only=") as caught:
            ck.restore(live, partial=True)
        assert "partial" not in str(caught.value) and not memory.any() and not live["c"].any()
        ck.restore(live, only=["a", "c"])
    assert torch.equal(memory, torch.arange(6.0).view(2, 3)) and live["c"].all()


class Color(enum.Enum):
    """Of keys that are no text."""

    R = 1


def keyed(value: float) -> dict[Any, Any]:
    """A state by keys of many types, outside and inside."""
    keys = (("a", 1), Color.R, 3, None, b"z", frozenset({5}), "text")
    state: dict[Any, Any] = {key: torch.full((2,), value) for key in keys}
    return state | {"inner": {key: torch.full((2,), value) for key in keys}}


@pytest.mark.parametrize("inner", ["", "inner."])
@pytest.mark.parametrize("key", [("a", 1), Color.R, 3, None, b"z", frozenset({5}), "text"])
def test_what_has_a_key_of_any_type_is_named_as_errors_name_it(
    tmp_path: Path, key: Any, inner: str
) -> None:
    name, live = f"{inner}{key}", keyed(0.0)
    with Checkpointer(tmp_path) as ck:
        ck.save(1, keyed(7.0)).committed.result(60)
        ck.restore(live, only=[name])
        lesser = keyed(0.0)
        del (lesser["inner"] if inner else lesser)[key]
        with pytest.raises(StateMismatch, match=re.escape(f"{name}: unexpected")):
            ck.restore(lesser)
        with pytest.raises(StateMismatch, match=re.escape(f"{name}: unexpected")):
            ck.restore(lesser, only=[name])
    loaded = ckpt_core.load(tmp_path, only=[name])
    for state in (live, loaded):
        filled = [place for place, value in places(state) if value.all()]
        assert filled == [name]


def places(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from places(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_an_error_about_a_name_shows_those_that_can_be_given(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {("a", 1): torch.ones(2), Color.R: torch.ones(2)}).committed.result(60)
    with pytest.raises(ConfigError, match=r"there is \('a', 1\), Color\.R\."):
        ckpt_core.load(tmp_path, only=["b"])


def test_what_is_in_a_container_that_is_renamed_goes_along_whatever_its_key(tmp_path: Path) -> None:
    live = {"outer": keyed(0.0)["inner"]}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"inner": keyed(7.0)["inner"]}).committed.result(60)
        ck.restore(live, only=["outer.('a', 1)"], rename={"inner": "outer"})
    assert live["outer"]["a", 1].all() and not live["outer"][Color.R].any()


@pytest.mark.parametrize("key", [("a", 1), Color.R, 3])
def test_a_key_that_is_no_text_is_not_renamed(tmp_path: Path, key: object) -> None:
    live = {"outer": {"new": torch.zeros(2), key: torch.zeros(2)}}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"inner": {key: torch.ones(2)}}).committed.result(60)
        wanted = {"inner": "outer", f"inner.{key}": "outer.new"}
        with pytest.raises(ConfigError, match=re.escape(f"its key {key} is no text")):
            ck.restore(live, rename=wanted, partial=True)
        assert not live["outer"]["new"].any() and not live["outer"][key].any()


def test_a_key_of_a_type_that_is_not_here_stands_in_the_way_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {Color.R: torch.ones(2), "b": torch.ones(2)}).committed.result(60)
    monkeypatch.delattr(f"{__name__}.Color")
    assert ckpt_core.load(tmp_path, only=["b"])["b"].all()
    with pytest.raises(RestoreError, match="Color"):
        ckpt_core.load(tmp_path, only=["Color.R"])


def test_a_part_of_a_shape_is_nothing_that_could_be_restored(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"shape": torch.Size([2, 3]), "w": torch.ones(3)}).committed.result(60)
        with pytest.raises(ConfigError, match=r"only=.shape\.0.: nothing of that name"):
            ck.restore({"shape": None, "w": torch.zeros(3)}, only=["shape.0"])
        assert ck.restore({"shape": None}, only=["shape"]).state == {"shape": torch.Size([2, 3])}
    assert not (tmp_path / ".corrupt").exists()


def test_a_name_that_is_on_one_side_alone_is_a_difference(root: Path) -> None:
    state = made(2)
    del state["model"]
    with pytest.raises(StateMismatch, match="model: unexpected"):
        restore(root, state, only=["model", "scheduler"])


def test_load_gives_a_part_and_reads_no_more(root: Path) -> None:
    found = ckpt_core.load(root, only=["model.head", "epoch"])
    assert found.keys() == {"model", "epoch"} and found["epoch"] == 1
    assert same(
        dict(found["model"]), {k: v for k, v in SAVED["model"].items() if k.startswith("head.")}
    )
    with pytest.raises(ConfigError, match="only='head'"):
        ckpt_core.load(root, only=["head"])


def test_damage_in_what_is_left_out_is_no_matter(root: Path) -> None:
    """Chunks that hold none of the wanted bytes are not read."""
    big = {"large": torch.randn(3 << 20), "small": torch.randn(5)}
    with Checkpointer(root) as ck:
        path = ck.save(9, big).committed.result(60)
    (shard,) = path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    place = len(data) * 9 // 10
    data[place] ^= 1
    shard.write_bytes(data)
    small = torch.zeros(5)
    found = restore(root, {"small": small}, only=["small"])
    assert found.step == 9 and torch.equal(small, big["small"])
    assert found.read_bytes < 0.8 * len(data)


def _damage(path: Path) -> None:
    """Turn over a bit of the last leaf of a step."""
    (shard,) = path.glob("*.safetensors")
    flip(shard, shard.stat().st_size - 4096)


def _two_steps(root: Path, older: dict[str, Any], newer: dict[str, Any]) -> None:
    with Checkpointer(root) as ck:
        ck.save(8, older).committed.result(60)
        path = ck.save(9, newer).committed.result(60)
    _damage(path)


OLDER: list[tuple[dict[str, Any], str]] = [
    ({"weight": torch.ones(5000)}, "head"),
    ({"weight": torch.ones(5000), "head": torch.ones(4)}, "head"),
    ({"weight": torch.ones(2), "head": torch.ones(3)}, "weight"),
]


@pytest.mark.parametrize(("older", "left"), OLDER)
def test_places_that_a_damaged_step_has_filled_are_not_said_to_stay_as_they_were(
    tmp_path: Path, older: dict[str, Any], left: str
) -> None:
    newer = {"head": torch.full((3,), 9.0), "weight": torch.full((5000,), 9.0)}
    _two_steps(tmp_path, older, newer)
    live = {"weight": torch.zeros(5000), "head": torch.zeros(3)}
    with (
        pytest.warns(RestoreWarning, match="step 9 was not restored"),
        pytest.raises(RestoreError, match=f"would leave {left} with bytes of a newer") as caught,
    ):
        restore(tmp_path, live, partial=True)
    assert "Live tensors were overwritten" in caught.value.__notes__[0]
    assert len(caught.value.__notes__) == 1
    again = {"weight": torch.zeros(5000), "head": torch.zeros(3)}
    with pytest.warns(RestoreWarning, match="fits the state in part"):
        restore(tmp_path, again, partial=True, step=8)
    assert not again[left].any()


def test_an_optimizer_that_a_damaged_step_has_filled_is_not_said_to_stay(tmp_path: Path) -> None:
    older, newer = made(1), {**made(3), "last": torch.ones(5000)}
    older["optimizer"] = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    _two_steps(tmp_path, {**older, "last": torch.ones(5000)}, newer)
    live = {**made(2), "last": torch.zeros(5000)}
    with (
        pytest.warns(RestoreWarning),
        pytest.raises(RestoreError, match=r"would leave optimizer\."),
    ):
        restore(tmp_path, live, partial=True)


def test_what_no_try_has_filled_may_be_left_out_by_a_fallback(tmp_path: Path) -> None:
    steps = [{"a": torch.full((5000,), step), "new": torch.ones(7)} for step in (8.0, 9.0)]
    _two_steps(tmp_path, *steps)
    live = {"a": torch.zeros(5000), "new": torch.zeros(3)}
    with pytest.warns(RestoreWarning):
        found = restore(tmp_path, live, partial=True)
    assert found.step == 8 and torch.equal(live["a"], steps[0]["a"])
    assert not live["new"].any() and len(found.left_out) == 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS])
def test_moments_of_another_shape_are_left_as_those_of_any_optimizer(
    tmp_path: Path, kind: type[torch.optim.Optimizer], bias: bool
) -> None:
    def made(outputs: int) -> dict[str, Any]:
        head = nn.Linear(4, outputs, bias=bias)
        net = torch.nn.ModuleDict({"body": nn.Linear(4, 4, bias=bias), "head": head})
        return {"model": net, "optimizer": kind(net.parameters())}  # type: ignore[call-arg]

    saved, live = made(2), made(5)
    loss = saved["model"]["head"](torch.ones(3, 4)).sum()
    loss.backward()
    saved["optimizer"].step(lambda: loss)
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {**saved, "rate": 0.5}).committed.result()
    with pytest.warns(RestoreWarning):
        found = restore(tmp_path, {**live, "rate": None}, partial=True)
    assert any("optimizer: left as a whole" in text for text in found.left_out)
    assert not live["optimizer"].state
