"""Auto beside the real engine: one process, and several ranks that must save the same steps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Auto, Checkpointer, ConfigError, EverySeconds, Options
from ckpt_core.observe import Event, EventName
from ckpt_core.observe.figures import Figures
from ckpt_core.policy.activity import Activity
from ckpt_core.system.devices import Devices
from ckpt_core.system.files import Files
from tests.crash.layers import CHANGES, hooked
from tests.crash.warm import Warm
from tests.multirank.crew import Rank, all_well

SMALL = Options(chunk_bytes="64KiB", writers=2, staging_bytes="8MiB", timeout=60)


def _state() -> dict[str, Any]:
    return {"weights": torch.zeros(256 * 1024), "step": 0}


def _iterate(state: dict[str, Any], step: int) -> None:
    time.sleep(0.002)
    state["weights"].fill_(step)
    state["step"] = step


def test_a_run_is_profiled_saved_and_remembered(tmp_path: Path) -> None:
    root, state, policy = tmp_path / "ckpts", _state(), Auto(0.5)
    with Checkpointer(root, SMALL) as ck:
        policy.watch(ck)
        # A busy machine takes more steps to know what a save costs.
        for step in range(1, 20_000):
            ck.wait_staged()
            _iterate(state, step)
            if policy.should_save(step):
                ck.save(step, state)
            if step >= 200 and policy.interval is not None:
                break
        ck.wait()
        profile = policy.profile
        assert ck.steps()
    assert policy.interval is not None and policy.overhead is not None
    assert profile is not None and profile.mode == "host" and profile.headroom_bytes is None
    assert profile.state_bytes == 1024 * 1024
    assert profile.iteration_s >= 0.002 and profile.update_s >= 0.002
    assert 0 < profile.staging_s["host"] <= profile.persist_s
    kept = json.loads((tmp_path / "ckpts.profile.json").read_text())["profile"]
    assert kept["state_bytes"] == profile.state_bytes


def test_time_inside_the_engine_is_counted(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        assert ck.gauges.stall.seconds == 0
        began = time.monotonic()
        handle = ck.save(1, _state())
        ck.wait()
        assert handle.stall_s <= ck.gauges.stall.seconds <= time.monotonic() - began
        before = ck.gauges.stall.seconds
        with pytest.raises(ConfigError):
            ck.save(-1, _state())
        assert ck.gauges.stall.seconds > before, "a call that fails takes time as well"


def test_saves_that_fail_neither_stop_the_policy_nor_count_as_under_way(tmp_path: Path) -> None:
    def hook(name: str, args: tuple[Any, ...], act: Any) -> Any:
        if name == "pwrite" and 20 <= state["step"] < 80:
            raise OSError(28, "No space left on device")
        return act()

    policy, state, asked = Auto(1.0, cache=False), _state(), []
    options = Options(on_error="warn", chunk_bytes="64KiB", writers=2, keep_last=None)
    files = hooked(Files, hook, CHANGES)
    with Checkpointer(tmp_path, options, files=files) as ck:
        policy.watch(ck)
        for step in range(1, 160):
            ck.wait_staged()
            _iterate(state, step)
            if policy.should_save(step):
                asked.append(step)
                ck.save(step, state)
        ck.wait()
        assert [step for step in asked if 20 <= step < 80], "it went on asking"
        assert max(ck.steps()) > 80, "and saved again when it could"


class Refusing(Devices):
    """Has no memory for a while."""

    refuses = False

    def queued(self, *args: Any) -> Any:
        if self.refuses:
            raise MemoryError
        return super().queued(*args)


@pytest.mark.parametrize("how", ["abort", "error", "interrupt"])
def test_saves_that_the_training_thread_gives_up_are_over(tmp_path: Path, how: str) -> None:
    state, devices, activity = _state(), Refusing(), Activity()
    saved, struck = list[int](), list[int]()

    def interrupt(event: Event) -> None:
        if how == "interrupt" and event.step == 5 and not struck:
            struck.append(event.step)
            raise KeyboardInterrupt

    options = Options(chunk_bytes="64KiB", writers=2, keep_last=None, timeout=60)
    with Checkpointer(tmp_path / "ckpts", options, devices=devices) as ck:
        figures = Figures(ck.events, root="", rank=0, waited_s=float, levels=tuple)
        ck.events.subscribe(activity.hear)
        ck.events.subscribe(interrupt, only=[EventName.BEGIN])
        policy = Auto(1.0, cache=False)
        policy.watch(ck)
        # A busy machine takes more steps to know what a save costs.
        for step in range(1, 20_000):
            if len(saved) == 4:
                break
            ck.wait_staged()
            _iterate(state, step)
            if step == 5 and how == "abort":
                ck.begin(step, {"weights": state["weights"]}).abort()
            elif step == 5:
                devices.refuses = how == "error"
                with pytest.raises((MemoryError, KeyboardInterrupt)):
                    ck.save(step, state)
                devices.refuses = False
            if policy.should_save(step):
                ck.save(step, state)
                saved.append(step)
        ck.wait()
        activity.take()
        assert activity.under_way == 0
        assert len(saved) == 4 and ck.steps() == tuple(saved)
        assert figures.samples()["in_flight"][0].endswith(" 0\n")
        told = [(event.name, event.step) for event in ck.events.events()]
        begun = [step for name, step in told if name == EventName.BEGIN]
        assert 5 in begun
        over = [step for name, step in told if name in (EventName.COMMITTED, EventName.FAILED)]
        assert sorted(over) == begun


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as process:
        yield process


def train(who: Rank, root: str, combined: bool) -> dict[str, Any]:
    """One rank of a run; ranks differ in speed, and so in what they would decide."""
    policy: Any = Auto(0.3)
    asked = policy | EverySeconds(3600) if combined else policy
    state, saved, intervals = _state(), [], set()
    with Checkpointer(root, SMALL, coordination=who.meet()) as ck:
        asked.watch(ck)
        for step in range(1, 150):
            ck.wait_staged()
            time.sleep(0.001 * who.rank)
            _iterate(state, step)
            if asked.should_save(step):
                ck.save(step, state)
                saved.append(step)
            intervals.add(policy.interval.steps if policy.interval else 0)
        ck.wait()
    return {"saved": saved, "intervals": sorted(intervals)}


@pytest.mark.parametrize("combined", [False, True])
def test_the_first_rank_decides_and_all_save_the_same_steps(
    warm: Warm, tmp_path: Path, combined: bool
) -> None:
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call="tests.policy.test_auto_engine:train",
        world_size=3,
        nodes=None,
        arguments={"root": str(tmp_path / "ckpts"), "combined": combined},
    )
    first, *others = all_well(outcomes)
    assert len(first["saved"]) >= 2
    assert max(first["intervals"]) > 0
    assert others == [first, first]


def save_by_the_clock(who: Rank, root: str) -> list[int]:
    """One rank of a run whose clocks do not go alike."""
    policy = EverySeconds(0.05, clock=lambda: time.monotonic() * (1 + who.rank) + 1000 * who.rank)
    state, saved = _state(), []
    with Checkpointer(root, SMALL, coordination=who.meet()) as ck:
        policy.watch(ck)
        for step in range(1, 200):
            ck.wait_staged()
            _iterate(state, step)
            if policy.should_save(step):
                ck.save(step, state)
                saved.append(step)
        ck.wait()
    return saved


def test_ranks_whose_clocks_differ_save_the_same_steps_every_few_seconds(
    warm: Warm, tmp_path: Path
) -> None:
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call="tests.policy.test_auto_engine:save_by_the_clock",
        world_size=2,
        nodes=None,
        arguments={"root": str(tmp_path / "ckpts")},
    )
    first, other = all_well(outcomes)
    assert len(first) >= 2 and other == first


def test_decisions_take_no_time_to_speak_of(tmp_path: Path) -> None:
    """Work, not time: between two looks a question reads the clock once and asks nobody."""
    with Checkpointer(tmp_path / "ckpts", SMALL) as ck:
        reads = []
        policy = Auto(cache=False, clock=lambda: reads.append(1) or time.monotonic())  # type: ignore[func-returns-value]
        policy.watch(ck)
        for step in range(1, 9):
            policy.should_save(step)
        assert len(reads) == 8
