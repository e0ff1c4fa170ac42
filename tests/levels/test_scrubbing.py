"""Damage is found wherever it is, and repaired from wherever the save is whole."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from ckpt_core import verify
from ckpt_core.levels import Away, Scrubbed, open_far, places_of, push, scrub, write_plan
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.options import Level
from ckpt_core.store import committed_steps, step_path
from ckpt_core.system.files import Files
from tests.crash.warm import Warm
from tests.levels import named_making
from tests.levels.agents import plan_of
from tests.levels.restoring import fill, opened, shard_in
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import PeerServer
from tests.restore.harness import FailingReads, flip
from tests.restore.ranks import write_ranks
from tests.restore.test_together import job

Harm = Callable[[Path], None]


def scrubbed(*places: Path | str, **options: object) -> list[Scrubbed]:
    return [*scrub([str(one) for one in places], progress=lambda *_: None, **options)]  # type: ignore[arg-type]


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """A root, and a level that has the same steps."""
    fill(tmp_path / "root", 10, 20)
    shutil.copytree(tmp_path / "root", tmp_path / "level")
    return tmp_path / "root", tmp_path / "level"


def flipped(step: Path) -> None:
    flip(step / "shard-00000-0.safetensors", 9000)


def cut(step: Path) -> None:
    os.truncate(step / "shard-00000-0.safetensors", 5000)


def lost(step: Path) -> None:
    (step / "shard-00000-0.safetensors").unlink()


def bad_rank(step: Path) -> None:
    flip(step / "rank-00000.json", 30)


def no_rank(step: Path) -> None:
    (step / "rank-00000.json").unlink()


def bad_manifest(step: Path) -> None:
    (step / "manifest.json").write_text("{}")


HARMS: list[Harm] = [flipped, cut, lost, bad_rank, no_rank, bad_manifest]


def test_places_that_are_sound_are_read_and_left_alone(both: tuple[Path, Path]) -> None:
    found = scrubbed(*both)
    assert [(one.copy.step, one.ok, one.damage) for one in found] == [
        (10, True, ()),
        (20, True, ()),
    ] * 2
    size = shard_in(both[0], 10).stat().st_size
    assert all(one.checked_bytes > size and not one.source for one in found)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("side", [0, 1])
def test_a_damaged_step_of_a_directory_is_replaced_from_the_other_one(
    both: tuple[Path, Path], harm: Harm, side: int
) -> None:
    harm(step_path(both[side], 20))
    looked = scrubbed(*both, dry_run=True)
    assert [one.ok for one in looked].count(False) == 1
    if harm is not bad_manifest:
        assert not verify(both[side]).ok, "and nothing was changed"
    found = scrubbed(*both)
    (one,) = [one for one in found if one.damage]
    assert one.ok and one.url == str(both[side]) and one.source == str(both[1 - side])
    assert verify(both[side]).ok and committed_steps(both[side]) == (10, 20)
    assert not any(one.damage for one in scrubbed(*both))


def test_what_is_whole_nowhere_is_left_and_said(both: tuple[Path, Path]) -> None:
    for place in both:
        flipped(step_path(place, 20))
    found = scrubbed(*both)
    assert [one.ok for one in found] == [True, False] * 2
    assert "expected xxh3" in found[1].left
    (alone,) = [one for one in scrubbed(both[0]) if not one.ok]
    assert "no other place" in alone.left
    assert [*DirectoryFar(both[0], files=Files()).steps()] == [10, 20]


def test_another_save_of_the_step_is_no_source(both: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.rmtree(both[1])
    write_ranks(both[1], 20, job(20, 1, attempt="9999abcd"))
    flipped(step_path(both[0], 20))
    assert [one.ok for one in scrubbed(*both)] == [True, False, True]


def test_a_step_of_a_newer_release_is_no_damage_that_may_be_replaced(
    both: tuple[Path, Path],
) -> None:
    path = step_path(both[0], 20) / "manifest.json"
    body = path.read_bytes()[:-28].replace(b'"version":1', b'"version":99')
    newer = b'%s,"xxh3":"%s"}\n' % (body, xxhash.xxh3_64_hexdigest(body).encode())
    path.write_bytes(newer)
    (one,) = [one for one in scrubbed(*both) if not one.ok]
    assert "99" in one.left and not one.source and path.read_bytes() == newer


def test_what_this_user_may_not_read_is_no_damage_that_may_be_replaced(
    both: tuple[Path, Path],
) -> None:
    step = step_path(both[0], 20)
    before = (step / "shard-00000-0.safetensors").stat().st_ino
    refusing = FailingReads(f"root/{step.name}/shard", errno.EACCES)
    (one,) = [one for one in scrubbed(*both, files=refusing) if not one.ok]
    assert one.is_refused and not one.damage and "could not be read" in one.left
    assert (step / "shard-00000-0.safetensors").stat().st_ino == before


def test_a_root_that_somebody_writes_to_is_left_to_the_next_restore(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.levels.by_hand.scrubbing._BUSY_S", 0.0)
    flipped(step_path(both[0], 20))
    flipped(step_path(both[1], 10))
    with opened(both[0]):
        found = scrubbed(*both)
    (left,) = [one for one in found if not one.ok]
    assert left.url == str(both[0]) and "A restore there replaces the step" in left.left
    assert verify(both[1]).ok, "reading from a root that is in use disturbs nobody"


def test_a_step_that_is_retired_meanwhile_is_no_damage_and_does_not_come_back(
    both: tuple[Path, Path],
) -> None:
    flipped(step_path(both[0], 20))

    class Retiring(Files):
        def __init__(self, root: Path) -> None:
            self.root = root

        def fill(self, fd: int, buffer: memoryview, offset: int) -> int:
            # While it is read, before the lock is taken.
            if step_path(self.root, 20).exists():
                shutil.rmtree(step_path(self.root, 20))
            return super().fill(fd, buffer, offset)

    found = scrubbed(*both, files=Retiring(both[0]))
    assert all(one.ok for one in found) and committed_steps(both[0]) == (10,)


def test_several_scrubs_at_once_repair_it_and_disturb_nobody(both: tuple[Path, Path]) -> None:
    flipped(step_path(both[0], 20))
    answers: list[list[Scrubbed]] = []
    threads = [threading.Thread(target=lambda: answers.append(scrubbed(*both))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 3 and verify(both[0]).ok
    assert any(one.source for answer in answers for one in answer)


def test_a_part_of_one_node_is_repaired_from_a_place_that_has_it_all(tmp_path: Path) -> None:
    saved = job(20, 4)
    write_ranks(tmp_path / "node", 20, saved, members=[2, 3])
    write_ranks(tmp_path / "copy", 20, saved, members=[2, 3])
    flip(shard_in(tmp_path / "node", 20, 3), 9000)
    (one,) = [one for one in scrubbed(tmp_path / "node", tmp_path / "copy") if one.damage]
    assert one.ok and verify(tmp_path / "node").ok


def test_a_damaged_file_of_a_tag_is_repaired_and_its_pointer_stays(tmp_path: Path) -> None:
    root, level = tmp_path / "root", tmp_path / "level"
    named_making.save(root, 1)
    named_making.save(root, 2)
    shutil.copytree(root, level)
    file = root / "global_step1" / named_making.FILES[1]
    before = file.read_bytes()
    for harm in (lambda: named_making.damage(file), file.unlink):
        harm()
        (one,) = [one for one in scrubbed(root, level) if one.damage]
        assert one.ok and one.source == str(level) and one.copy.directory == "global_step1"
        assert file.read_bytes() == before and (root / "latest").read_text() == "global_step2"
    (root / "global_step2" / "manifest.json").write_text("{}")
    assert [one.source for one in scrubbed(root, level) if one.damage] == [str(level)]
    assert named_making.whole(root) == {"global_step1": 1, "global_step2": 2}


# -- at a peer -------------------------------------------------------------------------------------


@pytest.fixture
def peer() -> Iterator[PeerServer]:
    with PeerServer() as server, in_environment(server.environ()):
        yield server


@needs_store
def test_a_damaged_copy_at_a_peer_is_repaired_file_by_file_and_repairs_a_root(
    peer: PeerServer, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    fill(root, 10, 20)
    for step in (10, 20):
        push(step_path(root, step), Level(peer.url()), progress=lambda *_: None)
    write_plan(root, plan_of(Level(peer.url())))
    assert places_of(root) == [str(root), peer.url()]
    kept = peer.kept / "run"
    for harm in (flipped, cut, lost, bad_rank, no_rank):
        (folder,) = [one for one in step_path(kept, 20).iterdir() if one.is_dir()]
        manifest = (step_path(kept, 20) / "manifest.json").read_bytes()
        harm(folder)
        assert [one.ok for one in scrubbed(*places_of(root), dry_run=True)].count(False) == 1
        found = scrubbed(*places_of(root), bytes_per_s=1 << 30)
        (one,) = [one for one in found if one.damage]
        assert one.ok and one.source == str(root), harm
        assert (step_path(kept, 20) / "manifest.json").read_bytes() == manifest
        assert verify(kept).ok
    flipped(step_path(root, 20))
    assert all(one.ok for one in scrubbed(*places_of(root)))
    assert verify(root).ok
    with open_far(peer.url()) as far:
        assert [*far.steps()] == [10, 20]


@needs_store
def test_a_place_that_is_away_is_said_once_all_others_were_read_and_repaired(
    peer: PeerServer, both: tuple[Path, Path]
) -> None:
    root, level = both
    away = peer.url().replace(str(peer.port), "1")
    flipped(step_path(root, 20))
    found = read_before_it_is_said(away, str(root), str(level))
    assert [one.ok for one in found] == [True] * 4 and found[1].source == str(level)
    assert verify(root).ok
    flipped(step_path(root, 20))
    assert "cannot be reached" in read_before_it_is_said(away, str(root))[-1].left


def read_before_it_is_said(*places: str) -> list[Scrubbed]:
    found: list[Scrubbed] = []
    with pytest.raises(Away, match="cannot be reached"):
        found.extend(scrub(places, progress=lambda *_: None))
    return found


# -- kills -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """The process that children are forked from."""
    with Warm("tests.levels.scrub_kills") as process:
        yield process


@pytest.mark.parametrize("point", ["before", "after", "torn"])
def test_a_kill_at_any_file_operation_of_a_repair_loses_nothing(
    warm: Warm, point: str, tmp_path: Path
) -> None:
    count = warm.call("tests.levels.scrub_kills:kill_everywhere", point=point, place=str(tmp_path))
    assert count > 0
