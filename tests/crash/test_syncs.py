"""Every sync of the engine is needed: with any one left out, a power loss breaks a promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.directories import DIRECTORIES
from tests.crash.power import Recorder, broken_promise
from tests.crash.recording import recorded, recorded_restart
from tests.crash.scenarios import SCENARIOS, Scenario

_SHARD = "Committer._write_rank_manifest > ShardFile.sync"
_QUARANTINE = "StepStore._move_suspects > moving"

ALL: dict[str, Scenario] = {**SCENARIOS, **DIRECTORIES}

Case = tuple[str, int | None]
"""A scenario, and after how many renames it is killed and started again (None: it is not)."""

NEEDED: dict[str, Case] = {
    f"{_SHARD} [shard-00000-0.safetensors]": ("first_save", None),
    f"{_SHARD} [shard-00000-1.safetensors]": ("layerwise", None),
    "Committer.commit > Committer._write_rank_manifest [rank-00000.json]": ("first_save", None),
    "Committer.commit > Committer._publish [manifest.json]": ("first_save", None),
    "StepStore._replace > StepStore._publish [attempt]": ("first_save", None),
    f"{_SHARD} [model.pt]": ("files_first", None),
    f"{_SHARD} [optim.pt]": ("files_first", None),
    "Committer.commit > Committer._write_rank_manifest [sub]": ("files_first", None),
    "StepStore._point > Directories.point [pointer]": ("files_next", None),
    "StepStore._point > Directories.point [root]": ("files_next", None),
    "StepStore._publish > Slots.sync [.slots]": ("retire_and_recycle", None),
    "_move > sync_names [.inflight]": ("first_save", None),
    "_move > sync_names [root]": ("first_save", None),
    "_exchange > sync_names [.inflight]": ("replace_by_exchange", None),
    "_exchange > sync_names [root]": ("replace_by_exchange", None),
    "StepStore._settled_trash > sync_names [root]": ("retire_and_recycle", None),
    "ensure_root > _sync_parent [parent]": ("first_save", None),
    "KeptSteps.pin > add_pin [root]": ("pins", None),
    "KeptSteps.pin > add_pin [.pins]": ("pins", None),
    "KeptSteps.unpin > remove_pin [.pins]": ("pins", None),
    f"{_QUARANTINE} [.corrupt]": ("corrupt_newest", None),
    f"{_QUARANTINE} [root]": ("corrupt_newest", None),
    "repair > sync_names [.inflight]": ("replace_by_two_renames", 3),
    "repair > sync_names [root]": ("retire_and_recycle", 5),
    "repair > bring_back [root]": ("replace_by_two_renames", 3),
    "repair > bring_back [.inflight]": ("replace_by_two_renames", 3),
}
NEEDLESS = {
    "StepStore._settled_trash > sync_names [.inflight]": "a retired step may as well be lost",
    "KeptSteps.pin > add_pin [pin]": "the file is empty: its name says it all",
}
"""Syncs whose loss breaks nothing, and why; they cost little and come with a function that others need."""

FAILING = {
    **{"retire_and_recycle": "_move", "replace_by_exchange": "_exchange"},
    **{"files_again": "_exchange", "files_over_others_by_two_renames": "_move"},
}
"""How a scenario gives its first step or directory its name."""

CASES = sorted({*NEEDED.values(), ("replace_by_exchange", 3), ("two_in_flight", None)}, key=str)


def run(case: Case, place: Path, *, skip: str | None = None) -> tuple[Recorder, str]:
    """Record a case, and look for a broken promise if a sync is left out."""
    scenario, after = case
    plan, root = ALL[scenario], place / "disk" / "root"
    root.parent.mkdir(parents=True)
    if after is None:
        recorder = recorded(plan, root, skip=skip)
    else:
        recorder = recorded_restart(plan, root, after=after, skip=skip)
        plan = plan.went_on()
    if skip is None:
        return recorder, ""
    _, problem = broken_promise(recorder.log, root, place, plan, seeds=2)
    return recorder, problem


@pytest.mark.parametrize("site", NEEDED)
def test_a_power_loss_shows_that_this_sync_was_left_out(site: str, tmp_path: Path) -> None:
    _, problem = run(NEEDED[site], tmp_path, skip=site)
    print(f"{site}: {problem}")
    assert problem, f"{site} can be left out and nothing is lost: is it needed?"


def test_every_sync_that_the_engine_does_is_on_one_of_the_lists(tmp_path: Path) -> None:
    found: set[str] = set()
    for number, case in enumerate(CASES):
        recorder, _ = run(case, tmp_path / str(number))
        # A name that begins with a bracket is a sync of the test itself.
        found |= {event.site for event in recorder.log if event.site[:2] not in ("", " [")}
    assert found == {*NEEDED, *NEEDLESS}


@pytest.mark.parametrize("scenario", FAILING)
@pytest.mark.parametrize("where", ["attempt", ".inflight", "root"])
def test_a_power_loss_after_a_publish_that_failed_half_way_loses_nothing(
    where: str, scenario: str, tmp_path: Path
) -> None:
    plan, root = ALL[scenario], tmp_path / "disk" / "root"
    root.parent.mkdir()
    fail = f"{FAILING[scenario]} > sync_names [{where}]"
    if where == "attempt":
        fail = "StepStore._replace > StepStore._publish [attempt]"
    log = recorded(plan, root, fail=fail).log
    assert (
        "StepStore.abandon > sync_names [root]" in {event.site for event in log}
        or where == "attempt"
    )
    _, problem = broken_promise(log, root, tmp_path, plan, seeds=2)
    assert not problem, problem
