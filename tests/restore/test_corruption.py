"""Damage of any kind is found, named, and never allocated for."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.errors import (
    CorruptCheckpoint,
    NotCommitted,
    UnknownFormat,
    UntrustedData,
)
from ckpt_core.layout import MANIFEST_NAME, LeafEntry, Manifest, RankManifest
from ckpt_core.restore import load, read_manifests, verify
from ckpt_core.system.files import Files
from tests.restore.harness import (
    RANK,
    SHARD,
    Cold,
    edit_rank,
    flip,
    resign,
    restore,
    small_state,
    write_manifests,
    write_step,
    zeros_like,
)

EVERY_FILE = (SHARD, RANK, MANIFEST_NAME)


@pytest.fixture
def step(root: Path) -> Path:
    return write_step(root, 7, small_state())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step that tests copy before they damage it."""
    return write_step(tmp_path_factory.mktemp("sound"), 7, small_state())


@given(name=st.sampled_from(EVERY_FILE), place=st.floats(0, 1), bit=st.integers(0, 7))
def test_any_bit_that_turned_over_is_found(
    tmp_path_factory: pytest.TempPathFactory, sound: Path, name: str, place: float, bit: int
) -> None:
    step = tmp_path_factory.mktemp("damaged") / sound.name
    shutil.copytree(sound, step)
    size = (step / name).stat().st_size
    flip(step / name, min(int(place * size), size - 1), bit)
    report = verify(step)
    assert not report.ok
    assert report.bad_chunks or report.problems
    with pytest.raises(CorruptCheckpoint) as caught:
        load(step)
    assert name in str(caught.value)
    assert caught.value.expected != caught.value.got


@given(name=st.sampled_from(EVERY_FILE), place=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_found(
    tmp_path_factory: pytest.TempPathFactory, sound: Path, name: str, place: float
) -> None:
    step = tmp_path_factory.mktemp("damaged") / sound.name
    shutil.copytree(sound, step)
    os.truncate(step / name, int(place * (step / name).stat().st_size))
    assert not verify(step).ok
    with pytest.raises(CorruptCheckpoint):
        load(step)


def _missing(path: Path) -> None:
    path.unlink()


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", EVERY_FILE)
@pytest.mark.parametrize("damage", [_missing, _longer, _link, _directory, _pipe])
def test_a_file_that_is_not_what_was_written_is_named(
    step: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(step / name)
    report = verify(step)
    assert any(name in problem for problem in report.problems)
    with pytest.raises(CorruptCheckpoint, match=name):
        load(step)


def test_the_text_names_file_chunk_and_leaves(step: Path) -> None:
    entry = _leaf(step, "weight")
    flip(step / SHARD, entry.offset + 6000)
    with pytest.raises(
        CorruptCheckpoint, match=r"chunk \d+ \(bytes \d+\.\.\d+\).*weight"
    ) as caught:
        load(step)
    assert caught.value.path == step / SHARD
    assert caught.value.step == 7


def test_padding_is_verified_too(root: Path) -> None:
    step = write_step(root, 1, {"a": torch.zeros(3)})
    flip(step / SHARD, (step / SHARD).stat().st_size - 1)
    with pytest.raises(CorruptCheckpoint):
        load(step)


def test_a_file_that_shrinks_while_it_is_read_is_corrupt(step: Path) -> None:
    class Shrinking(Cold):
        def open_read(self, path: Path, *, direct: bool = False) -> int:
            fd = super().open_read(path, direct=direct)
            if direct:
                os.truncate(path, 4096)
            return fd

    with pytest.raises(CorruptCheckpoint, match="the file ends at byte 4096"):
        load(step, files=Shrinking())


def test_a_step_directory_with_another_steps_manifest_is_corrupt(step: Path) -> None:
    other = step.with_name("step-000000000008")
    step.rename(other)
    with pytest.raises(CorruptCheckpoint, match="expected step 8, got step 7"):
        load(other)


def test_an_exported_copy_has_any_name(step: Path) -> None:
    other = step.with_name("best")
    step.rename(other)
    assert load(other)["plain"] == small_state()["plain"]
    assert verify(other).ok


def test_a_rank_manifest_of_another_step_is_corrupt(root: Path, step: Path) -> None:
    newer = write_step(root, 8, small_state(8))
    shutil.copy(step / RANK, newer / RANK)
    with pytest.raises(CorruptCheckpoint, match=RANK):
        load(newer)


def test_a_newer_format_is_no_corruption(step: Path) -> None:
    _reformat(step / MANIFEST_NAME)
    with pytest.raises(UnknownFormat) as caught:
        load(step)
    assert caught.value.version == 99
    assert "format version 99" in verify(step).problems[0]


def test_a_directory_that_is_not_there_is_not_committed(root: Path) -> None:
    with pytest.raises(NotCommitted):
        read_manifests(root / "step-000000000001", files=Files())


# -- hostile manifests, whose checksums are right ----------------------------------------------------


def test_no_memory_is_allocated_for_a_claimed_size(step: Path) -> None:
    huge = 2**50

    def claim(rank: RankManifest) -> RankManifest:
        file = rank.files[0]
        chunk = replace(file.chunks[0], nbytes=huge)
        entry = replace(file, nbytes=huge, chunks=(chunk,))
        leaf = rank.leaves[0]
        spec = replace(leaf.spec, dtype="uint8", shape=(huge - 4096,))
        grown = replace(leaf, spec=spec, nbytes=huge - 4096, offset=4096)
        return replace(rank, files=(entry,), leaves=(grown,))

    edit_rank(step, 7, claim)
    with pytest.raises(CorruptCheckpoint, match=f"expected {huge} bytes"):
        load(step)
    assert not verify(step).ok


def test_a_leaf_between_two_elements_is_refused(step: Path) -> None:
    def shift(rank: RankManifest) -> RankManifest:
        return replace(rank, leaves=tuple(_moved(leaf, "weight", 2) for leaf in rank.leaves))

    # The leaf after it is in the way: only the moved one stays.
    edit_rank(
        step,
        7,
        lambda rank: replace(
            shift(rank), leaves=tuple(x for x in shift(rank).leaves if x.spec.name == "weight")
        ),
    )
    with pytest.raises(CorruptCheckpoint, match="'weight' at a multiple of 4"):
        load(step)


def test_a_skeleton_that_does_not_fit_its_leaves_is_corrupt(step: Path) -> None:
    edit_rank(step, 7, lambda rank: replace(rank, leaves=rank.leaves[1:]))
    with pytest.raises(CorruptCheckpoint):
        load(step)
    with pytest.raises(CorruptCheckpoint):
        restore(step.parent, zeros_like(small_state()), step=7)


@pytest.mark.parametrize("skeleton", [None, 3, {}, {"tree": {"?": 1}}, {"tree": {"x": []}}])
def test_a_skeleton_of_no_meaning_is_corrupt(step: Path, skeleton: Any) -> None:
    edit_rank(step, 7, lambda rank: replace(rank, skeleton=skeleton))
    with pytest.raises(CorruptCheckpoint):
        load(step)


class Custom:
    """An object that no state tree holds without a pickle."""

    def __reduce__(self) -> Any:
        return (Custom, ())


def test_an_object_that_could_run_code_needs_trust(root: Path) -> None:
    step = write_step(root, 7, {"w": torch.ones(3), "object": Custom()})
    with pytest.raises(UntrustedData):
        load(step)
    assert isinstance(load(step, trusted=True)["object"], Custom)
    live = {"w": torch.zeros(3), "object": None}
    with pytest.raises(UntrustedData):
        restore(root, live)
    assert not live["w"].any(), "a refused checkpoint changed a live tensor"


# -- the shard's own header -------------------------------------------------------------------------


def test_verify_finds_a_header_that_tells_other_readers_something_else(step: Path) -> None:
    data = (step / SHARD).read_bytes()
    (step / SHARD).write_bytes(data.replace(b'"weight"', b'"veight"', 1))
    resign(step, 7)
    report = verify(step)
    assert not report.bad_chunks
    assert any("lacks leaf 'weight'" in problem for problem in report.problems)
    assert any("'veight', which the manifest does not know" in text for text in report.problems)


def test_verify_finds_a_header_with_another_shape(step: Path) -> None:
    data = (step / SHARD).read_bytes()
    (step / SHARD).write_bytes(data.replace(b"[50,60]", b"[60,50]", 1))
    resign(step, 7)
    assert any("of leaf 'weight', not" in problem for problem in verify(step).problems)


def test_verify_finds_a_header_that_is_none(step: Path) -> None:
    flip(step / SHARD, 7, 6)
    resign(step, 7)
    assert any("header length" in problem for problem in verify(step).problems)


# -- helpers ----------------------------------------------------------------------------------------


def _leaf(step: Path, name: str) -> LeafEntry:
    rank = RankManifest.decode((step / RANK).read_bytes(), path=step / RANK)
    return next(leaf for leaf in rank.leaves if leaf.spec.name == name)


def _moved(leaf: LeafEntry, name: str, by: int) -> LeafEntry:
    return replace(leaf, offset=leaf.offset + by) if leaf.spec.name == name else leaf


def _reformat(path: Path) -> None:
    """Give a manifest format version 99, with a checksum that is right."""
    body = re.sub(rb'"version":\d', b'"version":99', path.read_bytes()[:-28])
    path.write_bytes(b'%s,"xxh3":"%s"}\n' % (body, xxhash.xxh3_64_hexdigest(body).encode()))


def test_the_hand_written_manifests_are_those_of_the_format(step: Path) -> None:
    manifest = Manifest.decode((step / MANIFEST_NAME).read_bytes(), path=step)
    rank = RankManifest.decode((step / RANK).read_bytes(), path=step)
    before = (step / MANIFEST_NAME).read_bytes()
    write_manifests(step, manifest.step, [rank])
    assert (step / MANIFEST_NAME).read_bytes() == before
