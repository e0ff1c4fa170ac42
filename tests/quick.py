"""What `pytest --quick` leaves out: a framework, ranks, a kill, agents of levels, or what takes very long.

`nox -s quick` runs the rest, and draws fewer examples where a test draws any. Whole files, so that nothing
of what is left out is even imported.
"""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

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
    *("test_agent*.py", "test_azure.py", "test_bringing*.py", "test_by_hand.py", "test_peer.py"),
    *("test_named_carrying.py", "test_named_kills.py", "test_train*.py"),
    *("test_exit.py", "test_interrupts.py", "test_kill*.py", "test_sigterm.py", "test_tune.py"),
    # Long, and seldom concerned.
    *("test_gpus.py", "test_horovod_wheel.py", "test_model.py", "test_workers.py"),
    *("test_fuzz_*.py", "test_hostile*.py", "test_papers.py"),
)
_EXAMPLES = 25


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="without frameworks, ranks and kills")


def configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        hypothesis.settings.register_profile("quick", hypothesis.settings(), max_examples=_EXAMPLES)
        hypothesis.settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None leaves the decision to others."""
    return True if config.getoption("--quick") and is_left_out(collection_path) else None


def is_left_out(path: Path) -> bool:
    """Whether these tests are none of the quick ones."""
    inside = path.relative_to(TESTS)
    return not {*inside.parts}.isdisjoint(FOLDERS) or any(map(inside.match, FILES))
