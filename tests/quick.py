"""What `pytest --quick` leaves out: a framework, ranks, a kill, agents of levels, or what takes very long.

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
    *("far",),  # commands at servers and beside agents: each is a process of its own
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
    *("test_objects_faults.py", "test_scrub*.py", "test_train*.py"),
    *("test_exit.py", "test_interrupts.py", "test_kill*.py", "test_sigterm.py", "test_tune.py"),
    # Dozens of processes, each of which imports torch.
    *("test_doctor*.py", "test_exact_bounds.py", "test_startup.py", "test_watching.py"),
    *("test_deepspeed_settings.py", "test_horovod_frequency.py", "test_suites.py"),
    # Long, and seldom concerned.
    *("test_auto.py", "test_mistakes.py", "test_on_devices.py", "test_tuning_search.py"),
    *("test_forks.py", "test_gpus.py", "test_horovod_wheel.py", "test_model.py", "test_workers.py"),
    *("test_fuzz_*.py", "test_hostile*.py", "test_papers.py"),
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
    *("test_one_process_reads_what_two_ranks_wrote_in_parts",),
    # a process for each kill
    *("test_killed_at_any_operation_the_root_has_the_step_whole_or_not_at_all",),
    # deadlines of seconds, which nothing but waiting can shorten
    *("test_a_silent_rank_is_a_timeout_and_no_hang",),
    *("test_a_save_that_the_watchdog_gives_up_keeps_its_memory_from_the_next",),
    *("test_a_layerwise_save_given_up_by_the_watchdog_gives_its_memory_back",),
}
"""Tests of files whose others are quick."""
_EXAMPLES = 25
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
        left_out = [item for item in items if item.name in SINGLE]
        items[:] = [item for item in items if item.name not in SINGLE]
        config.hook.pytest_deselected(items=left_out)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None leaves the decision to others."""
    return True if config.getoption("--quick") and is_left_out(collection_path) else None


def is_left_out(path: Path) -> bool:
    """Whether these tests are none of the quick ones."""
    inside = path.relative_to(TESTS)
    return not {*inside.parts}.isdisjoint(FOLDERS) or any(map(inside.match, FILES))
