"""What `pytest --quick` leaves out: frameworks, ranks, kills, agents, servers, late devices, what takes long.

`nox -s quick` runs the rest, and draws fewer examples where a test draws any. Mostly whole files, so that
nothing of what is left out is even imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

from tests import places

TESTS = Path(__file__).parent

FOLDERS = (
    *("crash", "deepspeed", "examples", "horovod", "interrupts", "lightning", "multirank"),
    "transformers",
    *("faults",),  # whole jobs on disks that fail or hang; many of them end at a deadline
    *("far", "serving"),  # servers, and commands at them and beside agents: processes of their own
    *("devices",),  # that are late: what they are to show takes time
)
FILES = (
    *("test_*_suite.py", "test_quick_run.py"),  # benchmarks, in processes of their own
    *("test_*ranks*.py", "test_broadcast.py", "test_distributed.py", "test_processes.py"),
    # Ranks as threads of one process.
    *("test_agreement.py", "test_auto_engine.py", "test_elastic.py"),
    *("test_beside_a_writer.py",),  # a job that saves as often as it can
    # Agents of levels, and errands: processes that are killed, or waited for until they end by themselves.
    *("test_agent*.py", "test_azure.py", "test_bringing*.py", "test_by_hand.py", "test_peer*.py"),
    *("test_claiming.py", "test_errands.py", "test_hosting.py", "test_named_*.py"),
    *("test_objects*.py", "test_scrub*.py", "test_train*.py"),
    *(
        "test_agreed*.py",
        "test_leftovers.py",
        "test_resuming.py",
        "test_carrying.py",
        "test_rebuilding.py",
        "test_receiving.py",
    ),
    *("test_sent_before.py", "test_listing_parity.py", "levels/test_pins.py"),
    *("test_exit.py", "test_interrupts.py", "test_kill*.py", "test_sigterm.py", "test_tune.py"),
    # Dozens of processes, each of which imports torch.
    *("test_doctor*.py", "test_exact_bounds.py", "test_startup.py", "test_watching.py"),
    *("test_deepspeed_settings.py", "test_horovod_frequency.py", "test_suites.py"),
    *("test_spot.py",),  # runs that are killed with their agent
    # Other processes, or filesystems that are mounted.
    *("test_kept_mappings.py", "test_lock.py", "test_warm_deepspeed.py", "store/test_crash.py"),
    *("engine/test_threads.py", "restore/test_cut_short.py"),
    # Long, and seldom concerned.
    *("test_collector.py", "test_compiled.py"),
    *("test_auto.py", "test_mistakes.py", "test_on_devices.py", "test_tuning_search.py"),
    *("test_forks.py", "test_gpus.py", "test_horovod_wheel.py", "test_model.py", "test_workers.py"),
    *("test_figures.py", "test_fuzz_*.py", "test_hostile*.py", "test_papers.py"),
)
SINGLE = {
    # torch's compiler, whose import takes longer than any test
    *("test_a_compiled_step_waits_as_well", "test_a_wrapped_module_comes_back[compiled]"),
    # ranks
    *(
        "test_what_three_ranks_saved_is_whole_for_everybody",
        "test_of_several_ranks_the_first_one_tells",
    ),
    *("test_two_ranks_take_their_own_runs_or_boxes_of_it",),
    *("test_one_process_reads_what_two_ranks_wrote_in_parts", "test_damage_in_a_run_is_found"),
    # a process for each kill
    *("test_killed_at_any_operation_the_root_has_the_step_whole_or_not_at_all",),
    # another process
    *("test_every_process_comes_to_the_same_plan",),
    *(
        "test_it_goes_on_bit_for_bit_after_every_batch[persistent workers]",
        "test_it_goes_on_bit_for_bit_after_every_batch[two workers]",
        "test_the_order_goes_on_after_every_batch[2]",
        "test_the_example_about_data_resumes_at_the_end_of_its_run",
    ),
    *(
        "test_the_page_names_every_json_field",
        "test_the_readmes_table_is_of_the_run_that_its_picture_is_of",
    ),
    *(
        "test_a_file_that_cannot_grow_is_one_clear_line",
        "test_a_process_that_may_add_no_code_saves_all_the_same",
        "test_a_directory_is_read_without_anything_of_levels",
        "test_what_this_torch_has_no_dtype_for_is_not_called_damaged",
        "test_every_acknowledged_pin_is_kept_beside_a_job_that_saves",
    ),
    *(
        "test_a_narrow_terminal_loses_nothing",
        "test_a_terminal_without_unicode_gets_ascii",
        "test_piped_output_is_plain_and_its_lines_are_whole",
        "test_progress_is_drawn_on_a_terminal_beside_the_answer",
        "test_on_a_terminal_there_is_a_bar_after_a_second",
        "test_where_nothing_can_be_shown_the_work_goes_on",
    ),
    *(
        "test_looking_works_without_torch",
        "test_it_runs_without_torch",
        "test_it_works_without_torch",
        "test_python_dash_m_is_the_same_command",
        "test_a_reader_that_goes_away_is_no_crash",
    ),
    *(
        "test_a_live_writer_is_named_and_nothing_is_removed",
        "test_on_a_terminal_it_asks",
        "test_a_pin_needs_no_lock",
        "test_nothing_is_removed_unless_somebody_says_yes",
    ),
    # a second or more of the processor, for what seldom changes
    *(
        "test_a_fetch_that_is_interrupted_anywhere_leaves_the_generators_of_training_as_they_were",
        "test_a_header_above_the_limit_of_safetensors_is_refused",
        "test_every_byte_of_every_leaf_is_looked_at_within_the_round_that_is_promised",
        "test_flatten_is_fast",
        "test_ten_thousand_small_leaves_come_back",
        "test_the_picture_is_drawn_from_the_json_alone",
        "test_threads_take_turns_and_never_hold_it_together",
        "test_what_does_not_change_is_never_reported",
    ),
    # deadlines of seconds, which nothing but waiting can shorten
    *("test_a_silent_rank_is_a_timeout_and_no_hang",),
    *("test_a_save_that_the_watchdog_gives_up_keeps_its_memory_from_the_next",),
    *("test_a_layerwise_save_given_up_by_the_watchdog_gives_its_memory_back",),
}
"""Tests of files whose others are quick; without brackets, with all of their parameters."""
_EXAMPLES = 15
_is_quick = False

T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="without frameworks, ranks and kills")


def configure(config: pytest.Config) -> None:
    """Before any file of tests is imported."""
    global _is_quick
    _is_quick = config.getoption("--quick")
    if _is_quick:
        hypothesis.settings.register_profile("quick", hypothesis.settings(), max_examples=_EXAMPLES)
        hypothesis.settings.load_profile("quick")


def drawn(examples: int) -> int:
    """How many examples a test draws that would draw so many: fewer in a quick run."""
    return min(examples, _EXAMPLES) if _is_quick else examples


def few(cases: Sequence[T], most: int, *, of: str) -> list[T]:
    """All of these, or so many in a quick run, each run another part of them."""
    return places.some(cases, most, of=of) if _is_quick else list(cases)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out single tests of files that stay."""
    if config.getoption("--quick"):
        left_out = [item for item in items if _is_single(item.name)]
        items[:] = [item for item in items if not _is_single(item.name)]
        config.hook.pytest_deselected(items=left_out)


def _is_single(name: str) -> bool:
    return not SINGLE.isdisjoint([name, name.partition("[")[0]])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None leaves the decision to others."""
    return True if config.getoption("--quick") and is_left_out(collection_path) else None


def is_left_out(path: Path) -> bool:
    """Whether these tests are none of the quick ones."""
    inside = path.relative_to(TESTS)
    return not {*inside.parts}.isdisjoint(FOLDERS) or any(map(inside.match, FILES))
