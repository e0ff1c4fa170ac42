"""Who waits for leaves to be copied, and when it is woken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from ckpt_core.snapshot import Snapshot
from ckpt_core.system import threads
from ckpt_core.system.devices import Devices

LEAVES = 300
NAMES = [f"leaf {index}" for index in range(LEAVES)]


@pytest.fixture(autouse=True)
def nobody_looks_again_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_LOOK_AGAIN_S", 3600.0)


@pytest.fixture
def snapshot() -> Snapshot:
    """Of leaves that are handed over and not copied yet."""
    made = Snapshot(1, devices=Devices())
    made.expect(NAMES, [None] * LEAVES)
    return made


def begun(wait: Callable[..., object], *given: object) -> Future[None]:
    """A wait on a thread of its own."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            wait(*given, deadline=time.monotonic() + 60)
        except BaseException as exc:
            ended.set_exception(exc)
        else:
            ended.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return ended


def copy(snapshot: Snapshot, count: int) -> None:
    """Leaves as the stager copies them."""
    for _ in range(count):
        assert snapshot.enter_copy()
        snapshot.leave_copy()
        snapshot.arrived(1)


def test_who_waits_is_not_woken_for_the_leaves_before_the_one_that_it_waits_for(
    snapshot: Snapshot,
) -> None:
    looks: list[str] = []
    first = threading.Event()

    def leaf_of(name: str) -> str:
        looks.append(name)
        first.set()
        return name

    snapshot.name_leaves(leaf_of)
    ended = begun(snapshot.wait, [NAMES[-2]])
    assert first.wait(60)
    for _ in range(LEAVES - 1):
        copy(snapshot, 1)
        # Time for whoever is woken to look.
        time.sleep(0.0005)
    ended.result(60)
    # Before it slept, when it was woken, and once more behind that.
    assert len(looks) <= 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_each_who_waits_is_woken_when_its_leaves_are_copied(
    snapshot: Snapshot, order: tuple[int, ...]
) -> None:
    waits: dict[int, Future[None]] = {}
    for which in order:
        waits[which] = (
            begun(snapshot.wait_copied, 1),
            begun(snapshot.wait, NAMES[: LEAVES // 2]),
            begun(snapshot.wait, None),
        )[which]
    copy(snapshot, 1)
    waits[0].result(60)
    copy(snapshot, LEAVES // 2 - 1)
    waits[1].result(60)
    assert not waits[2].done()
    copy(snapshot, LEAVES - LEAVES // 2)
    waits[2].result(60)


def test_who_waits_for_all_leaves_waits_for_the_copy_that_is_under_way(snapshot: Snapshot) -> None:
    ended = begun(snapshot.wait, None)
    assert snapshot.enter_copy()
    snapshot.arrived(LEAVES)
    assert not snapshot.is_clear(None)
    snapshot.leave_copy()
    ended.result(60)


@pytest.mark.parametrize("copying", [False, True])
def test_who_waits_is_woken_when_the_save_has_failed_and_no_copy_is_under_way(
    snapshot: Snapshot, copying: bool
) -> None:
    ended = begun(snapshot.wait, None)
    if copying:
        assert snapshot.enter_copy()
    snapshot.fail(RuntimeError("given up"))
    assert snapshot.is_clear(None) is not copying
    if copying:
        snapshot.leave_copy()
    ended.result(60)


def test_who_waits_for_all_waits_for_what_is_handed_over_meanwhile(snapshot: Snapshot) -> None:
    ended = begun(snapshot.wait, None)
    snapshot.expect(["more"], [None], behind=LEAVES)
    copy(snapshot, LEAVES)
    assert not snapshot.is_clear(None)
    copy(snapshot, 1)
    ended.result(60)
