"""The launches: each runs many jobs, and many tests look at what came out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.horovod.cases import (
    BLOCKING,
    CASES,
    DELAYED_BY_THREE,
    DELAYED_BY_TWO,
    EDITS,
    ENDS,
    FAILURES,
    MODES,
    OF_THREE,
    STRATEGIES,
    Saved,
    all_lazy,
    torn,
)
from tests.integrations.horovod.launch import LAUNCHERS, Job, Outcome, launch

UNFUSED = {"HOROVOD_FUSION_THRESHOLD": "0"}
"""Three addends are added in an order that depends on what is fused; without fusion it is always the same."""


@pytest.fixture(scope="session", autouse=True)
def _launchers() -> Iterator[None]:
    with LAUNCHERS:
        yield


@pytest.fixture(scope="session")
def bits_of_two(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Every case, on two ranks."""
    folder = tmp_path_factory.mktemp("bits2")
    return launch(_bits(folder, list(CASES)), ranks=2, folder=folder)


@pytest.fixture(scope="session")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Runs that save under delays, on two ranks."""
    folder = tmp_path_factory.mktemp("saved2")
    return launch(
        _saved(folder, {**DELAYED_BY_TWO, **all_lazy(), **torn()}), ranks=2, folder=folder
    )


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Everything else that takes two ranks, and no crash."""
    folder = tmp_path_factory.mktemp("pair")
    jobs = [
        *_saved(folder, {**prefixed("edit", EDITS), **prefixed("end", ENDS), **STRATEGIES}),
        *_rooted(folder, "jobs_policies", "asked_for", "measured", "parts", "refused", "twice"),
        *_rooted(folder, "jobs_policies", "vouched", "told_again", "two_told", "one_more"),
        *_rooted(folder, "jobs_ends", "skipped_block"),
        *_rooted(folder, "jobs_failures", "edited", "short_of_memory"),
        *_rooted(folder, "jobs_failures", "commit_failing", "between_passes"),
        *_rooted(folder, "jobs_failures", "commit_interrupted", "own_parts", "joined"),
        *_rooted(folder, "jobs_failures", "before_the_step"),
        *_rooted(folder, "jobs_faces", "what_it_is", "state_dicts", "broadcasts", "schedulers"),
        *_rooted(folder, "jobs_faces", "used_before", "errors", "names", "shared"),
    ]
    for mode in MODES:
        jobs += [
            _job(folder, "jobs_policies", "told", mode, mode=mode),
            _job(folder, "jobs_policies", "told", f"hook-{mode}", mode=mode, rank0_hook=True),
            _job(folder, "jobs_policies", "one_root", mode, mode=mode),
            _job(folder, "jobs_policies", "phases", mode, mode=mode),
            _job(folder, "jobs_policies", "unwanted", mode, mode=mode),
            _job(folder, "jobs_policies", "made_again", f"fixed-{mode}", mode=mode),
            _job(folder, "jobs_policies", "made_again", f"told-{mode}", mode=mode, tells=True),
            _job(folder, "jobs_ends", "broken", f"on-{mode}", mode=mode, go_on=True),
            _job(folder, "jobs_ends", "broken", f"off-{mode}", mode=mode, go_on=False),
            _job(folder, "jobs_ends", "late_end", mode, mode=mode),
            _job(folder, "jobs_ends", "evaluated", mode, mode=mode),
            _job(folder, "jobs_ends", "gone_back", mode, mode=mode),
            _job(folder, "jobs_ends", "gone_back_by_call", mode, mode=mode),
            _job(folder, "jobs_ends", "found_nothing", mode, mode=mode),
            _job(folder, "jobs_ends", "failed_back", mode, mode=mode),
            _job(folder, "jobs_ends", "accumulated", mode, mode=mode),
            _job(folder, "jobs_ends", "accumulated_beside", mode, mode=mode),
            _job(folder, "jobs_failures", "interrupted", f"state-{mode}", mode=mode, what="state"),
            _job(
                folder, "jobs_failures", "interrupted", f"policy-{mode}", mode=mode, what="policy"
            ),
            _job(folder, "jobs_faces", "large", mode, mode=mode),
            _job(folder, "jobs_crash", "save", mode, mode=mode, steps=3),
        ]
    jobs += [
        _job(folder, "jobs_failures", "failing", name, **how) for name, how in FAILURES.items()
    ]
    jobs += [
        _job(
            folder, "jobs_failures", "failing", f"blocking-{mode}", mode=mode, blocking=True, **how
        )
        for mode, how in BLOCKING.items()
    ]
    jobs += [
        _job(folder, "jobs_elastic", "took_live", str(model), with_model=model)
        for model in (True, False)
    ]
    jobs += _rooted(folder, "jobs_ends", "saved_alone")
    jobs += _rooted(folder, "jobs_policies", "left_early")  # with which the second rank ends
    return launch(jobs, ranks=2, folder=folder)


@pytest.fixture(scope="session")
def trio(pair: Outcome, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Everything that takes three ranks."""
    folder = tmp_path_factory.mktemp("trio")
    jobs = [
        *_bits(folder, list(OF_THREE)),
        *_saved(folder, DELAYED_BY_THREE),
        _job(folder, "jobs_policies", "told", "members", mode="in_step", members=[0, 2]),
        _job(folder, "jobs_policies", "outside", members=[0, 2]),
        _job(folder, "jobs_ends", "saved_alone", "members", members=[0, 2]),
        _job(folder, "jobs_crash", "save", "three", mode="in_step", steps=3),
        _job(folder, "jobs_faces", "large", "lazy", mode="lazy"),
    ]
    jobs += [_restoring(pair.folder, f"save-{mode}") for mode in MODES]
    return launch(jobs, ranks=3, folder=folder, environ=UNFUSED)


def prefixed(prefix: str, saved: dict[str, Saved]) -> dict[str, Saved]:
    """The same runs, by longer names."""
    return {f"{prefix}-{name}": item for name, item in saved.items()}


def _bits(folder: Path, names: list[str]) -> list[Job]:
    return [
        Job(
            f"bits-{name}",
            "jobs_bits:compare",
            {"root": str(folder / f"bits-{name}.roots"), "recipe": dict(CASES[name].recipe)},
        )
        for name in names
    ]


def _saved(folder: Path, saved: dict[str, Saved]) -> list[Job]:
    return [
        Job(
            name,
            "jobs_saved:consistent",
            {"root": str(folder / f"{name}.root"), "recipe": item.recipe, **item.how},
        )
        for name, item in saved.items()
    ]


def _rooted(folder: Path, module: str, *calls: str) -> list[Job]:
    return [_job(folder, module, call) for call in calls]


def _job(folder: Path, module: str, call: str, suffix: str = "", **arguments: Any) -> Job:
    name = f"{call}-{suffix}" if suffix else call
    return Job(name, f"{module}:{call}", {"root": str(folder / f"{name}.root"), **arguments})


def _restoring(folder: Path, name: str) -> Job:
    root = str(folder / f"{name}.root")
    return Job(f"restore-{name}", "jobs_crash:restore", {"root": root, "name": name})
