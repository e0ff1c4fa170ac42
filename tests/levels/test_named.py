"""Which directories of files go to a level, and what pointers name there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core import Checkpointer, Level
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.named import Named, NamedFiles, due_pointers, wanted_directories
from tests.levels.named_making import SMALL, far_of, save_in

FAR = Level("/far", every=10)


def look(root: Path) -> dict[str, Named]:
    return {one.name: one for one in source_of(root).look()}


def source_of(root: Path) -> NamedFiles:
    return NamedFiles(far_of(root))


def named(step: int, name: str = "", *, digits: str = "0" * 8, current: bool = False) -> Named:
    name = name or f"global_step{step}"
    now = frozenset({"latest"} if current else ())
    return Named(Copy(step, f"{step:012d}-{digits}", name), frozenset({"latest"}), now)


def at(*those: Named) -> dict[str, Copy]:
    return {one.name: one.copy for one in those}


# -- what a root has -----------------------------------------------------------------------------


def test_a_root_shows_its_directories_and_what_names_or_was_to_name_them(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        save_in(ck, 1, "one")
        save_in(ck, 2, "two")
        save_in(ck, 3, "three", pointer=None)
        ck.save(4, {"w": torch.ones(3)})
    found = look(tmp_path)
    assert set(found) == {"one", "two", "three"}
    assert [found[name].copy.step for name in ("one", "two", "three")] == [1, 2, 3]
    assert found["one"].pointers == found["two"].pointers == {"latest"}
    assert found["two"].current == {"latest"} and not found["one"].current
    assert not found["three"].pointers
    assert all(one.here for one in found.values())


def test_a_directory_that_is_saved_again_is_seen_anew(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    with Checkpointer(tmp_path, SMALL) as ck:
        save_in(ck, 1, "tag")
        (first,) = source.look()
        assert source.look() == (first,)
        save_in(ck, 2, "tag")
        (second,) = source.look()
    assert (first.copy.step, second.copy.step) == (1, 2)
    shutil.rmtree(tmp_path / "tag")
    assert source.look() == ()


def test_what_is_no_directory_of_files_of_ours_is_left_out(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        save_in(ck, 1, "tag")
    shutil.copytree(tmp_path / "tag", tmp_path / "a_copy")
    shutil.copytree(tmp_path / "tag", tmp_path / "damaged")
    (tmp_path / "damaged" / "manifest.json").write_bytes(b"{")
    (tmp_path / "somebody").mkdir()
    (tmp_path / "link").symlink_to("tag")
    (tmp_path / "notes").write_bytes(b"\xff" * 20)
    assert set(look(tmp_path)) == {"tag"}


def test_a_pointer_counts_that_an_older_release_has_not_noted() -> None:
    golden = Path(__file__).parents[1] / "compat" / "golden-v3"
    (found,) = look(golden).values()
    assert found.pointers == found.current == {"latest"}


# -- what is wanted ------------------------------------------------------------------------------


def test_the_newest_that_meets_every_is_wanted() -> None:
    here = [named(step) for step in (5, 10, 20, 25)]
    assert wanted_directories(here, FAR, there={}) == (here[2],)
    assert wanted_directories(here, FAR, there=at(here[2])) == ()


def test_the_newest_of_all_is_wanted_when_nobody_saves_any_more() -> None:
    here = [named(20), named(25)]
    assert wanted_directories(here, FAR, there=at(here[0]), last=True) == (here[1],)


def test_as_many_as_the_backlog_are_wanted_in_their_order() -> None:
    here = [named(step) for step in (30, 10, 20)]
    level = Level("/far", every=10, backlog=2)
    assert wanted_directories(here, level, there={}) == (here[2], here[0])


def test_a_directory_of_the_same_number_is_wanted_too_and_the_one_that_is_pointed_to_last() -> None:
    here = [named(10, "b", current=True), named(10, "c"), named(10, "a")]
    assert [one.name for one in wanted_directories(here, FAR, there={})] == ["a", "c", "b"]
    assert wanted_directories(here, FAR, there=at(here[0], here[2])) == (here[1],)


def test_a_directory_that_was_saved_again_is_wanted_again() -> None:
    old, new = named(20, "tag"), named(10, "tag", digits="1" * 8)
    assert wanted_directories([new], FAR, there=at(old)) == (new,)


def test_what_other_nodes_have_a_part_of_is_never_wanted() -> None:
    part = Named(Copy(10, "000000000010-00000000", "tag"), frozenset(), frozenset(), here=False)
    assert wanted_directories([part], FAR, there={}) == ()


# -- pointers ------------------------------------------------------------------------------------


def test_a_pointer_names_the_newest_that_is_there_and_not_the_newest_of_the_root() -> None:
    here = [named(10), named(20), named(25, current=True)]
    assert due_pointers(here, there=at(*here[:2]), pointed={}) == {"latest": "global_step20"}


def test_a_pointer_that_is_where_it_should_be_does_not_move() -> None:
    here = [named(10), named(20, current=True)]
    pointed = {"latest": "global_step20"}
    assert due_pointers(here, there=at(*here), pointed=pointed) == {}


def test_a_pointer_never_goes_back() -> None:
    far, here = named(30), named(20, current=True)
    pointed = {"latest": far.name}
    assert due_pointers([here], there=at(here, far), pointed=pointed) == {}


def test_a_pointer_that_names_nothing_whole_is_moved() -> None:
    here = named(20)
    pointed = {"latest": "gone"}
    assert due_pointers([here], there=at(here), pointed=pointed) == {"latest": here.name}


def test_of_the_same_number_a_pointer_names_what_the_roots_names() -> None:
    here = [named(10, "a"), named(10, "b", current=True)]
    assert due_pointers(here, there=at(*here), pointed={"latest": "a"}) == {"latest": "b"}
    alike = [named(10, "a"), named(10, "b")]
    for now in ("a", "b"):
        assert due_pointers(alike, there=at(*alike), pointed={"latest": now}) == {}


def test_a_pointer_does_not_name_what_an_older_save_left_there() -> None:
    old, new = named(10, "tag"), named(20, "tag", digits="1" * 8)
    assert due_pointers([new], there=at(old), pointed={}) == {}


def test_a_save_without_a_pointer_is_never_pointed_to() -> None:
    free = Named(Copy(10, "000000000010-00000000", "tag"), frozenset(), frozenset())
    assert due_pointers([free], there=at(free), pointed={}) == {}


_ONES = st.builds(
    named,
    st.integers(0, 4),
    st.sampled_from("abc"),
    digits=st.sampled_from(["0" * 8, "1" * 8]),
    current=st.booleans(),
)


@given(st.lists(_ONES), st.lists(_ONES), st.sampled_from(["", "a", "b", "c", "d"]))
def test_pointers_come_to_rest_on_something_whole_and_never_go_back(
    here: list[Named], far: list[Named], now: str
) -> None:
    here = list({one.name: one for one in here}.values())
    there = {one.name: one.copy for one in far}
    pointed = {"latest": now}
    for _ in range(3):
        due = due_pointers(here, there=there, pointed=pointed)
        if not due:
            break
        new = due["latest"]
        assert there[new] in [one.copy for one in here]
        if pointed["latest"] in there:
            assert there[new].step >= there[pointed["latest"]].step
        pointed |= due
    else:
        pytest.fail("the pointer does not come to rest")
