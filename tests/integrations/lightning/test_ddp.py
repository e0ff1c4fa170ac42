"""Several ranks save one step together, and any number of them goes on from it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks

from ckpt_core import committed_steps, step_path
from ckpt_core.bench.meeting import free_port
from ckpt_lightning import CheckpointWarning, load
from tests.forks import Forks
from tests.integrations.lightning.ddp_crew import Answers, Crew
from tests.integrations.lightning.ddp_program import (
    SAMPLES,
    Recording,
    Sharded,
    Stop,
    Watch,
    loader,
)
from tests.integrations.lightning.running import differences, saver, trainer_of

EVERY_2 = {"every_n_steps": 2}
ALL = list(range(SAMPLES))
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def pair(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with Crew(forks, 2, tmp_path_factory.mktemp("pair")) as crew:
        yield crew


@pytest.fixture(scope="module")
def four(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with Crew(forks, 4, tmp_path_factory.mktemp("four")) as crew:
        yield crew


@pytest.fixture(scope="module")
def undisturbed(pair: Crew) -> Answers:
    return pair.fit()


@pytest.fixture(scope="module")
def of_two(pair: Crew, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """A root with step 4 of two ranks, mid-epoch; and how it came about."""
    root = tmp_path_factory.mktemp("of_two") / "root"
    return root, pair.fit(root=root, saving={"every_n_steps": 4}, stop_at=5)


def _assert_same_ending(one: Answers, other: Answers) -> None:
    for rank in range(len(one.rows)):
        assert not differences(one.tensors(rank)["last"], other.tensors(rank)["last"]), rank


def _assert_begins_with(answers: Answers, root: Path, step: int) -> None:
    """Each rank began with the very parameters and optimizer states of the step."""
    saved = load(step_path(root, step))
    names = [name for name, _ in Recording().named_parameters() if name in saved["state_dict"]]
    assert len(names) >= 4
    for rank in range(len(answers.rows)):
        begin = answers.tensors(rank)["begin"]
        for name in names:
            assert torch.equal(begin["state_dict"][name], saved["state_dict"][name]), name
        assert not differences(saved["optimizer_states"], begin["optimizer_states"])


def _told(answers: Answers) -> str:
    """What was warned of: once, by rank 0."""
    (text,) = answers.rows[0]["warnings"]
    assert not any(row["warnings"] for row in answers.rows[1:])
    return str(text)


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- the same number of ranks --------------------------------------------------------------------


def test_two_ranks_go_on_bit_for_bit_after_one_of_them_was_killed_mid_epoch(
    forks: Forks, pair: Crew, undisturbed: Answers, root: Path, tmp_path: Path
) -> None:
    with Crew(forks, 2, tmp_path) as crew:
        crew.begin(root=root, saving=EVERY_2, mine={"1": {"pause_at": 9}})
        _until(lambda: root.exists() and 8 in committed_steps(root))
        os.kill(crew.processes[1].pid, signal.SIGKILL)
        # The rank that is left learns of it in a collective, and does not hang.
        assert "error" in crew.answer_of(0)
    resumed = pair.fit(root=root, saving=EVERY_2, seed=99)
    assert resumed.steps() == [8, 9, 10, 11]
    _assert_same_ending(undisturbed, resumed)
    said = [line for row in resumed.rows for line in row["said"] if "resumed from" in line]
    assert said == [f"resumed from step 8 (epoch 1, mid-epoch) of {root}"]


def test_sigterm_to_all_ranks_saves_the_step_that_was_reached(
    forks: Forks, pair: Crew, undisturbed: Answers, root: Path, tmp_path: Path
) -> None:
    with Crew(forks, 2, tmp_path) as crew:
        out = crew.begin(root=root, saving={"every_n_steps": 100}, pause_at=4)
        _until(lambda: all(Path(f"{out}.paused{rank}").exists() for rank in (0, 1)))
        for process in crew.processes:
            process.send_signal(signal.SIGTERM)
        for rank in (0, 1):
            assert "SIGTERMException" in crew.answer_of(rank)["error"]
    assert committed_steps(root) == (5,)
    resumed = pair.fit(root=root, saving=EVERY_2, seed=99)
    assert resumed.steps()[0] == 5
    _assert_same_ending(undisturbed, resumed)


def test_four_ranks_go_on_bit_for_bit(four: Crew, root: Path) -> None:
    job: dict[str, Any] = {"strategy": "ddp_find_unused_parameters_true"}
    job["trainer"] = {"max_epochs": 3}
    expected = four.fit(**job)
    four.fit(**job, root=root, saving=EVERY_2, stop_at=5)
    resumed = four.fit(**job, root=root, saving=EVERY_2, seed=50)
    assert resumed.steps() == list(range(4, 9)) and not resumed.rows[0]["warnings"]
    _assert_same_ending(expected, resumed)


def test_four_ranks_are_told_that_ddp_itself_does_not_add_up_alike(four: Crew, root: Path) -> None:
    four.fit(root=root, saving=EVERY_2, stop_at=5)
    resumed = four.fit(root=root, saving=EVERY_2, seed=50)
    _assert_begins_with(resumed, root, 4)
    assert "find_unused_parameters=True" in _told(resumed)


def test_an_explicit_path_is_loaded_by_each_rank_as_its_own(
    pair: Crew, undisturbed: Answers, of_two: tuple[Path, Answers], tmp_path: Path
) -> None:
    path = step_path(of_two[0], 4)
    resumed = pair.fit(root=tmp_path / "other", saving=EVERY_2, ckpt_path=str(path), seed=99)
    assert resumed.steps()[0] == 4
    _assert_same_ending(undisturbed, resumed)


def test_all_ranks_pass_over_a_step_of_which_one_finds_its_own_part_corrupt(
    pair: Crew, undisturbed: Answers, root: Path
) -> None:
    pair.fit(root=root, saving=EVERY_2, stop_at=9)
    _break_generators(step_path(root, 8), rank=1)
    resumed = pair.fit(root=root, saving=EVERY_2, seed=99)
    assert "step 8 is corrupt, going back to the next older one" in _told(resumed)
    assert [resumed.steps(rank)[0] for rank in (0, 1)] == [6, 6]
    _assert_same_ending(undisturbed, resumed)


def _break_generators(step_dir: Path, *, rank: int) -> None:
    manifest = json.loads((step_dir / f"rank-{rank:05d}.json").read_text())
    places = {row[0]: row[4] for row in manifest["leaves"]}
    with (step_dir / f"shard-{rank:05d}-0.safetensors").open("r+b") as file:
        file.seek(places["ckpt_lightning.rng.torch"] + 100)
        file.write(b"\xff" * 64)


# -- what each of them does ----------------------------------------------------------------------


def test_each_rank_writes_about_half_of_the_bytes(pair: Crew, root: Path) -> None:
    pair.fit(root=root, saving={"every_n_steps": 100}, width=700, trainer={"max_steps": 1})
    sizes = [file.stat().st_size for file in sorted(step_path(root, 1).glob("shard-*"))]
    assert len(sizes) == 2 and min(sizes) > 0.48 * sum(sizes) > 0.48 * 3 * 4 * 700**2


@pytest.mark.parametrize(("impatient", "steps"), [("0", tuple(range(2, 13))), ("1", (12,))])
def test_a_trigger_that_asks_a_clock_saves_what_rank_0_says(
    pair: Crew, root: Path, impatient: str, steps: tuple[int, ...]
) -> None:
    patient = str(1 - int(impatient))
    seconds = {impatient: 1e-6, patient: 1e6}
    mine = {rank: {"saving": {"train_time_interval": s}} for rank, s in seconds.items()}
    answers = pair.fit(root=root, mine=mine)
    assert committed_steps(root)[-len(steps) :] == steps and len(committed_steps(root)) <= 12
    assert not answers.rows[0]["warnings"]


def test_a_metric_that_differs_from_rank_to_rank_ranks_steps_by_that_of_rank_0(
    pair: Crew, root: Path
) -> None:
    answers = pair.fit(root=root, saving={"monitor": "loss", "save_top_k": 1})
    (best,) = answers.rows[0]["best"]
    assert best.startswith(str(root)) and answers.rows[1]["best"] == [best]


@pytest.mark.parametrize("sharded", [False, True])
def test_save_checkpoint_writes_one_step_by_all_ranks(
    pair: Crew, root: Path, tmp_path: Path, sharded: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    task = {"root": root, "saving": {"every_n_steps": 100}, "sharded": sharded, "stop_at": 4}
    for path in (root, elsewhere):
        pair.fit(**task, save_to={"step": 3, "path": str(path)})
    for path in (root, elsewhere):
        assert committed_steps(path) == (3,)
        assert len(list(step_path(path, 3).glob("shard-*"))) == 2
    pair.fit(**{**task, "root": tmp_path / "third"}, ckpt_path=str(elsewhere))
    first, second = load(root), load(elsewhere)
    assert not differences(dict(first["state_dict"]), dict(second["state_dict"]))
    assert not differences(first["optimizer_states"], second["optimizer_states"])


def test_spawned_processes_save_together_and_the_first_one_knows_the_newest_step(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # Lightning would set it and leave it set
    callback = saver(root, **EVERY_2)
    trainer = trainer_of(callback, strategy="ddp_spawn", devices=2, max_epochs=1)
    trainer.fit(Recording(), loader())
    assert committed_steps(root) == (2, 4, 6)
    assert callback.best_model_path == str(step_path(root, 6))


# -- another number of ranks ---------------------------------------------------------------------


def test_four_ranks_go_on_where_two_were(four: Crew, of_two: tuple[Path, Answers]) -> None:
    root, before = of_two
    after = four.fit(root=root, saving=EVERY_2, seed=50)
    _assert_begins_with(after, root, 4)
    text = _told(after)
    assert "a step of 2 ranks is resumed by 4. Weights, optimizers and schedulers" in text
    assert "ranks 2-3, which are those of another rank" in text and "samples may" not in text
    seen = [s for row in before.rows for _, step, ids in row["samples"] if step < 4 for s in ids]
    assert sorted(seen + after.samples(0)) == ALL
    assert sorted(after.samples(1)) == ALL


def test_two_ranks_go_on_where_four_were(pair: Crew, four: Crew, root: Path) -> None:
    before = four.fit(root=root, saving=EVERY_2, stop_at=2)
    after = pair.fit(root=root, saving=EVERY_2, seed=50)
    _assert_begins_with(after, root, 2)
    assert "of ranks 2-3, which are dropped" in _told(after)
    assert sorted(before.samples(0) + after.samples(0)) == ALL
    assert sorted(after.samples(1)) == ALL


def test_loaders_that_cannot_share_the_rest_of_an_epoch_anew_are_told(
    pair: Crew, four: Crew, root: Path
) -> None:
    pair.fit(root=root, saving=EVERY_2, stop_at=3, plain=True)
    after = four.fit(root=root, saving=EVERY_2, seed=50, plain=True)
    _assert_begins_with(after, root, 2)
    assert "samples may be seen twice or not at all" in _told(after)


def test_one_process_goes_on_where_two_were_and_two_where_one_was(pair: Crew, root: Path) -> None:
    before = pair.fit(root=root, saving=EVERY_2, stop_at=4)
    middle, trainer = Recording(stop_at=8), trainer_of(saver(root, **EVERY_2), max_epochs=2)
    with pytest.warns(CheckpointWarning, match="a step of 2 ranks is resumed by 1"):
        _fit_until_it_stops(trainer, middle)
    after = pair.fit(root=root, saving=EVERY_2)
    _assert_begins_with(after, root, 8)
    samples = [*before.samples(0), *[s for _, _, ids in middle.samples for s in ids]]
    assert sorted(samples + after.samples(0)) == ALL
    assert sorted(after.samples(1)) == ALL


def _fit_until_it_stops(trainer: Any, module: Recording) -> None:
    with pytest.raises(Stop):
        trainer.fit(module, loader())


# -- sharded -------------------------------------------------------------------------------------


def test_sharded_ranks_go_on_bit_for_bit(pair: Crew, root: Path, tmp_path: Path) -> None:
    expected = pair.fit(sharded=True)
    pair.fit(sharded=True, root=root, saving=EVERY_2, stop_at=5)
    path = str(step_path(root, 4))
    by_path = pair.fit(sharded=True, root=tmp_path / "other", ckpt_path=path, seed=99)
    _assert_same_ending(expected, by_path)
    resumed = pair.fit(sharded=True, root=root, saving=EVERY_2, seed=99)
    assert resumed.steps()[0] == by_path.steps()[0] == 4
    _assert_same_ending(expected, resumed)


@pytest.mark.parametrize("way", [{}, {"sharded": True}], ids=["whole", "sharded"])
def test_gradients_that_ranks_add_up_by_hand_go_on_with_them(
    pair: Crew, root: Path, way: Any
) -> None:
    expected = pair.fit(by_hand=True, **way)
    pair.fit(by_hand=True, root=root, trainer={"max_epochs": 1}, **way)
    resumed = pair.fit(by_hand=True, root=root, seed=99, **way)
    assert len(resumed.steps()) == 6  # of twelve batches
    _assert_same_ending(expected, resumed)


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="new in Lightning 2.6")
def test_ranks_that_step_by_hand_go_on_with_their_own_buffers_not_with_averages_of_them(
    pair: Crew, root: Path
) -> None:
    expected = pair.fit(by_hand=True, averages=True)
    pair.fit(by_hand=True, averages=True, root=root, saving=EVERY_2, stop_at=2)
    resumed = pair.fit(by_hand=True, averages=True, root=root, seed=99)
    assert resumed.steps()[0] == 2  # the first average is a copy
    _assert_same_ending(expected, resumed)


def test_sharded_ranks_pass_over_a_corrupt_step_together(pair: Crew, root: Path) -> None:
    expected = pair.fit(sharded=True)
    pair.fit(sharded=True, root=root, saving=EVERY_2, stop_at=9)
    _break_generators(step_path(root, 8), rank=1)
    resumed = pair.fit(sharded=True, root=root, saving=EVERY_2, seed=99)
    assert "step 8 is corrupt" in _told(resumed) and resumed.steps()[0] == 6
    _assert_same_ending(expected, resumed)


def test_four_sharded_ranks_and_then_one_process_go_on_where_two_were(
    pair: Crew, four: Crew, root: Path
) -> None:
    pair.fit(sharded=True, root=root, saving=EVERY_2, stop_at=3)
    between = four.fit(sharded=True, root=root, saving=EVERY_2, seed=50, stop_at=4)
    _assert_begins_with(between, root, 2)
    assert "a step of 2 ranks is resumed by 4" in _told(between)
    watch, module = Watch(), Sharded()
    trainer = trainer_of(watch, saver(root, save_last=False), max_steps=5)
    with pytest.warns(CheckpointWarning, match="a step of 4 ranks is resumed by 1"):
        trainer.fit(module, loader())
    saved = load(step_path(root, 4))
    assert not differences(dict(saved["state_dict"]), dict(watch.begin["state_dict"]))
    assert not differences(saved["optimizer_states"], watch.begin["optimizer_states"])
