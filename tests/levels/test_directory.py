"""A directory as a further level: what is there is whole, whoever else is at work in it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ckpt_core.errors import ConfigError, NotCommitted
from ckpt_core.layout import ChunkSum, FileEntry, Manifest, RankEntry, RankManifest
from ckpt_core.levels import Away, Conflict, Copy
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.store import RootLock, StepStore, step_path
from ckpt_core.system.files import Files
from tests.levels.making import look, make_store, read_step, save
from tests.levels.sending import sent_to
from tests.store.harness import Killed, NoExchange, QuickFiles, interrupted

FILES = [QuickFiles, NoExchange]


@pytest.fixture
def far(tmp_path: Path) -> DirectoryFar:
    return DirectoryFar(tmp_path / "far", files=QuickFiles(), busy_s=0.1)


def test_a_copy_is_a_step_when_it_is_published_and_not_before(
    root: Path, far: DirectoryFar
) -> None:
    store = make_store(root)
    attempt = save(store, 10)
    copy = Copy(10, attempt)
    assert far.steps() == {} and far.files(copy) == {} and far.manifest(copy.target) is None
    for name in ("shard-00000-0.safetensors", "rank-00000.json"):
        data = (step_path(root, 10) / name).read_bytes()
        far.put(copy, name, iter([memoryview(data)]), len(data))
        assert far.steps() == {} and far.files(copy)[name] == len(data)
    manifest = (step_path(root, 10) / "manifest.json").read_bytes()
    assert far.publish(copy, manifest)
    assert far.steps() == {10: attempt} and far.manifest(copy.target) == manifest
    assert far.publish(copy, manifest), "a second time is no error"
    assert look(Path(far.url)) == {10: 0}
    buffer = bytearray(3)
    far.read_into(copy, "rank-00000.json", memoryview(buffer), 1)
    assert bytes(buffer) == data[1:4]


@pytest.mark.parametrize("kind", FILES)
def test_another_save_of_a_step_takes_its_place_only_where_it_is_expected(
    root: Path, tmp_path: Path, kind: type[Files]
) -> None:
    far = DirectoryFar(tmp_path / "far", files=kind(), busy_s=0.1)
    store = make_store(root)
    first = save(store, 10, mark=1)
    assert sent_to(far, root, 10)
    save(store, 10, mark=2)
    assert not sent_to(far, root, 10)
    assert not sent_to(far, root, 10, replaces="000000000010-00000000")
    assert look(Path(far.url)) == {10: 1}
    assert sent_to(far, root, 10, replaces=first)
    assert look(Path(far.url)) == {10: 2}
    assert not list((Path(far.url) / ".inflight").iterdir())


def test_what_blocks_raise_comes_out_and_no_file_is_there(far: DirectoryFar) -> None:
    copy = Copy(1, "000000000001-00000001")

    def blocks() -> object:
        yield memoryview(b"ab")
        raise KeyError("damaged")

    with pytest.raises(KeyError):
        far.put(copy, "a", blocks(), 4)  # type: ignore[arg-type]
    assert far.files(copy) == {}
    assert not list((Path(far.url) / ".inflight" / copy.attempt).iterdir())


def test_a_writer_of_that_root_keeps_a_copy_from_being_published_and_is_named(
    root: Path, far: DirectoryFar
) -> None:
    save(make_store(root), 10)
    other = make_store(Path(far.url))
    with pytest.raises(Away, match=f"pid {os.getpid()}") as caught:
        sent_to(far, root, 10)
    assert not caught.value.hopeless
    other.close()
    assert sent_to(far, root, 10)


def test_a_copy_waits_for_a_writer_that_is_gone_in_a_moment(root: Path, tmp_path: Path) -> None:
    far = DirectoryFar(tmp_path / "far", files=QuickFiles(), busy_s=30)
    save(make_store(root), 10)
    (tmp_path / "far").mkdir()
    lock = RootLock(tmp_path / "far")
    lock.acquire()
    thread = threading.Timer(0.2, lock.release)
    thread.start()
    assert sent_to(far, root, 10)
    thread.join()


def test_a_repair_of_that_root_takes_a_copy_under_way_which_begins_anew(
    root: Path, far: DirectoryFar
) -> None:
    attempt = save(make_store(root), 10)
    copy, manifest = Copy(10, attempt), (step_path(root, 10) / "manifest.json").read_bytes()
    data = (step_path(root, 10) / "rank-00000.json").read_bytes()
    far.put(copy, "rank-00000.json", iter([memoryview(data)]), len(data))
    make_store(Path(far.url)).close()
    assert far.files(copy) == {}
    with pytest.raises(Away, match="begins anew"):
        far.publish(copy, manifest)
    assert sent_to(far, root, 10)


def test_retired_steps_are_gone_but_for_those_that_are_pinned_there(
    root: Path, far: DirectoryFar
) -> None:
    store = make_store(root)
    for step in (10, 20, 30):
        save(store, step)
        sent_to(far, root, step)
    far.pin(20, True)
    assert far.pins() == {20}
    far.retire([Copy(step, "").target for step in (10, 20, 40)])
    assert look(Path(far.url)) == {20: 0, 30: 0}
    assert not list((Path(far.url) / ".inflight").iterdir())
    far.pin(20, False)
    with pytest.raises(NotCommitted):
        far.pin(10, True)
    far.retire([Copy(20, "").target])
    assert set(far.steps()) == {30} and far.pins() == frozenset()


def test_sweeping_spares_what_is_young_or_ours(root: Path, far: DirectoryFar) -> None:
    mine, young, old = (Copy(step, f"{step:012d}-0000000{step}") for step in (1, 2, 3))
    for copy in (mine, young, old):
        far.put(copy, "a", iter([memoryview(b"a")]), 1)
    inflight = Path(far.url) / ".inflight"
    for copy in (mine, old):
        for path in (inflight / copy.attempt, inflight / copy.attempt / "a"):
            os.utime(path, (1, 1))
    (inflight / "x.retired").mkdir()
    far.sweep([mine])
    assert {path.name for path in inflight.iterdir()} == {mine.attempt, young.attempt}


def test_what_was_being_replaced_or_retired_in_a_kill_has_its_name_again(
    root: Path, far: DirectoryFar
) -> None:
    store = make_store(root)
    for step in (10, 20):
        save(store, step)
        sent_to(far, root, step)
    place = Path(far.url)
    step_path(place, 10).rename(place / ".inflight" / "000000000010-aaaaaaaa.replaced")
    assert set(far.steps()) == {20}
    far.sweep([])
    assert look(place) == {10: 0, 20: 0}


def test_a_save_that_was_replaced_does_not_come_back_when_its_successor_goes(
    root: Path, tmp_path: Path
) -> None:
    def die(name: str, args: tuple[Any, ...]) -> None:
        if name == "rename" and args[0].name.endswith(".replaced"):
            raise Killed

    store, place = make_store(root), tmp_path / "far"
    first = save(store, 10, mark=1)
    assert sent_to(DirectoryFar(place, files=NoExchange()), root, 10)
    save(store, 10, mark=2)
    with pytest.raises(Killed):
        sent_to(DirectoryFar(place, files=interrupted(NoExchange, die)), root, 10, replaces=first)
    assert look(place) == {10: 2} and len(list((place / ".inflight").iterdir())) == 1
    far = DirectoryFar(place, files=NoExchange())
    far.retire([Copy(10, "").target])
    assert far.steps() == {} and not list((place / ".inflight").iterdir())
    far.sweep([])
    assert far.steps() == {}


def test_a_directory_that_was_replaced_does_not_come_back_either(far: DirectoryFar) -> None:
    place = Path(far.url)
    (place / "tag").mkdir(parents=True)
    (place / ".inflight" / "000000000007-0000000a.tag.replaced").mkdir(parents=True)
    far.retire(["tag"])
    far.sweep([])
    assert not (place / "tag").exists() and not list((place / ".inflight").iterdir())


def test_words_are_written_by_whoever_has_seen_what_was_there(far: DirectoryFar) -> None:
    assert far.read_word("run.json") is None
    tag = far.write_word("run.json", b"1", over=None)
    word = far.read_word("run.json")
    assert word is not None and (word.data, word.tag) == (b"1", tag)
    for over in (None, "other"):
        with pytest.raises(Conflict):
            far.write_word("run.json", b"2", over=over)
    assert far.write_word("run.json", b"2", over=tag) != tag
    with pytest.raises(Conflict):
        far.write_word("run.json", b"3", over=tag)
    with pytest.raises(Conflict):
        far.write_word("lease.json", b"3", over=tag)
    assert far.steps() == {}


def test_a_word_whose_writer_was_killed_leaves_nothing_behind_the_next_one(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Killing(QuickFiles):
        def rename(self, source: Path, target: Path) -> None:
            raise Killed

    def write(files: QuickFiles) -> None:
        DirectoryFar(tmp_path, files=files).write_word("run.json", b"1", over=None)

    for _ in range(2):
        with pytest.raises(Killed):
            write(Killing())
    write(QuickFiles())
    assert sorted(os.listdir(tmp_path / ".levels")) == [".words", "run.json"]


def test_of_many_that_write_a_word_at_once_each_sees_the_one_before(tmp_path: Path) -> None:
    def count(times: int) -> None:
        far = DirectoryFar(tmp_path / "far", files=QuickFiles())
        while times:
            word = far.read_word("n")
            number = 0 if word is None else int(word.data)
            try:
                tag = None if word is None else word.tag
                far.write_word("n", str(number + 1).encode(), over=tag)
                times -= 1
            except Conflict:
                continue

    threads = [threading.Thread(target=count, args=(10,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "far" / ".levels" / "n").read_bytes() == b"40"


def test_pointers_and_directories_of_files(far: DirectoryFar, tmp_path: Path) -> None:
    attempt = "000000000007-0000000a"
    copy = Copy(7, attempt, "global_step7")
    data = b"x" * 10

    entry = FileEntry("a/b.pt", 10, (ChunkSum(10, None),))
    rank = RankManifest(0, (entry,), (), None, version=3).encode()
    row = RankEntry(0, "rank-00000.json", len(rank), xxhash.xxh3_64_hexdigest(rank))
    manifest = Manifest(7, attempt, 1.0, (row,), 10, 1, 3, "global_step7").encode()
    with pytest.raises(Away, match="is not there"):
        far.point("latest", "global_step7")
    far.put(copy, "a/b.pt", iter([memoryview(data)]), 10)
    far.put(copy, "rank-00000.json", iter([memoryview(rank)]), len(rank))
    assert far.directories() == {}
    assert far.publish(copy, manifest)
    far.point("latest", "global_step7")
    assert far.directories() == {"global_step7": copy} and far.steps() == {}
    assert far.pointers() == {"latest": "global_step7"}
    assert far.files(copy) == {"a/b.pt": 10, "rank-00000.json": len(rank)}
    far.retire(["global_step7"])
    assert far.directories() == {} and far.pointers() == {}


def test_a_directory_of_somebody_else_is_left_alone(far: DirectoryFar) -> None:
    attempt = "000000000007-0000000a"
    copy = Copy(7, attempt, "mine")
    (Path(far.url) / "mine").mkdir(parents=True)
    (Path(far.url) / "mine" / "notes").write_text("x")
    row = RankEntry(0, "rank-00000.json", 1, "0" * 16)
    manifest = Manifest(7, attempt, 1.0, (row,), 10, 1, 3, "mine").encode()
    with pytest.raises(Away, match="somebody else's") as caught:
        far.publish(copy, manifest)
    assert caught.value.hopeless
    assert (Path(far.url) / "mine" / "notes").read_text() == "x"


def test_a_step_that_cannot_be_read_counts_for_nothing_and_is_moved_aside(
    root: Path, far: DirectoryFar, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_store(root), 10)
    sent_to(far, root, 10)
    manifest = step_path(Path(far.url), 10) / "manifest.json"
    manifest.write_bytes(b"garbage")
    assert far.steps() == {} and far.steps() == {}
    assert caplog.text.count("is left out") == 1
    assert sent_to(far, root, 10)
    assert read_step(Path(far.url), 10) == 0
    assert len(list((Path(far.url) / ".corrupt").iterdir())) == 1


def test_a_step_of_a_newer_release_is_left_alone(root: Path, far: DirectoryFar) -> None:
    save(make_store(root), 10)
    sent_to(far, root, 10)
    path = step_path(Path(far.url), 10) / "manifest.json"
    body = json.dumps({"format": "ckpt-core", "version": 99})[:-1].encode()
    newer = b'%s,"xxh3":"%s"}\n' % (body, xxhash.xxh3_64_hexdigest(body).encode())
    path.write_bytes(newer)
    with pytest.raises(Away, match="newer ckpt-core") as caught:
        sent_to(far, root, 10)
    assert caught.value.hopeless and path.read_bytes() == newer


def test_a_check_leaves_nothing_behind_and_says_what_is_wrong(tmp_path: Path) -> None:
    def check(name: str) -> None:
        DirectoryFar(tmp_path / name, files=Files()).check()

    check("not/there/yet")
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").mkdir()
    check("there")
    assert not list((tmp_path / "there").iterdir())
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        with pytest.raises(ConfigError, match="is no directory"):
            check(name)


def test_a_check_finds_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    class ReadOnly(Files):
        def create(self, path: Path, *, direct: bool = False) -> int:
            raise OSError(30, os.strerror(30), str(path))

    with pytest.raises(ConfigError, match="read-only"):
        DirectoryFar(tmp_path, files=ReadOnly()).check()


def test_a_level_directory_that_was_removed_is_made_anew(
    root: Path, far: DirectoryFar, tmp_path: Path
) -> None:
    store = make_store(root)
    for step in (10, 20):
        save(store, step)
    assert sent_to(far, root, 10)
    (tmp_path / "far").rename(tmp_path / "gone")
    assert far.steps() == {}
    assert sent_to(far, root, 20)
    assert look(tmp_path / "far") == {20: 0}


def test_a_level_is_a_root_like_any_other(root: Path, far: DirectoryFar) -> None:
    save(make_store(root), 10)
    sent_to(far, root, 10)
    far.write_word("run.json", b"{}", over=None)
    store: StepStore = make_store(Path(far.url))
    save(store, 20)
    store.close()
    assert look(Path(far.url)) == {10: 0, 20: 0}


def test_of_steps_that_have_gone_nothing_is_kept(tmp_path: Path) -> None:
    far = DirectoryFar(tmp_path, files=QuickFiles())
    for number in (10, 20):
        (tmp_path / f"step-{number:012d}").mkdir()
        (tmp_path / f"step-{number:012d}" / "manifest.json").write_text("{}")
    assert far.steps() == {} and len(far._looked._known) == 2
    shutil.rmtree(tmp_path / "step-000000000010")
    assert far.steps() == {} and list(far._looked._known) == ["step-000000000020"]
