"""A rank is killed: what is there is whole, and the job goes on from it, with any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_core import committed_steps, verify
from ckpt_core.restore import RestoreWarning
from tests import places
from tests.integrations.horovod.cases import MODES
from tests.integrations.horovod.jobs_crash import DYING, ITERATIONS, plain_restore
from tests.integrations.horovod.launch import Job, Outcome, launch

DEATHS: dict[str, dict[str, Any]] = {
    "a write of rank 1, lazy": {
        "mode": "lazy",
        "victim": 1,
        "moment": {"n": 9, "names": ["pwrite"]},
    },
    "a torn write of rank 0, in step": {
        "mode": "in_step",
        "victim": 0,
        "moment": {"n": 4, "point": "torn", "names": ["pwrite"]},
    },
    "the commit of rank 0, lazy": {
        "mode": "lazy",
        "victim": 0,
        "moment": {"n": 0, "names": ["rename", "exchange"]},
    },
    "a step of rank 1, in step": {"mode": "in_step", "victim": 1, "moment": None},
    "a step of rank 0, lazy": {"mode": "lazy", "victim": 0, "moment": None},
}

DRAWN = {name: DEATHS[name] for name in places.some(list(DEATHS), 3, of="horovod")}
"""Those of this run."""


@pytest.fixture(scope="session")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """One launch for each death of this run."""
    found = {}
    for number, (name, how) in enumerate(DRAWN.items()):
        folder = tmp_path_factory.mktemp(f"death{number}")
        jobs = [Job("killed", "jobs_crash:killed", {"root": str(folder / "root"), **how})]
        found[name] = launch(jobs, ranks=2, folder=folder, limit_s=90)
    return found


@pytest.fixture(scope="session")
def found_whole(deaths: dict[str, Outcome]) -> dict[str, tuple[int, ...]]:
    """The steps that each death left, all of them whole; before anybody touches the roots again."""
    steps = {}
    for name, outcome in deaths.items():
        root = outcome.folder / "root"
        assert verify(root).ok, name
        steps[name] = committed_steps(root)
    return steps


@pytest.fixture(scope="session")
def again(
    deaths: dict[str, Outcome],
    found_whole: dict[str, tuple[int, ...]],
    trio: Outcome,
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcome:
    """Every killed job run again; and what three ranks saved, restored by two."""
    folder = tmp_path_factory.mktemp("again")
    jobs = [Job("undisturbed", "jobs_crash:undisturbed")]
    for number, (name, outcome) in enumerate(deaths.items()):
        arguments = {"root": str(outcome.folder / "root"), "mode": DRAWN[name]["mode"]}
        jobs.append(
            Job(f"resumed{number}", "jobs_crash:resumed", {**arguments, "name": str(number)})
        )
    jobs.append(_restoring(trio, "save-three"))
    return launch(jobs, ranks=2, folder=folder)


@pytest.fixture(scope="session")
def alone(
    pair: Outcome, trio: Outcome, again: Outcome, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    """What several ranks saved, restored by one."""
    folder = tmp_path_factory.mktemp("alone")
    jobs = [_restoring(pair, f"save-{mode}") for mode in MODES] + [_restoring(trio, "save-three")]
    return launch(jobs, ranks=1, folder=folder)


def _restoring(outcome: Outcome, name: str) -> Job:
    root = str(outcome.folder / f"{name}.root")
    return Job(f"restore-{name}", "jobs_crash:restore", {"root": root, "name": name})


def test_the_survivor_is_told_by_horovods_error_and_does_not_hang(
    deaths: dict[str, Outcome],
) -> None:
    for name, outcome in deaths.items():
        victim = DRAWN[name]["victim"]
        assert outcome.of_rank("killed", victim) is None, f"{name}: the victim lives"
        survivor = outcome.of_rank("killed", 1 - victim)
        assert survivor is not None, (name, outcome.output[-3000:])
        assert not survivor["problem"], (name, survivor["problem"])
        # Horovod tells whoever asks first: a gradient that is ready, or the step that waits for it.
        told = ["step"] if DRAWN[name]["moment"] is None else ["step", "backward"]
        assert survivor["result"]["where"] in told, name
        assert not outcome.hung, name


def test_only_whole_steps_are_there(found_whole: dict[str, tuple[int, ...]]) -> None:
    for name, steps in found_whole.items():
        assert steps, name
        assert steps == tuple(range(1, steps[-1] + 1)), name
        # The victim died in the fourth iteration, or while that or the one before was written.
        assert DYING - 3 <= steps[-1] <= DYING, name


def test_the_job_goes_on_and_ends_with_the_bits_of_one_that_nothing_happened_to(
    again: Outcome, found_whole: dict[str, tuple[int, ...]]
) -> None:
    for number, (name, steps) in enumerate(found_whole.items()):
        for whole, found in zip(again.of("undisturbed"), again.of(f"resumed{number}"), strict=True):
            assert found["step"] >= steps[-1], name
            assert found["digests"] == whole[found["step"] :], name
            assert len(found["digests"]) == ITERATIONS - found["step"] > 0, name


@pytest.mark.parametrize("mode", MODES)
def test_three_ranks_go_on_from_what_two_saved(pair: Outcome, trio: Outcome, mode: str) -> None:
    check(pair.of(f"save-{mode}"), trio.of(f"restore-save-{mode}"))


def test_two_ranks_go_on_from_what_three_saved(trio: Outcome, again: Outcome) -> None:
    check(trio.of("save-three"), again.of("restore-save-three"))


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_goes_on_from_what_two_saved(pair: Outcome, alone: Outcome, mode: str) -> None:
    check(pair.of(f"save-{mode}"), alone.of(f"restore-save-{mode}"))


def test_one_rank_goes_on_from_what_three_saved(trio: Outcome, alone: Outcome) -> None:
    check(trio.of("save-three"), alone.of("restore-save-three"))


def check(saved: list[Any], restored: list[Any]) -> None:
    """Equal on all ranks after the restore, equal to what was saved; and after one more step."""
    assert len({found["after"] for found in restored}) == 1
    for found in restored:
        assert found["step"] == 3
        assert found["ranks"] == len(saved)
        assert {found["shared"]} == {rank["shared"] for rank in saved}
        assert found["buffers"] == saved[0]["buffers"]
        assert found["after"] != found["shared"]


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_training_without_horovod_takes_the_checkpoint(
    pair: Outcome, alone: Outcome, trio: Outcome, mode: str
) -> None:
    saved = pair.of(f"save-{mode}")
    # Those that write to the root have to be through.
    assert alone.of(f"restore-save-{mode}") and trio.of(f"restore-save-{mode}")
    with pytest.warns(RestoreWarning, match="private values of 1 rank"):
        found = plain_restore(str(pair.folder / f"save-{mode}.root"))
    assert found == {"shared": saved[0]["shared"], "buffers": saved[0]["buffers"]}
