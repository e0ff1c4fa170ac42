"""What readers see: no lock, no write, no surprise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt_core
from ckpt_core.errors import ConfigError, NotCommitted, RestoreError
from ckpt_core.store import check_layout, committed_steps, resolve, step_path
from tests.store.harness import make_store, save


@pytest.fixture
def filled(root: Path) -> Path:
    store = make_store(root, keep_last=None)
    store.open()
    for step in (300, 100, 200):
        save(store, step)
    store.close()
    return root


def test_steps_are_ascending_numbers_whatever_the_order_of_saving(filled: Path) -> None:
    assert committed_steps(filled) == (100, 200, 300)


def test_steps_beyond_12_digits_still_sort_as_numbers(root: Path) -> None:
    store = make_store(root)
    store.open()
    for step in (999_999_999_999, 10**12, 10**17):
        save(store, step)
    assert store.steps() == (999_999_999_999, 10**12, 10**17)
    assert store.latest() == 10**17
    store.close()


def test_links_files_and_lookalikes_are_no_steps(filled: Path, tmp_path: Path) -> None:
    (filled / "step-000000000400").symlink_to(step_path(filled, 100))
    (filled / "step-000000000500").write_text("")
    for name in ("step-5", "step-0000000000500", "step-000000000600.tmp", "STEP-000000000600"):
        (filled / name).mkdir()
    assert committed_steps(filled) == (100, 200, 300)


def test_a_root_means_its_newest_step_and_a_step_means_itself(filled: Path) -> None:
    assert resolve(filled) == step_path(filled, 300)
    assert resolve(step_path(filled, 100)) == step_path(filled, 100)


def test_an_exported_copy_with_another_name_is_a_step(filled: Path, tmp_path: Path) -> None:
    shutil.copytree(step_path(filled, 200), tmp_path / "best")
    assert resolve(tmp_path / "best") == tmp_path / "best"


def test_a_root_with_a_foreign_manifest_still_means_its_newest_step(filled: Path) -> None:
    (filled / "manifest.json").write_text("{}")
    assert resolve(filled) == step_path(filled, 300)


def test_a_step_that_is_not_there_names_the_nearest(filled: Path) -> None:
    with pytest.raises(
        NotCommitted, match=r"step 210 is not committed.*nearest: 100, 200, 300"
    ) as e:
        resolve(step_path(filled, 210))
    assert e.value.step == 210


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda root: None, "there is no such directory"),
        (lambda root: root.mkdir(), "it is empty"),
        (lambda root: (root / "logs").mkdir(parents=True), "found logs"),
        (
            lambda root: (root / ".inflight" / "x").mkdir(parents=True),
            "1 save begun and not committed",
        ),
    ],
)
def test_a_root_without_steps_says_what_was_found(root: Path, make: object, text: str) -> None:
    assert callable(make)
    make(root)
    with pytest.raises(NotCommitted, match=text):
        resolve(root)


def test_an_attempt_is_no_step_even_when_it_has_a_manifest(root: Path) -> None:
    attempt = root / ".inflight" / "000000000007-0123abcd"
    attempt.mkdir(parents=True)
    (attempt / "manifest.json").write_text("{}")
    with pytest.raises(NotCommitted, match="was not committed"):
        resolve(attempt)


def test_a_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(RestoreError, match="is a file"):
        resolve(tmp_path / "model.pt")


def test_readers_change_nothing(filled: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in [filled, *filled.rglob("*")]}
    (filled / ".lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in [filled, *filled.rglob("*")]}
    committed_steps(filled)
    resolve(filled)
    store = make_store(filled)
    assert (store.steps(), store.latest(), store.pinned()) == ((100, 200, 300), 300, frozenset())
    assert before == {path: path.stat().st_mtime_ns for path in [filled, *filled.rglob("*")]}


@pytest.mark.parametrize("kind", [str, Path])
def test_everybody_may_ask_where_a_step_lies(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert ckpt_core.step_path(kind("ckpts"), 5) == Path("ckpts/step-000000000005")
    assert ckpt_core.step_path(kind("~/ckpts"), 0) == Path("/home/me/ckpts/step-000000000000")
    for step in (-1, 10**18, "5", 2.5, True):
        with pytest.raises(ConfigError, match="step="):
            ckpt_core.step_path(kind("ckpts"), step)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is a URL"):
        ckpt_core.step_path("s3://bucket/run", 5)


@pytest.mark.parametrize("name", ["", "logs", "step-000000000005"])
def test_neither_a_step_nor_a_place_within_one_is_a_root(filled: Path, name: str) -> None:
    step = step_path(filled, 100)
    with pytest.raises(ConfigError, match=rf"{step}.*give .*{filled}|{step}.*give that root"):
        check_layout(step / name)


@pytest.mark.parametrize("name", ["step-000000000400", "step-000000000400/mine"])
def test_nor_is_a_place_that_would_be_a_step_or_within_one(
    filled: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "link").symlink_to(filled / name)
    for root in (filled / name, tmp_path / "link"):
        with pytest.raises(ConfigError, match=f"give the root, {filled},|give that root"):
            check_layout(root)
        with pytest.raises(ConfigError, match="give"):
            ckpt_core.Checkpointer(root)
    assert committed_steps(filled) == (100, 200, 300)


def test_nor_is_one_of_that_name_in_no_root_but_what_lies_in_such_a_directory_is(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="has the name of a step"):
        check_layout(tmp_path / "step-000000000400")
    check_layout(tmp_path / "step-000000000400" / "mine")


def test_nor_is_a_place_that_lies_within_a_step_by_way_of_a_link(
    filled: Path, tmp_path: Path
) -> None:
    step = step_path(filled, 100)
    (tmp_path / "link").symlink_to(step)
    with pytest.raises(ConfigError, match=f"lies within {step}, which the root {filled} may"):
        check_layout(tmp_path / "link" / "mine")


def test_nor_is_a_directory_of_files_or_a_place_within_one(tmp_path: Path) -> None:
    with ckpt_core.Checkpointer(tmp_path / "root") as ck:
        files = ck.begin_files(1, "best")
        files.add("m.bin", {"a": 1})
        best = files.seal().committed.result(60)
    with pytest.raises(ConfigError, match=f"{best} is one step, or a directory of files, and no"):
        check_layout(best)
    with pytest.raises(ConfigError, match=f"lies within {best}, which the root"):
        check_layout(best / "mine")
    check_layout(tmp_path / "root" / "mine")


@pytest.mark.parametrize("name", [".inflight", ".slots", ".corrupt", ".pins", ".levels/aside"])
def test_no_place_that_a_root_has_for_itself_is_a_root(filled: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"lies within .*which the root {filled} may delete"):
        check_layout(filled / name)
    check_layout(filled.parent / name)


def test_a_copy_of_a_step_is_no_root_and_beside_a_manifest_of_something_else_is_one(
    filled: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(step_path(filled, 100), copy)
    with pytest.raises(
        ConfigError, match=f"{copy} is one step, or a directory of files, and no root"
    ):
        check_layout(copy)
    (copy / "manifest.json").write_text('{"name": "of another program"}')
    check_layout(copy)
    check_layout(filled)
