"""All ranks restore the same step, or fail together; no rank waits for one that has given up."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core.errors import (
    CoordinationTimeout,
    UnknownFormat,
    UntrustedData,
)
from ckpt_core.layout import MANIFEST_NAME, RankManifest
from ckpt_core.system.files import Files
from tests.restore.harness import FailingReads, assert_same, flip, zeros_like
from tests.restore.ranks import (
    Crew,
    Job,
    Ranks,
    restored,
    write_ranks,
)
from tests.restore.test_corruption import Custom, _reformat

STEPS = (10, 20, 30)


def job(step: int = 0, world: int = 3, **changes: Any) -> Job:
    generator = torch.Generator().manual_seed(step)
    replicated = {"weight": torch.randn(500, 300, generator=generator), "step": step}
    own = {"rng": torch.arange(5000) + step}  # ten pages: some hold nothing else
    settings: dict[str, Any] = {"replicated": replicated, "private": lambda rank: own}
    return Job(world, **(settings | changes))


def live(world: int = 3) -> list[Any]:
    return [zeros_like(job().state(rank)) for rank in range(world)]


@pytest.fixture
def steps(root: Path) -> dict[int, Path]:
    return {step: write_ranks(root, step, job(step)) for step in STEPS}


def shard_of(path: Path, rank: int) -> Path:
    return path / f"shard-{rank:05d}-0.safetensors"


def error_types(results: list[Any]) -> list[str]:
    return [type(result).__name__ for result in results]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_corruption_in_the_share_of_one_rank_makes_all_fall_back_together(
    root: Path, steps: dict[int, Path], world: int
) -> None:
    flip(shard_of(steps[30], 1), 9000)
    lives = live(world)
    outcomes = Ranks([root] * world).restore(lives)
    assert outcomes.steps() == [20] * world
    for one in lives:
        assert_same(one["shared"]["weight"], job(20).state(0)["shared"]["weight"])
    texts = [text for text in outcomes.texts if "step 30 was not restored" in text]
    assert len(texts) == world
    assert all("shard-00001" in text for text in texts)
    assert outcomes.witnesses[0].suspects == [30]
    assert all(not witness.suspects for witness in outcomes.witnesses[1:])
    assert all(not witness.protected for witness in outcomes.witnesses)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_private_leaf_that_only_one_rank_reads_makes_all_fall_back(
    root: Path, steps: dict[int, Path], rank: int
) -> None:
    entry = RankManifest.decode((steps[30] / f"rank-{rank:05d}.json").read_bytes(), path=root)
    flip(shard_of(steps[30], rank), entry.leaves[0].offset + 20_000)
    lives = live()
    outcomes = Ranks([root] * 3).restore(lives)
    assert outcomes.steps() == [20] * 3
    assert all(f"rank {rank}: " in text and "own.rng" in text for text in outcomes.texts)
    assert len(outcomes.texts) == 3
    assert outcomes.witnesses[0].suspects == [30]
    assert [step for step, _ in restored(outcomes, 0).skipped] == [30]


def test_a_rank_that_is_refused_a_read_makes_all_fall_back_and_nothing_is_suspect(
    root: Path, steps: dict[int, Path]
) -> None:
    files = {1: FailingReads(f"{steps[30].name}/shard", errno.EIO)}
    outcomes = Ranks([root] * 3, files=files).restore(live())
    assert outcomes.steps() == [20] * 3
    assert all("rank 1: " in text and "cannot be read" in text for text in outcomes.texts)
    assert all(not witness.suspects for witness in outcomes.witnesses)


def test_objects_load_only_what_all_ranks_have_agreed_on(root: Path) -> None:
    class Loads:
        def __init__(self, value: int = 0) -> None:
            self.loaded: list[int] = []
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded.append(state["value"])

    for step in (10, 20):
        own = {"rng": torch.arange(5000)}
        write_ranks(
            root,
            step,
            job(step, private=lambda rank, own=own, step=step: {**own, "data": Loads(step)}),
        )
    path = root / "step-000000000020"
    entry = RankManifest.decode((path / "rank-00002.json").read_bytes(), path=root)
    flip(shard_of(path, 2), entry.leaves[0].offset + 20_000)
    lives = live()
    for one in lives:
        one["own"]["data"] = Loads()
    assert Ranks([root] * 3).restore(lives).steps() == [10] * 3
    assert [one["own"]["data"].loaded for one in lives] == [[10]] * 3


@pytest.mark.parametrize("options", [{"strict": True}, {"step": 30}])
def test_where_falling_back_is_forbidden_all_raise_what_one_has_found(
    root: Path, steps: dict[int, Path], options: dict[str, Any]
) -> None:
    entry = RankManifest.decode((steps[30] / "rank-00001.json").read_bytes(), path=root)
    flip(shard_of(steps[30], 1), entry.leaves[0].offset + 20_000)
    outcomes = Ranks([root] * 3).restore(live(), **options)
    assert error_types(outcomes.results) == ["CorruptCheckpoint"] * 3
    assert outcomes.results[1].path == shard_of(steps[30], 1)
    assert outcomes.results[2].rank == 1
    assert "rank 1: " in str(outcomes.results[2])
    assert "Live tensors were overwritten" in outcomes.results[2].__notes__[0]


def _narrow(state: Any) -> Any:
    state["shared"]["weight"] = torch.zeros(1)
    return state


@pytest.mark.parametrize("guilty", [0, 2])
def test_a_state_that_does_not_fit_on_one_rank_is_raised_on_all_before_anything_changes(
    root: Path, steps: dict[int, Path], guilty: int
) -> None:
    lives = live()
    _narrow(lives[guilty])
    outcomes = Ranks([root] * 3).restore(lives)
    expected = ["RestoreError"] * 3
    expected[guilty] = "StateMismatch"
    assert error_types(outcomes.results) == expected
    other = outcomes.results[1]
    assert f"rank {guilty}: " in str(other)
    assert other.rank == guilty


def test_a_newer_format_is_raised_on_all_ranks(root: Path, steps: dict[int, Path]) -> None:
    _reformat(steps[30] / MANIFEST_NAME)
    outcomes = Ranks([root] * 3).restore(live())
    assert error_types(outcomes.results) == [UnknownFormat.__name__] * 3


def test_untrusted_data_on_one_rank_is_raised_on_all(root: Path) -> None:
    def own(rank: int) -> Any:
        return {"object": Custom() if rank == 1 else 3}

    write_ranks(root, 10, job(private=own))
    lives = live()
    for one in lives:
        one["own"] = {"object": None}
    outcomes = Ranks([root] * 3).restore(lives)
    expected = ["RestoreError", UntrustedData.__name__, "RestoreError"]
    assert error_types(outcomes.results) == expected
    assert not lives[1]["shared"]["weight"].any()
    assert "Live tensors were overwritten" in outcomes.results[0].__notes__[0]
    assert Ranks([root] * 3).restore(lives, trusted=True).steps() == [10] * 3


def test_an_unforeseen_error_on_one_rank_reaches_the_others(
    root: Path, steps: dict[int, Path]
) -> None:
    class Exploding(FailingReads):
        def preadv(self, *args: Any) -> int:
            raise ZeroDivisionError("boom")

    outcomes = Ranks([root] * 3, files={2: Exploding("x")}).restore(live())
    assert error_types(outcomes.results) == ["RestoreError", "RestoreError", "ZeroDivisionError"]
    assert "rank 2: ZeroDivisionError: boom" in str(outcomes.results[0])


def test_an_object_that_refuses_its_state_on_one_rank_is_raised_on_all(root: Path) -> None:
    class Picky:
        refuses = False

        def state_dict(self) -> dict[str, Any]:
            return {"value": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.refuses:
                raise ValueError("not like this")

    write_ranks(root, 10, job(private=lambda rank: {"data": Picky()}))
    lives = live()
    for one in lives:
        one["own"] = {"data": Picky()}
    lives[1]["own"]["data"].refuses = True
    outcomes = Ranks([root] * 3).restore(lives)
    assert error_types(outcomes.results) == ["RestoreError"] * 3
    assert "rank 1: own.data" in str(outcomes.results[2])


def test_a_silent_rank_is_a_timeout_and_no_hang(root: Path, steps: dict[int, Path]) -> None:
    crew = Crew(2)
    from ckpt_core.restore import Restorer
    from ckpt_core.system.files import Files

    alone = Restorer(
        root,
        files=Files(),
        readers=1,
        timeout_s=3.0,  # its own reading has to be done by then, on a busy machine too
        coordination=crew.member(0),  # type: ignore[arg-type]
    )
    with pytest.raises(CoordinationTimeout, match=r"\[1\] are silent"):
        alone.restore(live()[0])


def test_ranks_that_are_asked_for_different_steps_all_say_so(
    root: Path, steps: dict[int, Path]
) -> None:
    outcomes = Ranks([root] * 3).restore(live(), each={1: {"step": 20}})
    assert error_types(outcomes.results) == ["RestoreError"] * 3
    assert "different steps: 20, the newest" in str(outcomes.results[0])


def test_roots_without_steps_give_none_on_all_ranks(root: Path) -> None:
    assert Ranks([root] * 3).restore(live()).results == [None] * 3


def test_a_manifest_that_no_rank_can_read_is_passed_over_with_the_reason(
    root: Path, steps: dict[int, Path]
) -> None:
    flip(steps[30] / MANIFEST_NAME, 30)
    outcomes = Ranks([root] * 2).restore(live(2))
    assert outcomes.steps() == [20, 20]
    first = outcomes.texts[0]
    assert "step 30 was not restored" in first
    assert "rank 0 cannot read it" in first
    assert outcomes.witnesses[0].suspects == [30]


class LateNames(Files):
    """The client of a network filesystem that shows a file of another host only at the n-th look."""

    def __init__(self, part: str, looks: int) -> None:
        self._part, self._left = part, looks

    def open_read(self, path: Path, *args: Any, **settings: Any) -> int:
        if self._part in str(path) and self._left > 0:
            self._left -= 1
            raise FileNotFoundError(errno.ENOENT, "not shown yet", str(path))
        return super().open_read(path, *args, **settings)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_sees_the_newest_step_of_a_shared_root_late_looks_again(
    root: Path, steps: dict[int, Path], late: int
) -> None:
    files = {late: LateNames(f"{steps[30].name}/{MANIFEST_NAME}", 3)}
    outcomes = Ranks([root] * 3, files=files).restore(live())
    assert outcomes.steps() == [30] * 3
    assert not outcomes.texts
    assert all(not witness.suspects for witness in outcomes.witnesses)


@pytest.mark.parametrize("files", [LateNames("30/manifest", 10**9), FailingReads("30/manifest")])
def test_a_step_that_one_rank_never_sees_is_passed_over_and_not_suspect(
    root: Path, steps: dict[int, Path], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.restore.choosing.SEEN_WITHIN_S", 0.1)
    outcomes = Ranks([root] * 3, files={1: files}).restore(live())
    assert outcomes.steps() == [20] * 3
    assert all("step 30 was not restored" in text for text in outcomes.texts)
    assert all(not witness.suspects for witness in outcomes.witnesses)


def test_when_every_step_is_corrupt_no_rank_starts_from_scratch(
    root: Path, steps: dict[int, Path]
) -> None:
    for path in steps.values():
        flip(shard_of(path, 1), 9000)
    outcomes = Ranks([root] * 2).restore(live(2))
    assert error_types(outcomes.results) == ["CorruptCheckpoint"] * 2
    text = str(outcomes.results[0])
    assert all(f"step {step}: rank " in text for step in STEPS)
    assert "node of rank 0 (ranks 0-1): holds 30, 20, 10" in text
