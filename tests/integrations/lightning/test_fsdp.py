"""FSDP of the first kind: each rank saves its parts, and any number of ranks, or any strategy, goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core import committed_steps, step_path, verify
from ckpt_lightning import CheckpointWarning, load
from tests.forks import Forks
from tests.integrations.lightning.ddp_crew import Answers, Crew
from tests.integrations.lightning.ddp_program import BATCH_SIZE, Flat, Watch, loader
from tests.integrations.lightning.models import FEATURES
from tests.integrations.lightning.running import differences, saver, trainer_of

FSDP = {"fsdp": {}}
FORMS = {
    "in flat": {"fsdp": {"use_orig_params": False}, "flat": "in flat"},
    "own state": {"fsdp": {}, "flat": "own state"},
}
"""Others than the usual one: the optimizer has flat parameters; a module has more than tensors to save."""
EVERY_2 = {"every_n_steps": 2}
STEPS = 12
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def pair(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with Crew(forks, 2, tmp_path_factory.mktemp("pair")) as crew:
        yield crew


@pytest.fixture(scope="module")
def undisturbed(pair: Crew) -> Answers:
    return pair.fit(**FSDP)


@pytest.fixture(scope="module")
def stopped(pair: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 2 to 8 of two ranks; training failed in the step after the ninth."""
    root = tmp_path_factory.mktemp("stopped") / "root"
    pair.fit(root=root, saving=EVERY_2, stop_at=9, **FSDP)
    return root


def _assert_same_ending(one: Answers, other: Answers) -> None:
    for rank in range(2):
        assert not differences(one.tensors(rank)["last"], other.tensors(rank)["last"]), rank


def test_the_usual_form_is_saved_without_fsdps_own_collectives(stopped: Path, pair: Crew) -> None:
    saved = pair.fit(root=stopped.parent / "again", saving=EVERY_2, stop_at=5, **FSDP)
    assert [row["cut"] for row in saved.rows] == [[True, True]] * 2
    # FSDP cuts by rows; these runs end where the flat parameter is cut.
    (rows, columns), bias = (8, FEATURES), 8
    half = (rows * columns + bias) // 2
    assert _elements(stopped.parent / "again", "state_dict.net.0.weight") == [
        half,
        rows * columns - half,
    ]


def _elements(root: Path, name: str) -> list[int]:
    """How many of a leaf each rank has stored."""
    found = []
    for rank in range(2):
        manifest = json.loads((step_path(root, 4) / f"rank-{rank:05d}.json").read_text())
        found += [row[5] // 4 for row in manifest["slices"] if row[0] == name]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_go_on_bit_for_bit(pair: Crew, root: Path, form: str) -> None:
    job = FORMS[form]
    undisturbed = pair.fit(**job)
    stopped = pair.fit(root=root, saving=EVERY_2, stop_at=7, **job)
    assert not any("error" in row for row in (*undisturbed.rows, *stopped.rows))
    assert [row["cut"] for row in stopped.rows] == [
        [form == "in flat"] * (1 + (form == "in flat"))
    ] * 2
    resumed = pair.fit(root=root, saving=EVERY_2, seed=99, **job)
    assert resumed.steps() == list(range(6, STEPS))
    _assert_same_ending(undisturbed, resumed)


@pytest.mark.parametrize("form", ["usual", *FORMS])
def test_layers_without_a_state_of_their_optimizer_go_on_bit_for_bit(
    pair: Crew, root: Path, form: str
) -> None:
    job = {**FORMS.get(form, FSDP), "resting": True}
    undisturbed = pair.fit(**job)
    stopped = pair.fit(root=root, saving=EVERY_2, stop_at=3, **job)
    cut = [False] if form == "own state" else [True, True]
    assert [row["cut"] for row in stopped.rows] == [cut] * 2
    (states,) = load(step_path(root, 2))["optimizer_states"]
    assert len(states["state"]) < sum(len(group["params"]) for group in states["param_groups"])
    resumed = pair.fit(root=root, saving=EVERY_2, seed=99, **job)
    assert resumed.steps() == list(range(2, STEPS))
    _assert_same_ending(undisturbed, resumed)
    begin, other = root.parent / "begin", root.parent / "other"
    by_hand = {**job, "fsdp": {**job["fsdp"], "state_dict_type": "sharded"}}
    pair.fit(save_to={"step": 0, "path": begin}, root=other, stop_at=1, **by_hand)
    anew = pair.fit(ckpt_path=begin, root=other, saving={"every_n_steps": 99}, seed=99, **job)
    for rank in range(2):
        assert not differences(undisturbed.tensors(rank)["begin"], anew.tensors(rank)["begin"])


def test_a_buffer_that_each_step_replaces_is_saved_as_it_is_then(pair: Crew, root: Path) -> None:
    job = {**FSDP, "flat": "drifting"}
    undisturbed = pair.fit(**job)
    stopped = pair.fit(root=root, saving=EVERY_2, stop_at=7, **job)
    assert [row["cut"] for row in stopped.rows] == [[True, True]] * 2
    means = [load(step_path(root, step))["state_dict"]["mean"].item() for step in (2, 4, 6)]
    assert means == [1.5, 1.875, 1.96875]
    resumed = pair.fit(root=root, saving=EVERY_2, seed=99, **job)
    assert resumed.steps() == list(range(6, STEPS))
    _assert_same_ending(undisturbed, resumed)


@pytest.mark.parametrize("step", [4, 6, 8])
def test_two_ranks_go_on_bit_for_bit(
    pair: Crew, undisturbed: Answers, stopped: Path, root: Path, step: int
) -> None:
    resumed = pair.fit(
        root=root, saving=EVERY_2, seed=99, ckpt_path=step_path(stopped, step), **FSDP
    )
    assert resumed.steps() == list(range(step, STEPS))
    _assert_same_ending(undisturbed, resumed)
    assert not any(row["warnings"] for row in resumed.rows)


def test_they_go_on_by_themselves(pair: Crew, undisturbed: Answers, stopped: Path) -> None:
    resumed = pair.fit(root=stopped, saving=EVERY_2, seed=99, **FSDP)
    assert resumed.steps() == [8, 9, 10, 11]
    _assert_same_ending(undisturbed, resumed)
    assert committed_steps(stopped) == (2, 4, 6, 8, 10, 12)
    assert verify(stopped).ok


def test_a_failure_saves_the_last_whole_step(pair: Crew, undisturbed: Answers, root: Path) -> None:
    pair.fit(root=root, saving={"every_n_steps": 99, "save_on_exception": True}, stop_at=7, **FSDP)
    assert committed_steps(root) == (7,)
    resumed = pair.fit(root=root, saving=EVERY_2, seed=99, **FSDP)
    assert resumed.steps() == list(range(7, STEPS))
    _assert_same_ending(undisturbed, resumed)


def test_one_process_without_it_goes_on_from_their_step_and_they_from_its(
    pair: Crew, stopped: Path, root: Path
) -> None:
    whole = load(step_path(stopped, 8))
    module, watch = Flat(), Watch()
    trainer = trainer_of(watch, saver(root, every_n_steps=9), max_epochs=2)
    with pytest.warns(CheckpointWarning, match="a step of 2 ranks is resumed by 1"):
        trainer.fit(module, loader(), ckpt_path=str(step_path(stopped, 8)))
    assert not differences(dict(whole["state_dict"]), dict(watch.begin["state_dict"]))
    assert not differences(whole["optimizer_states"], watch.begin["optimizer_states"])

    ours = load(step_path(root, 9))
    back = pair.fit(root=root.parent / "other", ckpt_path=step_path(root, 9), **FSDP)
    for rank in range(2):
        begin = back.tensors(rank)["begin"]
        assert not differences(dict(ours["state_dict"]), begin["state_dict"])
        assert {int(s["step"]) for s in begin["optimizer_states"][0]["state"].values()} == {9}


def test_a_full_checkpoint_of_lightnings_own_still_starts_a_run(pair: Crew, root: Path) -> None:
    path = root.parent / "theirs.ckpt"
    module = Flat()
    trainer = trainer_of(max_epochs=1, limit_train_batches=6)
    trainer.fit(module, loader(plain=False))
    trainer.save_checkpoint(path)
    resumed = pair.fit(root=root, ckpt_path=path, **FSDP)
    for rank in range(2):
        begin = resumed.tensors(rank)["begin"]
        assert not differences(dict(module.state_dict()), begin["state_dict"])
    assert committed_steps(root)[-1] == STEPS


def test_a_save_by_hand_is_a_step_of_all_ranks(pair: Crew, root: Path) -> None:
    by_hand = root.parent / "by-hand"
    # Lightning's own way to put a full state together ends the process on CPUs (torch 2.13).
    sharded = {"fsdp": {"state_dict_type": "sharded"}}
    pair.fit(save_to={"step": 3, "path": by_hand}, stop_at=3, root=root, **sharded)
    assert committed_steps(by_hand) == (3,)
    state = load(by_hand)["state_dict"]
    assert state["net.0.weight"].shape == (8, FEATURES)
    assert int(state["seen"]) == 3 * BATCH_SIZE
