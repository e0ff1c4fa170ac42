"""One copy: whole and verified there, or not there at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import CorruptCheckpoint, NotCommitted
from ckpt_core.layout import ChunkSum, FileEntry
from ckpt_core.levels import Away
from ckpt_core.levels.agent.copying import How, Sent, complete, sampled, send
from ckpt_core.levels.agent.pace import Backoff, Pace, Stopped
from ckpt_core.levels.agent.sent_before import SentBefore
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.levels.making import CHUNK_BYTES, look, make_store, read_step, save
from tests.levels.sending import sent_to
from tests.store.harness import QuickFiles

SHARD = "shard-00000-0.safetensors"


class Heard(DirectoryFar):
    """Notes what it was asked to write, and may garble it."""

    def __init__(self, root: Path, *, garbles: int = 0) -> None:
        super().__init__(root, files=QuickFiles(), busy_s=0.1)
        self.written: list[str] = []
        self.garbles = garbles

    def put(self, copy: Any, name: str, blocks: Any, nbytes: int) -> None:
        self.written.append(name)
        if self.garbles and name.startswith("shard"):
            self.garbles -= 1
            data = bytearray(b"".join(map(bytes, blocks)))
            data[0] ^= 1
            blocks = iter([memoryview(data)])
        super().put(copy, name, blocks, nbytes)

    def publish(self, copy: Any, manifest: bytes, *, replaces: str | None = None) -> bool:
        self.written.append("manifest.json")
        return super().publish(copy, manifest, replaces=replaces)


@pytest.fixture
def far(tmp_path: Path) -> Heard:
    return Heard(tmp_path / "far")


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_files_go_first_then_rank_manifests_and_the_manifest_last(root: Path, far: Heard) -> None:
    save(make_store(root), 10, ranks=(0, 1), world=2)
    assert sent_to(far, root, 10)
    shards = [SHARD, "shard-00001-0.safetensors"]
    assert far.written == [*shards, "rank-00000.json", "rank-00001.json", "manifest.json"]
    here, there = step_path(root, 10), step_path(Path(far.url), 10)
    for path in here.iterdir():
        assert path.read_bytes() == (there / path.name).read_bytes()


def test_what_an_earlier_try_has_sent_is_not_sent_again(root: Path, far: Heard) -> None:
    save(make_store(root), 10, ranks=(0, 1), world=2)

    def stop() -> None:
        raise Stopped("now")

    with OpenSave(step_path(root, 10), files=Files()) as opened:
        with pytest.raises(Stopped):
            send(opened, far, How(may_publish=stop))
        assert look(Path(far.url)) == {}
        far.written.clear()
        assert send(opened, far, How()) is Sent.REACHED
    assert far.written == ["manifest.json"]


@pytest.mark.parametrize("at", [0, CHUNK_BYTES, 5 * CHUNK_BYTES - 1])
def test_a_damaged_step_is_never_sent_on(root: Path, far: Heard, at: int) -> None:
    save(make_store(root), 10)
    damage(step_path(root, 10) / SHARD, at)
    with pytest.raises(CorruptCheckpoint, match=f"{SHARD}.*chunk {at // CHUNK_BYTES}"):
        sent_to(far, root, 10)
    assert "manifest.json" not in far.written and look(Path(far.url)) == {}


@pytest.mark.parametrize("name", [SHARD, "rank-00000.json"])
@pytest.mark.parametrize("change", ["gone", "short", "other"])
def test_a_step_with_a_file_that_is_not_what_it_was_is_not_begun(
    root: Path, far: Heard, name: str, change: str
) -> None:
    save(make_store(root), 10)
    path = step_path(root, 10) / name
    if change == "gone":
        path.unlink()
    elif change == "short":
        os.truncate(path, 10)
    else:
        damage(path, 20)
    with pytest.raises(CorruptCheckpoint, match=name):
        sent_to(far, root, 10)
    assert look(Path(far.url)) == {}


def test_a_step_that_is_retired_while_it_is_sent_is_still_sent_whole(
    root: Path, far: Heard
) -> None:
    store = make_store(root, keep_last=1)
    save(store, 10)
    with OpenSave(step_path(root, 10), files=Files()) as opened:
        save(store, 20, nbytes=CHUNK_BYTES)
        assert store.retire() == (10,)
        assert send(opened, far, How()) is Sent.REACHED
    assert read_step(Path(far.url), 10) == 0
    with pytest.raises(NotCommitted, match="retired meanwhile"):
        sent_to(far, root, 10)


def test_a_step_that_is_replaced_while_it_is_sent_is_sent_as_it_was(root: Path, far: Heard) -> None:
    store = make_store(root)
    first = save(store, 10, mark=1)
    with OpenSave(step_path(root, 10), files=Files()) as opened:
        save(store, 10, mark=2)
        assert send(opened, far, How()) is Sent.REACHED
    assert read_step(Path(far.url), 10) == 1
    assert sent_to(far, root, 10, replaces=first)
    assert read_step(Path(far.url), 10) == 2


def test_what_is_wrong_there_is_not_taken_over_again_and_other_nodes_do_not_count_on_it(
    root: Path, far: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_store(root), 10)
    before = SentBefore()
    asked: list[str] = []
    taken = far.take_over

    def take_over(copy: Any, name: str, nbytes: int, *, before: Any) -> bool:
        asked.append(name)
        return taken(copy, name, nbytes, before=before)

    monkeypatch.setattr(far, "take_over", take_over)
    with OpenSave(step_path(root, 10), files=Files()) as opened:
        with pytest.raises(Stopped):
            send(opened, far, How(before=before, may_publish=_stop))
        (entry,) = opened.entries
        there = next(Path(far.url).rglob(SHARD))
        damage(there, 0)
        known = {before.file(opened, entry)}
        assert None not in known

        def put(copy: Any, name: str, blocks: Any, nbytes: int) -> None:
            raise Away("it could not be sent again")

        with monkeypatch.context() as away:
            away.setattr(far, "put", put)
            with pytest.raises(Away, match="again"):
                send(opened, far, How(before=before))
        assert far.files(opened.copy) == {} and before.file(opened, entry) is None
        assert send(opened, far, How(before=before, sample=0.0)) is Sent.REACHED
    assert read_step(Path(far.url), 10) == 0 and not asked


def _stop() -> None:
    raise Stopped("now")


@pytest.mark.parametrize("garbles", [1, 2])
def test_a_file_that_is_known_to_be_wrong_there_is_never_believed_by_a_later_try(
    root: Path, far: Heard, garbles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_store(root), 10)
    far.garbles = garbles
    right = far.put

    def put(copy: Any, name: str, blocks: Any, nbytes: int) -> None:
        if garbles == 1 and far.written == [name]:
            raise Away("it could not be sent again")
        right(copy, name, blocks, nbytes)

    monkeypatch.setattr(far, "put", put)
    with OpenSave(step_path(root, 10), files=Files()) as opened:
        with pytest.raises(Away, match=r"again|otherwise"):
            send(opened, far, How())
        assert SHARD not in far.files(opened.copy)
        monkeypatch.setattr(far, "put", right)
        assert send(opened, far, How(sample=0.0)) is Sent.REACHED
    assert read_step(Path(far.url), 10) == 0


@pytest.mark.parametrize("sums", [True, False])
def test_bytes_that_arrive_otherwise_are_sent_again_and_never_published(
    root: Path, far: Heard, sums: bool
) -> None:
    save(make_store(root), 10, sums=sums)
    far.garbles = 1
    assert sent_to(far, root, 10)
    assert far.written.count(SHARD) == 2 and read_step(Path(far.url), 10) == 0
    save(make_store(root.with_name("other")), 20, sums=sums)
    far.garbles = 2
    with pytest.raises(Away, match="reads back otherwise"):
        sent_to(far, root.with_name("other"), 20)
    assert set(look(Path(far.url))) == {10}


def test_the_sample_has_both_ends_of_each_file_and_a_part_of_the_rest() -> None:
    entry = FileEntry("a", 10_000, tuple([ChunkSum(1, None)] * 10_000))
    seen = [offset for offset, _, _ in sampled(entry, 0.01)]
    assert seen[0] == 0 and seen[-1] == 9_999 and 20 < len(seen) < 300
    assert seen != [offset for offset, _, _ in sampled(entry, 0.01)]
    assert list(sampled(FileEntry("a", 0, ()), 0.01)) == []


def test_a_step_of_several_nodes_is_published_by_the_last_one(tmp_path: Path, far: Heard) -> None:
    attempt = "000000000010-0000abcd"
    roots = [tmp_path / name for name in ("a", "b")]
    for node, root in enumerate(roots):
        ranks = (2 * node, 2 * node + 1)
        save(make_store(root), 10, ranks=ranks, world=4, attempt=attempt, mark=3)
    with (
        OpenSave(step_path(roots[0], 10), files=Files()) as first,
        OpenSave(step_path(roots[1], 10), files=Files()) as second,
    ):
        assert send(first, far, How()) is Sent.WAITS
        assert complete(first, far, How()) is Sent.WAITS and look(Path(far.url)) == {}
        assert send(second, far, How()) is Sent.REACHED
        assert complete(first, far, How()) is Sent.REACHED, "a lost race is no error"
    assert far.steps() == {10: attempt} and read_step(Path(far.url), 10) == 3


def test_a_part_whose_files_are_missing_does_not_count(tmp_path: Path, far: Heard) -> None:
    attempt = "000000000010-0000abcd"
    for node in (0, 1):
        save(make_store(tmp_path / str(node)), 10, ranks=(node,), world=2, attempt=attempt)
    with OpenSave(step_path(tmp_path / "0", 10), files=Files()) as first:
        assert send(first, far, How()) is Sent.WAITS
        data = (step_path(tmp_path / "1", 10) / "rank-00001.json").read_bytes()
        far.put(first.copy, "rank-00001.json", iter([memoryview(data)]), len(data))
        assert complete(first, far, How()) is Sent.WAITS


class Cleared(Heard):
    """Opened as a root by somebody, whose repair deletes what is under way, right before a write."""

    def __init__(self, root: Path, *, ahead_of: str) -> None:
        super().__init__(root)
        self.ahead_of = ahead_of

    def put(self, copy: Any, name: str, blocks: Any, nbytes: int) -> None:
        self.clear(name)
        super().put(copy, name, blocks, nbytes)

    def publish(self, copy: Any, manifest: bytes, *, replaces: str | None = None) -> bool:
        self.clear("manifest.json")
        return super().publish(copy, manifest, replaces=replaces)

    def clear(self, name: str) -> None:
        if name == self.ahead_of:
            self.ahead_of = ""
            make_store(Path(self.url)).close()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("ahead_of", ["rank-00000.json", "rank-00001.json", "manifest.json"])
def test_a_step_whose_files_go_behind_the_look_at_them_is_not_published_but_sent_again(
    root: Path, tmp_path: Path, ahead_of: str, own: bool
) -> None:
    save(make_store(root), 10, ranks=(0, 1), world=2)
    far = Cleared(tmp_path / "far", ahead_of=ahead_of)
    with pytest.raises(Away, match="begins anew"):
        sent_to(far, root, 10, own=own)
    assert far.steps() == {} and not far.ahead_of
    assert sent_to(far, root, 10, own=own)
    assert read_step(Path(far.url), 10) == 0


@pytest.mark.parametrize("gone", [SHARD, "rank-00001.json"])
def test_files_that_go_once_all_nodes_have_been_listed_keep_a_step_from_being_published(
    tmp_path: Path, far: Heard, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = "000000000010-0000abcd"
    for node in (0, 1):
        save(make_store(tmp_path / str(node)), 10, ranks=(node,), world=2, attempt=attempt)
    there = Path(far.url) / ".inflight" / attempt

    def lose() -> None:
        (there / gone).unlink()

    with (
        OpenSave(step_path(tmp_path / "0", 10), files=Files()) as first,
        OpenSave(step_path(tmp_path / "1", 10), files=Files()) as second,
    ):
        assert send(first, far, How()) is Sent.WAITS
        with pytest.raises(Away, match=f"{gone}.*begins anew"):
            send(second, far, How(may_publish=lose))
        assert far.steps() == {}
        assert complete(second, far, How()) is Sent.WAITS
        assert Sent.REACHED in (send(first, far, How()), send(second, far, How()))
    assert read_step(Path(far.url), 10) == 0


def test_a_rank_manifest_that_cannot_be_read_there_vouches_for_nothing(
    root: Path, far: Heard
) -> None:
    save(make_store(root), 10)
    attempt = DirectoryFar(root, files=QuickFiles()).steps()[10]
    path = Path(far.url) / ".inflight" / attempt / "rank-00000.json"
    with OpenSave(step_path(root, 10), files=Files()) as opened:
        with pytest.raises(Away, match="begins anew"):
            send(opened, far, How(may_publish=lambda: damage(path, 20)))
        assert far.steps() == {}
        assert send(opened, far, How()) is Sent.REACHED
    assert read_step(Path(far.url), 10) == 0


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("rate", [100_000, 10_000_000, 3_000_000_000])
def test_bytes_go_at_the_rate_that_was_set_within_a_tenth(rate: int) -> None:
    clock = Clock()
    pace = Pace(rate, clock=lambda: clock.now, sleep=clock.sleep)
    sent, begun = 0, clock.now
    marks = []
    while clock.now - begun < 30:
        pace.let_through(pace.block_bytes)
        sent += pace.block_bytes
        marks.append((clock.now - begun, sent))
        clock.now += 0.3 * pace.block_bytes / rate  # the store takes a part of the time
    for at, so_far in marks:
        assert so_far <= rate * at * 1.1 + pace.block_bytes
        assert so_far >= rate * at * 0.9


def test_time_that_was_not_used_is_not_made_up_for() -> None:
    clock = Clock()
    pace = Pace(1_000_000, clock=lambda: clock.now, sleep=clock.sleep)
    pace.let_through(1)
    clock.now += 1000
    begun = clock.now
    for _ in range(100):
        pace.let_through(100_000)
    assert clock.now - begun >= 9.8


@pytest.mark.parametrize("changed", [1_000_000, None])
def test_another_rate_counts_at_once_also_for_who_waits(changed: int | None) -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        pace.bytes_per_s = changed

    pace = Pace(1, clock=lambda: clock.now, sleep=sleep)
    begun = clock.now
    for _ in range(2):
        pace.let_through(1_000_000)
    assert clock.now - begun <= 1.01


def test_a_copy_keeps_to_the_pace_in_blocks_and_in_all(root: Path, far: Heard) -> None:
    nbytes = 500 * CHUNK_BYTES
    save(make_store(root), 10, nbytes=nbytes)
    clock, told = Clock(), []
    begun = clock.now
    pace = Pace(1_000_000, clock=lambda: clock.now, sleep=clock.sleep)
    with OpenSave(step_path(root, 10), files=Files()) as opened:
        assert send(opened, far, How(pace=pace, progress=told.append)) is Sent.REACHED
        assert told == sorted(told) and told[-1] == opened.nbytes
    assert 0.9 * nbytes / 1e6 <= clock.now - begun <= 1.1 * nbytes / 1e6


def test_whoever_is_told_to_end_does_not_wait_for_the_pace() -> None:
    pace = Pace(1)
    pace.let_through(10**9)
    pace._stop.set()
    with pytest.raises(Stopped):
        pace.let_through(1)


def test_back_off_grows_to_its_bound_and_is_never_the_same() -> None:
    back = Backoff(first_s=1, most_s=60)
    waits = [back.failed() for _ in range(2000)]
    assert all(0.5 <= wait <= 60 for wait in waits)
    assert waits[0] <= 1 and waits[3] <= 8 and min(waits[10:]) >= 30
    assert len(set(waits)) > 100
    back.succeeded()
    assert back.failed() <= 1 and back.failed(hopeless=True) >= 30
