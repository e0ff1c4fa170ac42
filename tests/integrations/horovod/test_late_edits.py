"""What is changed after step() and before the end of the iteration is in the checkpoint of that iteration."""

from __future__ import annotations

import pytest

from tests.integrations.horovod.cases import EDITS, MODES
from tests.integrations.horovod.launch import Outcome
from tests.integrations.horovod.test_consistency import check


@pytest.mark.parametrize("name", EDITS)
def test_late_edits_are_saved_exactly(pair: Outcome, name: str) -> None:
    check(pair, f"edit-{name}", EDITS[name].how.get("every", 1))


@pytest.mark.parametrize("edit", ["clamp", "clamp-block", "moments", "second", "twice"])
def test_layers_are_enqueued_at_the_end_after_the_first_edit_and_that_is_said_once(
    pair: Outcome, edit: str
) -> None:
    for found in pair.of(f"edit-{edit}-in_step"):
        assert len(found["warnings"]) == 1
        assert "at the end of the iteration from now on" in found["warnings"][0]


@pytest.mark.parametrize("edit", ["frozen", "ema", "ema-implicit", "skipped"])
def test_edits_of_what_no_step_updates_change_nothing(pair: Outcome, edit: str) -> None:
    for found in pair.of(f"edit-{edit}-in_step"):
        assert found["warnings"] == []


@pytest.mark.parametrize("edit", ["clamp", "second", "frozen", "ema", "twice"])
def test_there_is_nothing_to_say_in_lazy_mode(pair: Outcome, edit: str) -> None:
    for found in pair.of(f"edit-{edit}-lazy"):
        assert found["warnings"] == []


@pytest.mark.parametrize("mode", MODES)
def test_an_iteration_whose_step_was_skipped_counts_inside_a_block(
    pair: Outcome, mode: str
) -> None:
    for found in pair.of(f"edit-skipped-{mode}"):
        assert found["ended"] == 6
