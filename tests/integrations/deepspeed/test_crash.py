"""kill -9 of ranks at every kind of moment: what is there is whole, and the job goes on from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import places
from tests.crash.warm import Warm
from tests.integrations.deepspeed.conftest import Ranks
from tests.integrations.deepspeed.launch import torchrun

pytestmark = pytest.mark.timeout(900)

SIGKILL = 9
STEPS = 6
TOGETHER = {"together": True}
"""As an agent does it: when one rank dies, the others are killed."""

Moment = dict[str, Any]


@dataclass(frozen=True)
class Death:
    """A kill.

    Attributes:
        moments: rank -> where it dies.
        at: step whose save it is.
        kill: by whom else; see `crashing.run_ranks`. None: the other rank lives on.
        least: the step that must be there afterwards; one more may.
        how: more arguments of `crash_jobs.killed`.
    """

    moments: dict[str, Moment] = field(default_factory=dict)
    at: int = 3
    kill: dict[str, Any] | None = field(default_factory=lambda: TOGETHER)
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def zero(self) -> int:
        """Stage of ZeRO."""
        stage: int = self.how.get("zero", 2)
        return stage


def one(rank: int, of: str, n: int = 0, point: str = "before", about: str = "") -> dict[str, Any]:
    """A rank and its moment."""
    return {str(rank): {"of": of, "n": n, "point": point, "about": about}}


ALONE, AGAIN = {"alone": True}, {"tag": "best", "alone": True}
TWICE = {"tag": "best", "exchange": False, "alone": True}
TAG = "global_step3"

PARTS: dict[str, dict[str, Death]] = {
    "while a rank pickles, copies, seals": {
        "rank 0 pickles its first file": Death(one(0, "pickling"), kill=None),
        "rank 0 pickles its second file": Death(one(0, "pickling", 1)),
        "rank 1 pickles": Death(one(1, "pickling"), kill=None),
        "rank 1 pickles, ZeRO 3": Death(one(1, "pickling", 1), how={"zero": 3}),
        "rank 0 copies": Death(one(0, "copying")),
        "rank 1 has copied": Death(one(1, "copying", point="after")),
        "rank 0 seals": Death(one(0, "sealing")),
        "rank 1 has sealed": Death(one(1, "sealing", point="after")),
    },
    "while files are written": {
        "rank 0 makes a file": Death(one(0, "create", 1, "after")),
        "rank 1 tears a write": Death(one(1, "pwrite", 2, "torn")),
        "rank 0 tears a write, ZeRO 3": Death(one(0, "pwrite", 5, "torn"), how={"zero": 3}),
        "rank 1 syncs": Death(one(1, "sync")),
        "both write": Death(one(0, "pwrite", 4, "torn") | one(1, "pwrite", 1, "torn")),
    },
    "around the votes": {
        "rank 1 has not voted": Death(one(1, "voting")),
        "rank 1 has voted": Death(one(1, "voting", point="after"), kill=None),
        "rank 0 has not voted": Death(one(0, "voting"), kill=None),
        "rank 0 has all votes": Death(one(0, "voting", point="after")),
    },
    "around the rename of the tag, and of latest": {
        "before the tag appears": Death(one(0, "rename", about=TAG), how=ALONE),
        "after the tag has appeared": Death(one(0, "rename", 0, "after", TAG), how=ALONE),
        "before latest moves": Death(one(0, "rename", about="/latest"), how=ALONE),
        "after latest has moved": Death(
            one(0, "rename", 0, "after", "/latest"), kill=None, how=ALONE
        ),
        "rank 0 has published": Death(one(0, "settling"), how=ALONE),
        "rank 1 waits for the others": Death(one(1, "settling")),
    },
    "while a tag that exists is replaced": {
        "again: a write of rank 1": Death(one(1, "pwrite", 2, "torn"), how=AGAIN),
        "again: before the exchange": Death(one(0, "exchange"), how=AGAIN),
        "again: after the exchange": Death(one(0, "exchange", 0, "after"), how=AGAIN),
        "again: the old one is deleted": Death(one(0, "unlink", 1, "after"), how=AGAIN),
        "again: latest": Death(one(0, "rename", about="/latest"), how=AGAIN),
        "two renames: before the first": Death(one(0, "rename", about=".replaced"), how=TWICE),
        "two renames: between them": Death(one(0, "rename", 0, "after", ".replaced"), how=TWICE),
        "two renames: after the second": Death(one(0, "rename", 1, "after", "/best"), how=TWICE),
    },
    "in the first save ever": {
        "first: rank 0 pickles": Death(one(0, "pickling"), at=1, kill=None),
        "first: a write of rank 1": Death(one(1, "pwrite", 1, "torn"), at=1),
        "first: the tag is there, latest not": Death(
            one(0, "rename", 0, "after", "global_step1"), at=1
        ),
        "first: before latest appears": Death(one(0, "rename", about="/latest"), at=1),
    },
    "between saves, and at any time": {
        "rank 1 between two saves": Death(one(1, "training"), kill=None),
        "both between two saves": Death(one(0, "training") | one(1, "training"), kill=None),
        **{
            f"at random {number}": Death(
                kill={"after_s": 0.017 * number, "victims": victims, "together": number % 2 == 0}
            )
            for number, victims in enumerate([[0], [1], [0, 1], [1], [0], [0, 1]])
        },
    },
}
DEATHS = {name: death for part in PARTS.values() for name, death in part.items()}

GOES_ON_FROM = {
    "before the tag appears": (2, False),
    "after the tag has appeared": (2, False),
    "after latest has moved": (3, False),
    "again: after the exchange": (3, False),
    "two renames: between them": (2, False),
    "first: rank 0 pickles": (0, False),
    "first: the tag is there, latest not": (1, True),
}
"""The step, and whether there is a warning, where only one step is right. These are tried in every run."""

DRAWN = {
    part: [
        *(name for name in deaths if name in GOES_ON_FROM),
        *places.some([name for name in deaths if name not in GOES_ON_FROM], 2, of=part),
    ]
    for part, deaths in PARTS.items()
}
"""Which of each part are tried in this run."""


@dataclass(frozen=True)
class Left:
    """What a kill left.

    Attributes:
        outcomes: of each rank.
        seen: tags, `latest` and files, before anybody touched them.
    """

    root: Path
    outcomes: list[dict[str, Any]]
    seen: dict[str, Any]


@pytest.fixture(scope="module")
def left(nursery: Warm, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Left]:
    """Every kill of this run, once."""
    place = tmp_path_factory.mktemp("killed")
    names = [name for drawn in DRAWN.values() for name in drawn]
    roots = {name: place / str(number) for number, name in enumerate(names)}
    outcomes = {}
    for name in names:
        death = DEATHS[name]
        outcomes[name] = ranks(
            "crash_jobs.killed",
            kill=death.kill,
            root=str(roots[name]),
            moments=death.moments,
            at=death.at,
            **death.how,
        )
    seen = _looked_at(nursery, list(roots.values()))
    return {name: Left(roots[name], outcomes[name], seen[roots[name]]) for name in names}


def _looked_at(nursery: Warm, roots: list[Path]) -> dict[Path, Any]:
    found = nursery.call(
        "tests.integrations.deepspeed.crash_jobs:looked_at", roots=[str(root) for root in roots]
    )
    return dict(zip(roots, found, strict=True))


@pytest.fixture(scope="module")
def resumed(left: dict[str, Left], ranks: Ranks) -> dict[str, list[dict[str, Any]]]:
    """Every killed job run again, in one launch: what each rank says of it."""
    cases = [
        {"root": str(one.root), "zero": DEATHS[name].zero, "tag": DEATHS[name].how.get("tag")}
        for name, one in left.items()
    ]
    outcomes = ranks("crash_jobs.resumed", cases=cases)
    for outcome in outcomes:
        assert outcome["code"] == 0 and not outcome["problem"], outcome
    by_case = zip(*[outcome["result"] for outcome in outcomes], strict=True)
    return {name: list(found) for name, found in zip(left, by_case, strict=True)}


@pytest.fixture(scope="module")
def ends(ranks: Ranks) -> dict[int, list[str]]:
    """How the job ends on each rank if nothing happens to it, by stage of ZeRO."""
    stages = {death.zero for death in DEATHS.values()}
    return {
        zero: [found["result"] for found in ranks("crash_jobs.undisturbed", zero=zero)]
        for zero in stages
    }


@pytest.mark.parametrize("part", PARTS)
def test_the_victims_die_and_the_others_end_with_an_error(left: dict[str, Left], part: str) -> None:
    for name in DRAWN[part]:
        death, outcomes = DEATHS[name], left[name].outcomes
        victims = set(map(int, death.moments)) or set((death.kill or {})["victims"])
        for rank, outcome in enumerate(outcomes):
            assert "hangs" not in outcome["problem"], (name, outcome)
            if rank in victims:
                assert outcome["signal"] == SIGKILL, (name, outcome)
            elif outcome["signal"] != SIGKILL:
                assert outcome["code"] == 1 and outcome["problem"], (name, outcome)


@pytest.mark.parametrize("part", PARTS)
def test_latest_names_a_whole_tag_and_all_that_is_there_is_whole(
    left: dict[str, Left], part: str
) -> None:
    for name in DRAWN[part]:
        _check_whole(name, left[name].seen)


def _check_whole(name: str, seen: dict[str, Any]) -> None:
    assert all(seen["whole"].values()), (name, seen)
    told = max(seen["told"], default=0)
    if name == "two renames: between them":
        # The name is free for a moment; loading brings back what had it (see below).
        assert seen["latest"] == "best" and not seen["whole"]
        return
    if seen["latest"] is None:
        assert not told, (name, seen)
        return
    assert seen["latest"] in seen["whole"], (name, seen)
    # What torch.load makes of the files: all of one step, and of none that is older than a rank was told.
    (step,) = set(seen["steps"])
    assert step >= told, (name, seen)
    assert "tag" in DEATHS[name].how or seen["latest"] == f"global_step{step}"


@pytest.mark.parametrize("part", PARTS)
def test_the_job_goes_on_from_there_and_ends_with_the_bits_of_an_undisturbed_one(
    left: dict[str, Left],
    resumed: dict[str, list[dict[str, Any]]],
    ends: dict[int, list[str]],
    part: str,
) -> None:
    for name in DRAWN[part]:
        seen = left[name].seen
        for rank, found in enumerate(resumed[name]):
            assert found["end"] == ends[DEATHS[name].zero][rank], name
            assert found["right"], f"{name}: the files of one tag are of several steps"
            assert found["begin"] >= max([*seen["told"], *seen["steps"]], default=0), name
            assert not found["left"], f"{name}: leftovers of the killed job"
            expected = DEATHS[name].how.get("tag", f"global_step{STEPS}")
            assert found["latest"] == expected, name
        assert len({found["begin"] for found in resumed[name]}) == 1, name


@pytest.mark.parametrize("name", GOES_ON_FROM)
def test_it_goes_on_from_the_step_that_was_saved_last(
    resumed: dict[str, list[dict[str, Any]]], name: str
) -> None:
    begin, warns = GOES_ON_FROM[name]
    for rank, found in enumerate(resumed[name]):
        assert found["begin"] == begin
        assert bool(found["told"]) == (warns and rank == 0), found["told"]


# -- under an agent, and the ends of real processes ------------------------------------------------


def _torchrun(call: str, **arguments: Any) -> tuple[int, str]:
    program = ["-m", "tests.integrations.deepspeed.crashing", call, json.dumps(arguments)]
    return torchrun(program, ranks=2, limit_s=120)


def test_under_torchrun_the_death_of_one_rank_ends_the_job_and_leaves_whole_tags(
    nursery: Warm, ranks: Ranks, ends: dict[int, list[str]], tmp_path: Path
) -> None:
    root = tmp_path / "ckpts"
    code, output = _torchrun(
        "crash_jobs.killed", root=str(root), moments=one(1, "pwrite", 2, "torn"), at=3
    )
    assert code == 1 and "SIGKILL" in output, output
    seen = _looked_at(nursery, [root])[root]
    assert seen["latest"] in seen["whole"] and all(seen["whole"].values()), seen
    cases = [{"root": str(root), "zero": 2, "tag": None}]
    for rank, outcome in enumerate(ranks("crash_jobs.resumed", cases=cases)):
        assert outcome["result"][0]["end"] == ends[2][rank], outcome


def test_a_program_that_ends_right_after_its_last_save_has_it(
    nursery: Warm, tmp_path: Path
) -> None:
    root = tmp_path / "ckpts"
    code, output = _torchrun("failing_jobs.ending", root=str(root), how="sys.exit")
    assert "exitcode" in output and code == 1, output  # what torchrun makes of sys.exit(3)
    seen = _looked_at(nursery, [root])[root]
    assert seen["latest"] == "global_step3" and seen["steps"] == [3]
    shutil.rmtree(root)


@pytest.mark.parametrize(
    ("how", "code"),
    [("return", 0), ("sys.exit", 3), ("destroy_process_group", 0), ("engine.destroy", 0)],
)
def test_saves_in_flight_are_finished_at_the_end_of_a_child_of_multiprocessing(
    nursery: Warm, ranks: Ranks, tmp_path: Path, how: str, code: int
) -> None:
    root = tmp_path / "ckpts"
    for outcome in ranks("failing_jobs.ending", root=str(root), how=how):
        assert outcome["code"] == code and not outcome["problem"], outcome
        if how == "engine.destroy":
            assert outcome["result"] == "global_step3", (
                "destroy() returned before the tag was there"
            )
    seen = _looked_at(nursery, [root])[root]
    assert seen["latest"] == "global_step3" and len(seen["whole"]) == 3
    assert all(seen["whole"].values())


def test_a_process_that_ends_at_once_leaves_whole_tags(
    nursery: Warm, ranks: Ranks, tmp_path: Path
) -> None:
    root = tmp_path / "ckpts"
    ranks("failing_jobs.ending", root=str(root), how="os._exit")
    seen = _looked_at(nursery, [root])[root]
    assert all(seen["whole"].values())
    assert seen["latest"] is None or seen["latest"] in seen["whole"]
