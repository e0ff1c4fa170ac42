"""Settings that every test shares."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import gpus, places, quick
from tests.levels.servers.shared import azurite, google, moto, peer
from tests.quick import pytest_addoption, pytest_collection_modifyitems, pytest_ignore_collect
from tests.seconds import (
    pytest_runtest_logstart,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from tests.workers import pytest_xdist_make_scheduler

__all__ = [
    "azurite",
    "google",
    "moto",
    "peer",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_runtest_logstart",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
    "root",
    "seeded",
]

# torch looks up the name of every peer of its store, for its log. Where no name server answers, each of
# these takes five seconds. Read when a process first resolves a name, and inherited by those that we start.
os.environ["RES_OPTIONS"] = "attempts:0"

# DeepSpeed's extensions are compiled for the files of one environment: two that shared them would compile
# them in turns, in the middle of a test. As in .ci/warm_deepspeed.py.
if sys.prefix != sys.base_prefix:
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))

# Drawn here, before there are processes that inherit it.
places.run_number()

# A run starts hundreds of processes that import the same files: they are compiled once, whatever the shell
# says of it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts a run in the background has it ignore Ctrl-C, and so would every process that it starts:
# many tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where they find this tree, and behind it what the shell says.
_TOP = Path(__file__).parents[1]
_OURS = [str(_TOP / "tests" / "startup"), str(_TOP), str(_TOP / "integrations")]
_GIVEN = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*_OURS, *_GIVEN]))

# Ranks share a pipe: a line is written in one piece.
os.environ.pop("PYTHONUNBUFFERED", None)

# A worker of several (`-n`) has them set, by readline; what is written to a pipe has no width.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Two cores serve the tests: more threads would only add noise to the timings that tests rely on, here and in
# processes that we start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# A shared machine stalls for seconds now and then; a deadline per example would fail at random.
hypothesis.settings.register_profile(
    "ci", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Before any file of tests is imported."""
    gpus.hide_gpus(config)
    quick.configure(config)


def pytest_collection_finish() -> None:
    """What was collected and imported is no garbage: nobody need look through it with each test that asks."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of a test."""
    gpus.skip_without_gpu(item)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Where this run strikes, and on what."""
    return [places.header(), gpus.header(config)]


_ENDS_WITHIN_S = 60.0


def _engine_threads() -> set[threading.Thread]:
    # The one for SIGTERM is the process's: it stays while a later handler may still call ours.
    ours = (item for item in threading.enumerate() if item.name.startswith("ckpt-"))
    return {thread for thread in ours if thread.name != "ckpt-sigterm"}


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A file of tests that leaves an engine thread alive, or gradients off, fails, not one after it."""
    before = _engine_threads()
    yield
    assert torch.is_grad_enabled(), "gradients were left off"
    until = time.monotonic() + _ENDS_WITHIN_S
    while left := _engine_threads() - before:
        if time.monotonic() > until:
            pytest.fail(f"threads are left: {sorted(thread.name for thread in left)}")
        time.sleep(0.01)


def _of_the_process() -> dict[str, object]:
    """What a test changes for all that follow it in its worker."""
    return {
        "SIGINT": signal.getsignal(signal.SIGINT),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "nice": os.nice(0),
        "log": logging.getLogger("ckpt_core").level,
        "switch interval": sys.getswitchinterval(),
        "collector": gc.isenabled(),
    }


@pytest.fixture(autouse=True)
def _the_process_is_as_it_was() -> Iterator[None]:
    """A test that leaves the process slower, deaf to Ctrl-C or silent fails, not one after it."""
    before = _of_the_process()
    yield
    assert _of_the_process() == before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A place for a checkpoint root that does not exist yet."""
    return tmp_path / "ckpts"


@pytest.fixture
def seeded() -> int:
    """Seed torch's generator; the seed, for tests that draw more."""
    torch.manual_seed(0)
    return 0
