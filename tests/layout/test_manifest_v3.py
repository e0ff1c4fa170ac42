"""What version 3 is: a directory of files that have names of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.errors import ConfigError
from ckpt_core.layout import (
    ChunkSum,
    FileEntry,
    Manifest,
    RankManifest,
    is_directory_name,
    is_file_name,
    parents_of,
)
from tests.layout.manifests import (
    JSON,
    PATH,
    RANK,
    RANK_2,
    RANK_3,
    STEP_2,
    STEP_3,
    SUM,
    Either,
    edit,
    plain,
    refused,
    sealed,
    survives,
)

BAD_PARTS = [
    *("", ".", "..", ".hidden", " x", "x ", "a\nb", "a\x00b", "a\x7fb", "x" * 201, "ö" * 101),
    *("\ud800", "x/", "/x", "a//b", "a/../b", "a/.b/c", "./a"),
]
BAD_FILES = [*BAD_PARTS, "manifest.json", "rank-00000.json", "rank-x.json", "a/" * 501 + "a"]
BAD_DIRECTORIES = [*BAD_PARTS, "a/b", "lost+found", "step-000000000120", "step-123456789012345678"]


def named(name: Any) -> FileEntry:
    return FileEntry(name, 7, (ChunkSum(7, SUM),))


def test_a_directory_makes_a_manifest_one_of_version_3() -> None:
    assert STEP_3.version == 3
    assert plain(STEP_3)["directory"] == "global_step120"
    assert "directory" not in plain(STEP_2)
    assert dataclasses.replace(STEP_3, world_size=1, ranks=STEP_3.ranks[:0]).version == 3


def test_one_rank_may_save_a_directory() -> None:
    alone = dataclasses.replace(
        STEP_3,
        world_size=1,
        ranks=(dataclasses.replace(STEP_3.ranks[0], rank=0, file="rank-00000.json"),),
    )
    assert Manifest.decode(alone.encode(), path=PATH) == alone


def test_a_rank_has_files_and_nothing_else() -> None:
    assert sorted(plain(RANK_3)) == ["files", "format", "rank", "skeleton", "version"]
    for change in ({"leaves": RANK.leaves}, {"slices": RANK_2.slices}):
        with pytest.raises(ConfigError, match="leaves and slices"):
            dataclasses.replace(RANK_3, **change).encode()


def test_keys_of_steps_are_ignored_in_it() -> None:
    obj = plain(RANK_3) | {"leaves": plain(RANK_2)["leaves"], "slices": None}
    assert RankManifest.decode(sealed(obj), path=PATH) == RANK_3


def test_a_rank_without_files_comes_back() -> None:
    empty = dataclasses.replace(RANK_3, files=())
    assert RankManifest.decode(empty.encode(), path=PATH) == empty


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_cannot_be_called_so(name: str) -> None:
    assert not is_file_name(name)
    with pytest.raises(ConfigError):
        dataclasses.replace(RANK_3, files=(named(name),)).encode()
    obj = plain(RANK_3)
    obj["files"][0]["name"] = name
    refused(RANK_3, sealed(obj))


@pytest.mark.parametrize("name", BAD_DIRECTORIES)
def test_a_directory_cannot_be_called_so(name: str) -> None:
    assert not is_directory_name(name)
    with pytest.raises(ConfigError):
        dataclasses.replace(STEP_3, directory=name).encode()
    refused(STEP_3, sealed(plain(STEP_3) | {"directory": name}))


@pytest.mark.parametrize("name", [*BAD_DIRECTORIES, "global_step120"])
def test_a_pointer_has_a_plain_name_and_not_that_of_the_directory(name: str) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(STEP_3, pointer=name).encode()
    refused(STEP_3, sealed(plain(STEP_3) | {"pointer": name}))


def test_what_was_to_name_a_directory_is_noted() -> None:
    assert plain(STEP_3)["pointer"] == "latest"
    free = dataclasses.replace(STEP_3, pointer=None)
    assert Manifest.decode(free.encode(), path=PATH) == free
    assert "pointer" not in plain(free)


@pytest.mark.parametrize("name", ["x", "a.pt", "a b", "ö.pt", "step-5", "latest", "x" * 200])
def test_other_names_will_do(name: str) -> None:
    assert is_directory_name(name) and is_file_name(name) and is_file_name(f"{name}/{name}")


EDITS: list[tuple[Either, tuple[Any, ...], Any]] = [
    *[(STEP_3, ("directory",), value) for value in (KeyError, None, 1, ["x"])],
    *[(STEP_3, ("pointer",), value) for value in (1, ["x"], "")],
    *[(STEP_3, ("world_size",), value) for value in (0, 5, "8", None)],
    *[(STEP_3, ("version",), value) for value in ("3", None, 3.0)],
    *[(RANK_3, ("files", 0, "name"), value) for value in (None, 1, ["x"], "höhe/layer 01.pt")],
    *[(RANK_3, ("files", 0, "name"), value) for value in ("höhe", "höhe/layer 01.pt/x")],
    *[(RANK_3, ("files", 0, "nbytes"), value) for value in (12288, 12290, -1, 2**70, "7")],
    *[(RANK_3, ("files", 0, "chunks"), value) for value in ([], [[12289]], [[12289, "x"]])],
    *[(RANK_3, (key,), KeyError) for key in ("files", "rank", "skeleton")],
]


@pytest.mark.parametrize(("manifest", "place", "value"), EDITS)
def test_what_breaks_a_rule_is_corrupt(
    manifest: Either, place: tuple[Any, ...], value: Any
) -> None:
    obj = plain(manifest)
    edit(obj, place, value)
    refused(manifest, sealed(obj))


def test_a_step_has_no_directory() -> None:
    with pytest.raises(ConfigError, match="directory"):
        dataclasses.replace(STEP_2, directory="x", version=2).encode()
    found = Manifest.decode(sealed(plain(STEP_2) | {"directory": "x"}), path=PATH)
    assert found == STEP_2  # a key that version 2 does not know


def test_there_may_be_more_files_than_shards_but_not_any_number() -> None:
    many = [named(f"layer_{index}.pt") for index in range(10_001)]
    fits = dataclasses.replace(RANK_3, files=tuple(many[:-1]))
    assert RankManifest.decode(fits.encode(), path=PATH) == fits
    with pytest.raises(ConfigError, match="at most 10000"):
        dataclasses.replace(RANK_3, files=tuple(many)).encode()


def test_the_directories_of_names_are_all_that_they_lie_in() -> None:
    assert parents_of(["a/b/c", "a/d", "e"]) == {"a", "a/b"}


@given(st.text())
def test_any_text_is_judged(name: str) -> None:
    if is_file_name(name):
        assert ".." not in name.split("/") and not name.startswith("/")
    if is_directory_name(name):
        assert is_file_name(name) or name in ("manifest.json",) or name.startswith("rank-")


@given(st.sampled_from(["files", "directory", "ranks", "skeleton", "world_size"]), JSON)
def test_any_value_anywhere_is_read_or_refused(key: str, value: Any) -> None:
    survives(RANK_3, sealed(plain(RANK_3) | {key: value}))
    survives(STEP_3, sealed(plain(STEP_3) | {key: value}))
