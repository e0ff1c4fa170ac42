"""Directories of files come back from levels, with their pointer."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_core import (
    Checkpointer,
    ConfigError,
    CorruptCheckpoint,
    Level,
    RestoreError,
    RootBusy,
    bring_directory,
    verify,
)
from ckpt_core.levels.agent.copying import How, Sent, send
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.bring.named_bringing import Wish, bring_named
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Away, Copy
from ckpt_core.levels.named import NamedFiles, due_pointers
from ckpt_core.store import RootLock
from ckpt_core.system.files import Files
from tests.levels.agents import Agents, plan_of
from tests.levels.named_making import FILES, SMALL, damage, far_of, save, whole
from tests.levels.servers.azurite import AzuriteServer, needs_azurite
from tests.levels.servers.moto import MotoServer, needs_store


def take_on(root: Path, level: Path, *names: str) -> None:
    """What the agent does."""
    far = far_of(level)
    for name in names:
        there = far.directories().get(name)
        with OpenSave(root / name, files=Files()) as opened:
            how = How(replaces=None if there is None else there.attempt)
            assert send(opened, far, how) is Sent.REACHED
    here = NamedFiles(far_of(root)).look()
    due = due_pointers(here, there=far.directories(), pointed=far.pointers())
    for pointer, name in due.items():
        far.point(pointer, name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def level(tmp_path: Path) -> Path:
    return tmp_path / "level"


def bring(root: Path, *levels: Path, **more: str | None) -> str | None:
    wanted = more or {"pointer": "latest"}
    return bring_directory(root, [Level(str(one)) for one in levels], **wanted)


def content(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_an_empty_root_gets_the_newest_directory_and_the_pointer_byte_for_byte(
    root: Path, level: Path
) -> None:
    old, new = save(root, 10), save(root, 20)
    take_on(root, level, old, new)
    saved = content(root / new)
    shutil.rmtree(root)
    assert bring(root, level) == new
    assert content(root / new) == saved
    assert (root / "latest").read_text() == new
    assert verify(root / new).ok
    assert not (root / old).exists()
    assert torch.load(root / new / FILES[1])["w"][0] == 20
    save(root, 30)  # nothing is left that is in a writer's way


def test_no_process_of_training_opens_a_level(root: Path, level: Path) -> None:
    take_on(root, level, save(root, 10))
    shutil.rmtree(root)
    # In a process of its own: other tests of this one may have opened a store.
    program = (
        "import sys; from pathlib import Path; from ckpt_core import Level; "
        "from ckpt_core.levels import bring_directory; "
        f"bring_directory(Path({str(root)!r}), [Level({str(level)!r})], pointer='latest'); "
        "assert 'obstore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert (root / "latest").is_file()


def test_nothing_is_brought_where_no_level_has_anything(root: Path, level: Path) -> None:
    assert bring(root, level) is None
    assert not root.exists()
    take_on(root, level, save(root, 10, pointer=None))
    shutil.rmtree(root)
    assert bring(root, level) is None


def test_of_several_saves_of_a_name_the_one_made_last_is_brought(
    root: Path, level: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    save(level, 10)
    saved = content(far / save(far, 10))
    assert bring(root, level, far) == "global_step10"
    assert content(root / "global_step10") == saved


def test_the_nearest_level_is_taken_of_those_that_have_the_newest(
    root: Path, level: Path, tmp_path: Path
) -> None:
    further = tmp_path / "further"
    old, new = save(root, 10), save(root, 20)
    take_on(root, level, old)
    take_on(root, further, old, new)
    shutil.rmtree(root)
    fars = [far_of(one) for one in (level, further)]
    found = bring_named(fars, Wish(root, pointer="latest"), files=Files())
    assert (found.directory, found.url) == (new, str(further))
    take_on(root, level, new)
    shutil.rmtree(root)
    assert bring_named(fars, Wish(root, pointer="latest"), files=Files()).url == str(level)


def test_a_damaged_one_is_passed_over_for_the_next_level_and_then_for_an_older_one(
    root: Path, level: Path, tmp_path: Path
) -> None:
    further = tmp_path / "further"
    old, new = save(root, 10), save(root, 20)
    for place in (level, further):
        take_on(root, place, old, new)
    shutil.rmtree(root)
    damage(level / new / FILES[1])
    with pytest.warns(UserWarning, match="expert.pt"):
        assert bring(root, level, further) == new
    assert verify(root / new).ok
    shutil.rmtree(root)
    damage(further / new / FILES[0])
    with pytest.warns(UserWarning, match="of step 20") as told:
        assert bring(root, level, further) == old
    assert ["expert.pt" in str(told[0].message), "model.pt" in str(told[1].message)] == [True] * 2
    assert (root / "latest").read_text() == old
    assert not list((root / ".inflight").iterdir())


def test_where_all_are_damaged_that_is_said_and_nothing_is_there(root: Path, level: Path) -> None:
    name = save(root, 10)
    take_on(root, level, name)
    shutil.rmtree(root)
    damage(level / name / FILES[0])
    with pytest.raises(CorruptCheckpoint, match=r"model\.pt"):
        bring(root, level)
    assert not (root / name).exists() and not (root / "latest").exists()


def test_a_directory_that_the_agent_had_not_pointed_to_yet_counts(root: Path, level: Path) -> None:
    old, new = save(root, 10), save(root, 20)
    take_on(root, level, old, new)
    (level / "latest").write_text(old)  # killed between the two
    shutil.rmtree(root)
    assert bring(root, level) == new


def test_one_is_asked_for_by_its_name_and_replaces_what_is_damaged(root: Path, level: Path) -> None:
    old, new = save(root, 10), save(root, 20)
    take_on(root, level, old, new)
    damage(root / old / FILES[0])
    assert bring(root, level, directory=old) == old
    assert verify(root / old).ok
    assert (root / "latest").read_text() == new
    assert bring(root, level, directory="another") is None


def test_only_a_newer_one_is_brought_where_one_will_do(root: Path, level: Path) -> None:
    old = save(root, 10)
    take_on(root, level, old, save(root, 20))
    newer = save(root, 30)
    assert bring(root, level, pointer="latest", newer_than=newer) is None
    assert bring(root, level, pointer="latest", newer_than=old) == "global_step20"
    assert (root / "latest").read_text() == newer, "never back"


@needs_store
@pytest.mark.parametrize("others", ["moto", pytest.param("azurite", marks=needs_azurite)])
def test_directories_go_to_an_object_store_and_come_back_with_their_pointer(
    others: str,
    request: pytest.FixtureRequest,
    root: Path,
    agents: Agents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server: MotoServer | AzuriteServer = request.getfixturevalue(others)
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    level = Level(server.url("named"), every=10, backlog=5)
    old, new = save(root, 10), save(root, 20)
    status = agents.run(root, plan_of(level))
    assert set(status.levels[0].files) == {old, new}, status
    saved = content(root / new)
    shutil.rmtree(root)
    assert bring_directory(root, [level], pointer="latest") == new
    assert content(root / new) == saved
    assert (root / "latest").read_text() == new
    save(root, 30, old)  # another save of a name that is there
    assert agents.run(root, plan_of(level, session=2)).levels[0].problem == ""
    shutil.rmtree(root)
    assert bring_directory(root, [level], directory=old) == old
    assert whole(root) == {old: 30}


def test_files_that_wait_to_be_written_again_are_left(root: Path, level: Path) -> None:
    take_on(root, level, save(root, 10))
    with Checkpointer(root, dataclasses.replace(SMALL, keep_last=1)) as ck:
        for step in (20, 30, 40):
            ck.save(step, {"w": torch.zeros(60_000)}).committed.result()
    slots = list((root / ".slots").iterdir())
    assert slots
    assert bring(root, level, directory="global_step10") == "global_step10"
    assert list((root / ".slots").iterdir()) == slots


class AwayFar(DirectoryFar):
    """Cannot be asked."""

    def directories(self) -> dict[str, Copy]:
        raise Away(f"{self.url}: it does not answer")


def test_a_level_that_cannot_be_asked_is_no_empty_one(
    root: Path, level: Path, tmp_path: Path
) -> None:
    wish = Wish(root, pointer="latest")
    fars = [AwayFar(tmp_path / "away", files=Files()), far_of(level)]
    with pytest.raises(RestoreError, match="it does not answer"):
        bring_named(fars, wish, files=Files())
    assert not root.exists()
    take_on(root, level, save(root, 10))
    shutil.rmtree(root)
    found = bring_named(fars, wish, files=Files())
    assert found.directory == "global_step10"
    assert "it does not answer" in found.problems[0]


def test_a_root_that_somebody_writes_to_is_left_alone(root: Path, level: Path) -> None:
    take_on(root, level, save(root, 10))
    lock = RootLock(root, files=Files())
    lock.acquire()
    try:
        with pytest.raises(RootBusy):
            bring(root, level)
    finally:
        lock.release()


def test_without_a_name_and_a_pointer_nothing_says_which(root: Path, level: Path) -> None:
    with pytest.raises(ConfigError, match="name a directory"):
        bring(root, level, directory=None)
