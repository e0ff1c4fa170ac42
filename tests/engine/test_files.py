"""Directories of named files: what `torch.load` finds in them, and when."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import (
    BarrierError,
    Checkpointer,
    CkptError,
    CommitError,
    ConfigError,
    Options,
    PersistError,
    RestoreError,
    StagingError,
)
from ckpt_core.system.files import Files
from ckpt_core.torch_zip import plan_zip
from tests.engine.files_trees import (
    TINY,
    GatedFiles,
    assert_directory,
    assert_holds,
    model_states,
    optim_states,
)
from tests.torch_zip.zip_files import TREES, Cloner, assert_alike


def save(
    ck: Checkpointer, step: int, files: dict[str, Any], *, name: str = "tag", **more: Any
) -> Any:
    opened = ck.begin_files(step, name, **more)
    for file, tree in files.items():
        opened.add(file, tree)
    return opened.seal()


def trees(seed: int) -> dict[str, Any]:
    return {
        "mp_rank_00_model_states.pt": model_states(seed),
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": optim_states(seed),
        "layers/layer_01-model_states.pt": {"w": torch.full((3000,), float(seed))},
    }


# -- what is in the files ------------------------------------------------------------------------


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("chunk_bytes", [4096, 16384, 2**20])
def test_files_hold_what_torch_saves(root: Path, chunk_bytes: int, direct_io: str) -> None:
    torch.manual_seed(0)
    files = {f"{name}.pt": make() for name, make in TREES.items()} | trees(1)
    with Checkpointer(root, Options(chunk_bytes=chunk_bytes, direct_io=direct_io)) as ck:
        handle = save(ck, 3, files, pointer="latest")
        ck.wait_staged()
        handle.staged.result(60)
        assert handle.committed.result(60) == ck.root / "tag"
    assert_directory(root / "tag", files)
    assert (root / "latest").read_bytes() == b"tag"


@pytest.mark.parametrize("name", ["zero_1", "zero_3", "dtypes", "strides"])
def test_files_of_harmless_types_load_with_weights_only(root: Path, name: str) -> None:
    torch.manual_seed(0)
    tree = TREES[name]()
    with Checkpointer(root, TINY) as ck:
        save(ck, 1, {"a.pt": tree}).committed.result(60)
    for mapped in (False, True):
        found = torch.load(root / "tag" / "a.pt", weights_only=True, mmap=mapped)
        assert_alike(found, Cloner()(tree))


@pytest.mark.parametrize("chunk_bytes", [4096, 12288])
def test_files_of_any_length_are_exactly_as_long_as_they_should_be(
    root: Path, chunk_bytes: int
) -> None:
    tensors = [torch.arange(size) for size in [*range(0, 1100, 37), *range(3900, 4100, 8)]]
    lengths = {
        f"{index}.pt": plan_zip(tensor).layout.file_bytes for index, tensor in enumerate(tensors)
    }
    with Checkpointer(root, Options(chunk_bytes=chunk_bytes)) as ck:
        files = {f"{index}.pt": tensor for index, tensor in enumerate(tensors)}
        path = save(ck, 1, files).committed.result(60)
    assert {name: (path / name).stat().st_size for name in files} == lengths
    assert len({length % 4096 for length in lengths.values()}) > 20
    assert_directory(path, files)


@pytest.mark.parametrize("mode", ["host", "direct"])
def test_the_mode_of_steps_makes_no_difference(root: Path, mode: str) -> None:
    with Checkpointer(root, dataclasses.replace(TINY, mode=mode)) as ck:
        path = save(ck, 1, trees(1)).committed.result(60)
    assert_directory(path, trees(1))


def test_a_save_may_have_no_files_and_no_checksums(root: Path) -> None:
    with Checkpointer(root, Options(checksum=False)) as ck:
        save(ck, 1, {}, name="none").committed.result(60)
        save(ck, 2, {"a.pt": torch.ones(5000)}, name="some").committed.result(60)
    assert_directory(root / "none", {})
    report = ckpt_core.verify(root / "some")
    assert report.ok and report.checked_bytes == 0 and report.unchecked_bytes > 20000


# -- memory and barriers -------------------------------------------------------------------------


def test_staging_memory_stays_within_its_bound(root: Path) -> None:
    with Checkpointer(root, TINY) as ck:
        for step in range(4):
            files = {f"{index}.pt": optim_states(index, rows=100) for index in range(4)}
            save(ck, step, files, name=f"tag{step}")
        ck.wait()
        assert 0 < ck.staging_peak_bytes <= 96 * 1024
    for step in range(4):
        assert_directory(root / f"tag{step}", files)


def test_after_the_barrier_tensors_may_change_and_small_ones_at_once(root: Path) -> None:
    large, small, plain = torch.zeros(50_000), torch.zeros(10), {"n": 0}
    with Checkpointer(root, TINY) as ck:
        opened = ck.begin_files(1, "tag")
        opened.add("a.pt", {"large": large, "small": small, "plain": plain})
        small += 1
        plain["n"] = 1
        ck.wait_staged(["a.pt"])
        large += 1
        opened.add("b.pt", {"large": large})
        ck.wait_staged()
        large += 1
        opened.seal().committed.result(60)
    found = torch.load(root / "tag" / "a.pt", weights_only=True)
    assert (found["large"].sum(), found["small"].sum(), found["plain"]["n"]) == (0, 0, 0)
    assert torch.load(root / "tag" / "b.pt", weights_only=True)["large"].eq(1).all()


def test_everything_may_change_after_an_eager_add(root: Path) -> None:
    large = torch.zeros(50_000)
    files = GatedFiles()
    with Checkpointer(root, TINY, files=files) as ck:
        opened = ck.begin_files(1, "tag")
        opened.add("a.pt", {"large": large}, eager=True)
        assert ck.is_staged()
        large += 1
        files.gate.set()
        opened.seal().committed.result(60)
    assert torch.load(root / "tag" / "a.pt", weights_only=True)["large"].sum() == 0


def test_a_function_says_which_tensors_are_added_eagerly(root: Path) -> None:
    changing, lasting = torch.zeros(50_000), torch.zeros(50_000)
    files = GatedFiles()
    with Checkpointer(root, TINY, files=files) as ck:
        opened = ck.begin_files(1, "tag")
        tree = [changing.view(5, -1), lasting]
        opened.add("a.pt", tree, eager=lambda part: part.data_ptr() == changing.data_ptr())
        assert not ck.is_staged()
        changing += 1
        files.gate.set()
        ck.wait_staged()
        lasting += 1
        opened.seal().committed.result(60)
    found = torch.load(root / "tag" / "a.pt", weights_only=True)
    assert [part.sum() for part in found] == [0, 0]


def test_waiting_for_one_file_does_not_wait_for_a_later_one(root: Path) -> None:
    files = GatedFiles()
    with Checkpointer(root, TINY, files=files) as ck:
        opened = ck.begin_files(1, "tag")
        opened.add("small.pt", torch.zeros(3000))
        opened.add("large.pt", torch.zeros(100_000))
        ck.wait_staged(["small.pt"])
        assert not ck.is_staged(["large.pt"])
        assert not ck.is_staged(["who knows"])
        files.gate.set()
        ck.wait_staged(["large.pt"])
        opened.seal().committed.result(60)


def test_a_missing_barrier_is_found_and_the_tensor_is_named(root: Path) -> None:
    files = GatedFiles()
    state = {"model": {"weights": [torch.zeros(10), torch.zeros(100_000)]}}
    options = dataclasses.replace(TINY, debug_barrier=True, on_error="warn")
    with Checkpointer(root, options, files=files) as ck:
        opened = ck.begin_files(1, "tag")
        opened.add("a.pt", state)
        state["model"]["weights"][1] += 1
        files.gate.set()
        with pytest.raises(BarrierError, match=r"a\.pt: model\.weights\.1"):
            opened.seal().committed.result(60)
        opened = ck.begin_files(2, "tag")
        opened.add("a.pt", state)
        ck.wait_staged()
        state["model"]["weights"][1] += 1
        opened.seal().committed.result(60)
    assert not list(root.glob(".inflight/*"))


# -- several saves -------------------------------------------------------------------------------


def test_saves_in_flight_hold_their_own_values_and_the_pointer_names_the_last(root: Path) -> None:
    state = trees(0)
    weight = state["layers/layer_01-model_states.pt"]["w"]
    expected = {}
    with Checkpointer(root, TINY) as ck:
        for step in range(8):
            save(ck, step, state, name=f"tag{step}", pointer="latest")
            ck.wait_staged()
            expected[step] = weight[0].item()
            weight += 1
    for step, value in expected.items():
        found = torch.load(root / f"tag{step}" / "layers/layer_01-model_states.pt")["w"]
        assert found.eq(value).all()
    assert (root / "latest").read_text() == "tag7"


@pytest.mark.parametrize("names", [("old", "new"), ("tag", "tag")])
def test_a_younger_save_that_is_done_first_is_not_undone(
    root: Path, names: tuple[str, str]
) -> None:
    files = GatedFiles()
    options = Options(chunk_bytes=4096, in_flight=2, writers=8)
    with Checkpointer(root, options, files=files) as ck:
        older = save(ck, 1, {"a.pt": torch.zeros(3000)}, name=names[0], pointer="latest")
        ck.wait_staged()
        assert files.holds.wait(60)
        younger = save(ck, 2, {"a.pt": torch.ones(3000)}, name=names[1], pointer="latest")
        younger.committed.result(60)
        assert not older.committed.done()
        files.gate.set()
        assert older.committed.result(60) == root / names[0]
    assert (root / "latest").read_text() == names[1]
    assert torch.load(root / names[1] / "a.pt").eq(1).all()
    assert ckpt_core.verify(root / names[1]).ok
    assert not list(root.glob(".inflight/*"))


def test_steps_and_directories_share_a_root_and_leave_each_other_alone(root: Path) -> None:
    options = Options(keep_last=1, chunk_bytes=16384)
    state: dict[str, Any] = {"w": torch.arange(10_000.0), "n": 1}
    with Checkpointer(root, options) as ck:
        for step in range(1, 5):
            save(ck, step, trees(step), name=f"tag{step}", pointer="latest")
            ck.save(step, state)
            layers = ck.begin(step + 10, {"w": state["w"]})
            layers.stage(["w"])
            layers.seal(state)
            ck.wait()
        assert ck.steps() == (14,)
        assert ck.latest_step() == 14
        found = ck.restore(state)
        assert found is not None and found.step == 14
    for step in range(1, 5):
        assert_directory(root / f"tag{step}", trees(step))
    assert ckpt_core.verify(root).ok


# -- replacing -----------------------------------------------------------------------------------


def test_a_directory_of_that_name_is_replaced_as_a_whole(root: Path) -> None:
    (root / "tag" / "sub").mkdir(parents=True)
    (root / "tag" / "sub" / "foreign.pt").write_text("somebody else's")
    (root / "latest").write_text("tag\n")
    with Checkpointer(root, TINY) as ck:
        save(ck, 1, trees(1), pointer="latest").committed.result(60)
        assert_directory(root / "tag", trees(1))
        save(ck, 1, {"b.pt": 2}, pointer="latest").committed.result(60)
    assert_directory(root / "tag", {"b.pt": 2})
    assert not list(root.glob(".inflight/*"))
    assert not (root / ".slots").exists()


def test_what_others_have_put_into_a_directory_is_kept_where_that_is_asked_for(root: Path) -> None:
    tag = root / "tag"
    with Checkpointer(root, TINY) as ck:
        save(ck, 1, trees(1)).committed.result(60)
        (tag / "sub").mkdir(exist_ok=True)
        (tag / "sub" / "vocab.json").write_text("{}")
        (tag / "older.pt").write_text("goes")
        (tag / "link").symlink_to("sub/vocab.json")
        for again in range(2):
            saving = ck.begin_files(2 + again, "tag", replaces=["*.pt"])
            saving.add("b.pt", {"step": again})
            saving.seal().committed.result(60)
            there = sorted(str(path.relative_to(tag)) for path in tag.rglob("*"))
            assert there == [
                *("b.pt", "link", "manifest.json"),
                *("rank-00000.json", "sub", "sub/vocab.json"),
            ]
            assert (tag / "link").read_text() == "{}"
            assert torch.load(tag / "b.pt") == {"step": again}
            assert ckpt_core.verify(tag).ok
        saving = ck.begin_files(4, "tag", replaces=[])
        saving.add("sub/vocab.json", {"ours": 1})
        saving.seal().committed.result(60)
        assert torch.load(tag / "sub" / "vocab.json") == {"ours": 1}
        assert (tag / "b.pt").exists()
    assert not list(root.glob(".inflight/*"))


@pytest.mark.parametrize("replaces", ["*.pt", [3]])
def test_what_is_replaced_is_named_by_texts(root: Path, replaces: Any) -> None:
    with Checkpointer(root, TINY) as ck, pytest.raises(ConfigError, match="replaces="):
        ck.begin_files(1, "tag", replaces=replaces)


def test_files_of_a_replaced_directory_stay_readable_for_who_has_them_open(root: Path) -> None:
    with Checkpointer(root, Options(chunk_bytes=4096)) as ck:
        save(ck, 1, {"a.pt": torch.zeros(5000)}).committed.result(60)
        mapped = torch.load(root / "tag" / "a.pt", mmap=True)
        for step in (2, 3, 4):
            save(ck, step, {"a.pt": torch.full((5000,), step)}).committed.result(60)
            ck.save(step, {"w": torch.ones(5000)}).committed.result(60)
    assert mapped.eq(0).all()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_not_replaced(root: Path, kind: str) -> None:
    root.mkdir()
    if kind == "file":
        (root / "tag").write_text("mine")
    else:
        (root / "elsewhere").mkdir()
        (root / "tag").symlink_to("elsewhere")
    with Checkpointer(root, dataclasses.replace(TINY, on_error="warn")) as ck:
        handle = save(ck, 1, trees(1), pointer="latest")
        with pytest.raises(CommitError, match="no directory has that name"):
            handle.committed.result(60)
    assert not (root / "latest").exists()
    assert (root / "tag").is_symlink() or (root / "tag").read_text() == "mine"
    assert not list(root.glob(".inflight/*"))


def test_a_pointer_that_cannot_be_moved_fails_the_save_and_the_directory_stays(root: Path) -> None:
    (root / "latest").mkdir(parents=True)
    with Checkpointer(root, dataclasses.replace(TINY, on_error="warn")) as ck:
        with pytest.raises(CommitError, match="move the pointer"):
            save(ck, 1, trees(1), pointer="latest").committed.result(60)
        (root / "latest").rmdir()
        save(ck, 2, trees(2), name="other", pointer="latest").committed.result(60)
    assert_directory(root / "tag", trees(1))
    assert (root / "latest").read_text() == "other"
    assert not list(root.glob(".inflight/*"))


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", ".x", "a/../b", "/abs", "manifest.json", "rank-00000.json", "a//b", 7]
)
def test_a_file_with_an_impossible_name_is_refused(root: Path, name: Any) -> None:
    with Checkpointer(root, TINY) as ck:
        opened = ck.begin_files(1, "tag")
        with pytest.raises(ConfigError, match="cannot be the name of a file"):
            opened.add(name, 1)
        opened.add("a.pt", 1)
        opened.seal().committed.result(60)
    assert_directory(root / "tag", {"a.pt": 1})


def test_a_name_is_added_once_and_is_no_directory_of_another(root: Path) -> None:
    with Checkpointer(root, TINY) as ck:
        opened = ck.begin_files(1, "tag")
        opened.add("a/b.pt", 1)
        for name in ("a/b.pt", "a", "a/b.pt/c"):
            with pytest.raises(ConfigError, match="a"):
                opened.add(name, 2)
        opened.seal().committed.result(60)
    assert_directory(root / "tag", {"a/b.pt": 1})


@pytest.mark.parametrize(
    "name", ["", ".hidden", "a/b", " x ", "x\n", "x" * 201, "step-000000000120", "..", None, 3]
)
def test_an_impossible_directory_or_pointer_is_refused(root: Path, name: Any) -> None:
    with Checkpointer(root, TINY) as ck:
        with pytest.raises(ConfigError, match=r"directory=.*slash, control characters or blanks"):
            ck.begin_files(1, name)
        if name is not None:
            with pytest.raises(ConfigError, match="pointer="):
                ck.begin_files(1, "tag", pointer=name)
        with pytest.raises(ConfigError, match="the directory itself"):
            ck.begin_files(1, "tag", pointer="tag")
        with pytest.raises(ConfigError, match="step="):
            ck.begin_files(-1, "tag")
        save(ck, 1, {"a.pt": 1}).committed.result(60)


def test_what_cannot_be_pickled_is_named_and_the_save_stays_open(root: Path) -> None:
    with Checkpointer(root, TINY) as ck:
        opened = ck.begin_files(1, "tag")
        with pytest.raises(ConfigError, match=r"client\.lock"):
            opened.add("a.pt", {"client": {"lock": threading.Lock()}})
        opened.add("a.pt", {"client": 1})
        opened.seal().committed.result(60)
    assert_directory(root / "tag", {"a.pt": {"client": 1}})


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"b.pt": threading.Lock()}, "cannot be saved"),
        ({"a.pt/c": 2}, "a file and a directory"),
        ({".hidden": 2}, "cannot be the name"),
        ({"first.pt": 2}, "added already"),
    ],
)
def test_of_several_files_all_are_added_or_none(
    root: Path, bad: dict[str, Any], match: str
) -> None:
    with Checkpointer(root, TINY) as ck:
        opened = ck.begin_files(1, "tag")
        opened.add("first.pt", 1)
        with pytest.raises(ConfigError, match=match):
            opened.add_all({"a.pt": torch.ones(5000)} | bad)
        opened.add_all({})
        opened.add_all({"a.pt": torch.zeros(5000), "d/b.pt": torch.ones(5000)})
        opened.seal().committed.result(60)
    assert_directory(
        root / "tag",
        {"first.pt": 1, "a.pt": torch.zeros(5000), "d/b.pt": torch.ones(5000)},
    )


def test_no_file_of_several_is_copied_before_all_are_pickled(root: Path) -> None:
    live = torch.zeros(5000)

    class Changing:
        def __reduce__(self) -> Any:
            time.sleep(0.1)  # the stager would be through with the first file
            live.fill_(7.0)
            return int, ()

    with Checkpointer(root, TINY) as ck:
        opened = ck.begin_files(1, "tag")
        opened.add_all({"a.pt": live, "b.pt": Changing()})
        opened.seal().committed.result(60)
    assert torch.load(root / "tag" / "a.pt").equal(torch.full((5000,), 7.0))


def test_an_aborted_save_leaves_nothing_and_gives_its_place_back(root: Path) -> None:
    with Checkpointer(root, TINY) as ck:
        for step in range(5):
            opened = ck.begin_files(step, "tag", pointer="latest")
            opened.add("a.pt", torch.zeros(50_000))
            opened.abort()
            opened.abort()
            with pytest.raises(ConfigError, match="sealed or aborted"):
                opened.add("b.pt", 1)
            with pytest.raises(ConfigError, match="sealed or aborted"):
                opened.seal()
        ck.wait()
        save(ck, 9, {"a.pt": 1}).committed.result(60)
    assert sorted(os.listdir(root)) == [".inflight", ".lock", "tag"]
    assert not list(root.glob(".inflight/*"))


def test_a_save_that_is_never_sealed_fails_when_the_checkpointer_closes(root: Path) -> None:
    ck = Checkpointer(root, TINY)
    opened = ck.begin_files(1, "tag")
    opened.add("a.pt", torch.zeros(50_000))
    with pytest.raises(StagingError, match="never sealed"):
        ck.close()
    assert not (root / "tag").exists()
    assert not list(root.glob(".inflight/*"))


def test_a_save_that_is_held_open_too_long_fails_and_later_adds_do_nothing(root: Path) -> None:
    options = dataclasses.replace(TINY, timeout=0.5, on_error="warn")
    with Checkpointer(root, options) as ck:
        opened = ck.begin_files(1, "tag")
        opened.add("a.pt", torch.zeros(3000))
        while opened._inflight.error is None:
            threading.Event().wait(0.01)
        opened.add("b.pt", torch.zeros(3000))
        with pytest.raises(PersistError, match="given up"):
            opened.seal().committed.result(60)
        ck.wait()
    assert not (root / "tag").exists()
    assert not list(root.glob(".inflight/*"))


def test_a_save_is_given_up_in_time_though_an_earlier_one_was_due_before(root: Path) -> None:
    options = dataclasses.replace(TINY, timeout=0.5, on_error="warn")
    with Checkpointer(root, options) as ck:
        ck.begin_files(1, "first").seal()
        ck.wait()
        # Whoever gives saves up looks at the clock when the first one was due, which has ended by then.
        opened = ck.begin_files(2, "tag")
        opened.add("a.pt", torch.zeros(3000))
        while opened._inflight.error is None:
            threading.Event().wait(0.01)
        with pytest.raises(PersistError, match="given up"):
            opened.seal().committed.result(60)
    assert not (root / "tag").exists()


class FullDisk(Files):
    """No room for whatever is larger than a manifest, once it is full."""

    full = False

    def allocate(self, fd: int, size: int, *, mapped: bool = False) -> None:
        if self.full and size > 30_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, size, mapped=mapped)


def test_a_full_disk_fails_the_save_and_harms_no_directory(root: Path) -> None:
    files = FullDisk()
    with Checkpointer(root, TINY, files=files) as ck:
        save(ck, 1, trees(1), pointer="latest").committed.result(60)
        files.full = True
        with pytest.raises(PersistError, match="No space left"):
            save(ck, 2, trees(2), pointer="latest").committed.result(60)
        with pytest.raises(PersistError, match="No space left"):
            save(ck, 3, trees(3), name="other", pointer="latest")
        files.full = False
        assert_directory(root / "tag", trees(1))
        assert ck._engine.flights.wait_empty(deadline=time.monotonic() + 30)
        assert not list(root.glob(".inflight/*"))
        save(ck, 4, trees(4), name="other", pointer="latest").committed.result(60)
    assert_directory(root / "other", trees(4))
    assert (root / "latest").read_text() == "other"


def test_a_save_that_fails_while_it_is_sealed_ends(root: Path) -> None:
    files, failed, sealed = FullDisk(), threading.Event(), threading.Event()

    def dawdle(event: Any) -> None:
        if event.name == "failed":
            failed.set()
            sealed.wait(60)

    with Checkpointer(root, TINY, files=files) as ck:
        ck.events.subscribe(dawdle)
        files.full = True
        opened = ck.begin_files(1, "tag")
        for name, tree in trees(1).items():
            opened.add(name, tree)
        assert failed.wait(60)
        handle = opened.seal()
        sealed.set()
        with pytest.raises(PersistError, match="No space left"):
            handle.committed.result(60)
        assert ck._engine.flights.wait_empty(deadline=time.monotonic() + 30)
        with pytest.raises(PersistError, match="No space left"):
            ck.wait()


# -- reading -------------------------------------------------------------------------------------


def test_every_byte_is_verified(root: Path) -> None:
    with Checkpointer(root, TINY) as ck:
        path = save(ck, 1, trees(1)).committed.result(60)
    name = "layers/layer_01-model_states.pt"
    good = (path / name).read_bytes()
    for at in (0, len(good) // 2, len(good) - 1):
        (path / name).write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        report = ckpt_core.verify(path)
        assert not report.ok
        assert [(bad.file, bad.index) for bad in report.bad_chunks] == [(name, at // 4096)]
    for wrong in (good[:-1], good + b"\0", b""):
        (path / name).write_bytes(wrong)
        (problem,) = ckpt_core.verify(path).problems
        assert name in problem and f"{len(wrong)} bytes" in problem
    (path / name).unlink()
    assert "nothing of that name" in ckpt_core.verify(path).problems[0]
    os.rename(path / "layers", root / "moved")
    (root / "moved" / "layer_01-model_states.pt").write_bytes(good)
    (path / "layers").symlink_to(root / "moved")
    assert "expected a directory" in ckpt_core.verify(path).problems[0]


def test_a_copy_under_another_name_is_as_good(root: Path) -> None:
    with Checkpointer(root, TINY) as ck:
        path = save(ck, 1, trees(1)).committed.result(60)
    assert_directory(path.rename(root / "best"), trees(1))


def test_loading_it_as_a_step_says_what_to_do(root: Path) -> None:
    with Checkpointer(root, TINY) as ck:
        path = save(ck, 1, {"a.pt": 1}).committed.result(60)
    with pytest.raises(RestoreError, match=r"torch\.load, such as 'a\.pt'"):
        ckpt_core.load(path)


def test_under_the_name_of_a_step_it_is_no_step(root: Path) -> None:
    state = {"w": torch.ones(3)}
    with Checkpointer(root, TINY) as ck:
        ck.save(1, state).committed.result(60)
        path = save(ck, 2, {"a.pt": 1}).committed.result(60)
    path.rename(root / "step-000000000002")
    with pytest.raises(CkptError, match="a directory of files"):
        ckpt_core.load(root / "step-000000000002")
    with Checkpointer(root, TINY) as ck, pytest.warns(match="step 2"):
        found = ck.restore(state)
    assert found is not None and found.step == 1


def test_files_of_a_save_are_read_by_name_alone(root: Path) -> None:
    with Checkpointer(root, TINY) as ck:
        save(ck, 7, trees(1), name="global_step7", pointer="latest").committed.result(60)
    tag = (root / "latest").read_text()
    assert_holds(root / tag / "mp_rank_00_model_states.pt", model_states(1))
