"""Kill the store ahead of each of its operations, open the root again, and look.

A kill loses no written byte (a power loss may); it shows every state in which names can be left.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_core.errors import RestoreError
from ckpt_core.store import StepStore, committed_steps, step_path
from ckpt_core.system.files import Files
from tests import places
from tests.store.harness import (
    SPARE,
    Killed,
    KillSwitch,
    NoExchange,
    QuickFiles,
    interrupted,
    make_store,
    mark_of,
    save,
)

MOST, MOST_OF_A_REPAIR = 16, 6
"""So many operations of one scenario, but for `CKPT_PLACES=all`."""
BEFORE = (10, 20, 30)
MARK = 200


def publish_newer(store: StepStore) -> None:
    save(store, 40)


def publish_older(store: StepStore) -> None:
    save(store, 15)


def replace_newest(store: StepStore) -> None:
    save(store, 30, mark=MARK)


def replace_older(store: StepStore) -> None:
    save(store, 20, mark=MARK)


def save_and_retire(store: StepStore) -> None:
    save(store, 40)
    store.retire()
    save(store, 50)
    store.retire()


def remove_oldest(store: StepStore) -> None:
    store.remove([10, 20])


def quarantine(store: StepStore) -> None:
    store.suspect(20)
    store.quarantine_suspects()
    save(store, 40)


def abandon(store: StepStore) -> None:
    attempt = store.begin(40)
    store._files.write_new(attempt.path / "shard-00000-0.safetensors", b"x")
    store.abandon(attempt)


def pin(store: StepStore) -> None:
    store.pin(10)
    store.unpin(10)
    store.pin(10)
    store.retire()


SCENARIOS: list[Callable[[StepStore], None]] = [
    publish_newer,
    publish_older,
    replace_newest,
    replace_older,
    save_and_retire,
    remove_oldest,
    quarantine,
    abandon,
    pin,
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with three steps and one slot; tests work on copies."""
    root = tmp_path_factory.mktemp("prepared") / "root"
    store = make_store(root, keep_last=3)
    store.open()
    for step in (5, *BEFORE):
        save(store, step)
    assert store.retire() == (5,)
    store.close()
    return root


def run_killed(root: Path, switch: KillSwitch, base: type[Files], act: object) -> bool:
    """Open the root, act, and die where the switch says; whether it died."""
    store = make_store(root, interrupted(base, switch))
    try:
        store.open()
        if callable(act):
            act(store)
    except Killed:
        return True
    finally:
        store.close()
    return False


def crashed_roots(
    start: Path, place: Path, base: type[Files], act: object, *, most: int
) -> Iterator[tuple[int, Path]]:
    """A copy of a root for operations ahead of which the process can die, and for its end."""
    counting = KillSwitch()
    counted = shutil.copytree(start, place / "counted")
    run_killed(counted, counting, base, act)
    shutil.rmtree(counted)
    what = f"{getattr(act, '__name__', place.name)} {base.__name__}"
    for at in (*places.some(range(counting.count), most, of=what), counting.count):
        root = shutil.copytree(start, place / str(at))
        assert run_killed(root, KillSwitch(at), base, act) == (at < counting.count)
        yield at, root
        shutil.rmtree(root)


def check_reopened(root: Path, base: type[Files]) -> None:
    """Open the root and hold it to what is promised; then it works on, and nothing is left over."""
    store = make_store(root, base(), keep_last=2)
    store.open()
    try:
        steps = store.steps()
        assert max(steps) >= max(BEFORE)
        for step in steps:
            assert mark_of(step_path(root, step)) in (step, MARK)
        assert not list((root / ".inflight").glob("*"))
        save(store, 1000)
        store.retire()
        assert store.steps()[-1] == 1000
        assert set(store.steps()) <= {*steps[-1:], 1000, *store.pinned()}
        assert mark_of(step_path(root, 1000)) == 1000 % 251
    finally:
        store.close()
    assert not list((root / ".inflight").glob("*"))
    assert len(list((root / ".slots").glob("*"))) <= SPARE
    known = {".inflight", ".slots", ".lock", ".pins", ".corrupt"}
    assert {entry.name for entry in root.iterdir() if not entry.name.startswith("step-")} <= known


@pytest.mark.parametrize("base", [QuickFiles, NoExchange])
@pytest.mark.parametrize("act", SCENARIOS)
def test_a_kill_ahead_of_any_operation_loses_no_newest_step(
    prepared: Path, tmp_path: Path, base: type[Files], act: Callable[[StepStore], None]
) -> None:
    for _, root in crashed_roots(prepared, tmp_path, base, act, most=MOST):
        if base is QuickFiles:
            # With an atomic exchange, readers see the newest step at every instant.
            assert max(committed_steps(root)) >= max(BEFORE)
        for step in committed_steps(root):
            mark_of(step_path(root, step))
        check_reopened(root, base)


@pytest.mark.parametrize("act", [replace_newest, save_and_retire])
def test_a_kill_during_the_repair_after_a_kill_loses_nothing_either(
    prepared: Path, tmp_path: Path, act: Callable[[StepStore], None]
) -> None:
    seen = set()
    for at, root in crashed_roots(prepared, tmp_path / "first", NoExchange, act, most=MOST):
        if (names := names_in(root)) in seen:
            continue
        seen.add(names)
        repairs = tmp_path / f"repair-{at}"
        for _, twice in crashed_roots(root, repairs, NoExchange, None, most=MOST_OF_A_REPAIR):
            check_reopened(twice, NoExchange)


def names_in(root: Path) -> tuple[str, ...]:
    """The names below a root, less what is random in them."""
    names = (str(path.relative_to(root)) for path in root.rglob("*"))
    return tuple(sorted(re.sub(r"-[0-9a-f]{8}\b|\b[0-9a-f]{16}$", "", name) for name in names))


def test_a_replaced_step_is_whole_in_its_old_or_its_new_form(
    prepared: Path, tmp_path: Path
) -> None:
    for base in (QuickFiles, NoExchange):
        found = set()
        place = tmp_path / base.__name__
        for _, root in crashed_roots(prepared, place, base, replace_newest, most=MOST):
            store = make_store(root, base())
            store.open()
            store.close()
            found.add(mark_of(step_path(root, 30)))
        assert found == {30, MARK}


def test_quarantined_steps_are_never_deleted(prepared: Path, tmp_path: Path) -> None:
    for _, root in crashed_roots(prepared, tmp_path, QuickFiles, quarantine, most=MOST):
        store = make_store(root)
        store.open()
        store.close()
        moved = list((root / ".corrupt").glob("step-000000000020-*"))
        assert len(moved) + (20 in committed_steps(root)) == 1


def test_a_replaced_step_without_a_sound_manifest_is_not_brought_back(
    prepared: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    for number, text in enumerate([None, b"{}", b"garbage"]):
        aside = root / ".inflight" / f"000000000040-0000000{number}.replaced"
        aside.mkdir()
        if text is not None:
            (aside / "manifest.json").write_bytes(text)
    store = make_store(root)
    store.open()
    assert store.steps() == BEFORE
    assert not list((root / ".inflight").iterdir())
    store.close()


def test_opening_twice_changes_nothing_the_second_time(prepared: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    run_killed(root, KillSwitch(12), QuickFiles, save_and_retire)
    views = []
    for _ in range(2):
        store = make_store(root)
        store.open()
        store.close()
        views.append(sorted(str(path) for path in root.rglob("*")))
    assert views[0] == views[1]


def test_readers_of_a_missing_root_find_nothing(tmp_path: Path) -> None:
    assert committed_steps(tmp_path / "none") == ()
    (tmp_path / "file").write_text("")
    with pytest.raises(RestoreError, match="is a file"):
        committed_steps(tmp_path / "file")
