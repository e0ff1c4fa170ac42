from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.errors import ConfigError, UnknownFormat
from ckpt_core.layout import Manifest, RankManifest
from tests.layout.manifests import (
    EVERY,
    JSON,
    NAMES,
    PATH,
    RANK,
    STEP,
    SUM,
    Either,
    edit,
    plain,
    refused,
    resealed,
    sealed,
    survives,
)


@pytest.mark.parametrize("manifest", EVERY, ids=NAMES)
def test_a_manifest_comes_back_equal(manifest: Either) -> None:
    assert type(manifest).decode(manifest.encode(), path=PATH) == manifest


def test_a_manifest_knows_its_world_size() -> None:
    assert STEP.world_size == 3


def test_a_rank_without_files_and_leaves_comes_back() -> None:
    empty = RankManifest(0, (), (), None)
    assert RankManifest.decode(empty.encode(), path=PATH) == empty


def test_the_bytes_are_one_json_object_that_ends_with_its_checksum() -> None:
    data = STEP.encode()
    found = re.fullmatch(rb'(\{.*),"xxh3":"([0-9a-f]{16})"\}\n', data, re.DOTALL)
    assert found is not None
    assert len(data) - len(found[1]) == 28
    assert found[2].decode() == xxhash.xxh3_64_hexdigest(found[1])
    assert json.loads(data)["xxh3"] == found[2].decode()
    assert data.isascii()


def test_unknown_keys_are_passed_over() -> None:
    obj = plain(RANK) | {"later": {"a": 1}}
    obj["files"][0]["later"] = [1]
    assert RankManifest.decode(sealed(obj), path=PATH) == RANK
    assert Manifest.decode(sealed(plain(STEP) | {"later": None}), path=PATH) == STEP


@pytest.mark.parametrize("version", [0, 4, -1, 10**30])
def test_another_version_is_told_apart_from_corruption(version: int) -> None:
    for manifest in EVERY:
        with pytest.raises(UnknownFormat) as caught:
            type(manifest).decode(sealed({"format": "ckpt-core", "version": version}), path=PATH)
        assert caught.value.version == version
        assert caught.value.path == PATH


@pytest.mark.parametrize(
    "change", [{"format": "other"}, {"format": 1}, {"version": "1"}, {"version": True}]
)
def test_another_format_is_corrupt(change: dict[str, Any]) -> None:
    refused(STEP, sealed(plain(STEP) | change))


def test_each_kind_of_manifest_is_refused_as_the_other() -> None:
    refused(RANK, STEP.encode())
    refused(STEP, RANK.encode())


@pytest.mark.parametrize("manifest", EVERY, ids=NAMES)
def test_every_bit_that_flips_is_noticed(manifest: Either) -> None:
    data = manifest.encode()
    for place in range(len(data)):
        for bit in (1, 0x80):
            wrong = bytearray(data)
            wrong[place] ^= bit
            refused(manifest, bytes(wrong))


@pytest.mark.parametrize("manifest", EVERY, ids=NAMES)
def test_every_truncation_is_noticed(manifest: Either) -> None:
    data = manifest.encode()
    for size in range(len(data)):
        refused(manifest, data[:size])
    refused(manifest, data + b"\n")


RANK_EDITS: list[tuple[tuple[Any, ...], Any]] = [
    *[((key,), KeyError) for key in ("rank", "files", "leaves", "skeleton")],
    *[(("rank",), value) for value in (-1, 2, 3.0, "3", None, True, 100_000, [3])],
    *[(("files",), value) for value in (None, {}, [None], [[]], [{}])],
    *[(("files", 0, key), KeyError) for key in ("name", "nbytes", "chunks")],
    *[
        (("files", 0, "name"), value)
        for value in (
            None,
            "/etc/passwd",
            "../shard-00003-0.safetensors",
            "shard-00002-0.safetensors",
            "shard-00003-1.safetensors",
            "shard-00003-00.safetensors",
            "shard-00003-0.safetensors\n",
            "shard-00003-0.safetensors\x00",
            "manifest.json",
            ["shard-00003-0.safetensors"],
        )
    ],
    *[(("files", 0, "nbytes"), value) for value in (-1, 0, 12287, 12289, 12288.0, "12288", 2**70)],
    (("files", 0, "chunks"), []),
    (("files", 0, "chunks"), {}),
    *[(("files", 0, "chunks", 0), value) for value in (None, [], [8192], [8192, SUM, 0], {})],
    *[(("files", 0, "chunks", 0, 0), value) for value in (0, -8192, 8191, 8193, "8192", 8192.0)],
    *[
        (("files", 0, "chunks", 0, 1), value)
        for value in (0, "", "0", SUM.upper(), SUM + "0", SUM + "\n", [SUM], False)
    ],
    *[(("leaves",), value) for value in (None, {}, [None], [[]], [{}])],
    *[(("leaves", 0, 0), value) for value in (None, 1, "scale", "\ud800", ["a"], {})],
    *[(("leaves", 0, 1), value) for value in (None, "float33", "int64", "qint8", ["float32"], {})],
    *[
        (("leaves", 0, 2), value)
        for value in (
            None,
            20,
            "20",
            [20.0],
            [-4, -5],
            [4, 6],
            [[4], 5],
            [True] * 20,
            [2**62, 4, 0],
            [20] + [1] * 300,
            [2**64 + 20],
        )
    ],
    *[(("leaves", 0, 3), value) for value in (-1, 2, 0.0, None, "0", False, [0])],
    *[
        (("leaves", 0, 4), value)
        for value in (-1, 12209, 12288, 2**70, 4096.0, None, 4175, 4177, [4096])
    ],
    *[(("leaves", 0, 5), value) for value in (0, 79, 81, -80, 80.0, None, [80])],
    (("leaves", 0), ["a", "float32", [4, 5], 0, 4096]),
    (("leaves", 0), ["a", "float32", [4, 5], 0, 4096, 80, 0]),
]


@pytest.mark.parametrize(("place", "value"), RANK_EDITS, ids=repr)
def test_a_rank_manifest_with_one_wrong_value_is_refused(
    place: tuple[Any, ...], value: Any
) -> None:
    obj = plain(RANK)
    edit(obj, place, value)
    refused(RANK, sealed(obj))


def test_leaves_of_a_rank_without_files_are_refused() -> None:
    refused(RANK, sealed(plain(RANK) | {"files": []}))


def test_leaves_that_share_bytes_are_refused() -> None:
    obj = plain(RANK)
    obj["leaves"] = [[f"n{i}", "uint8", [12288], 0, 0, 12288] for i in range(2)]
    refused(RANK, sealed(obj))


STEP_EDITS: list[tuple[tuple[Any, ...], Any]] = [
    *[
        ((key,), KeyError)
        for key in ("step", "attempt", "created_unix_s", "world_size", "state_bytes", "ranks")
    ],
    *[(("step",), value) for value in (-1, 121, 10**18, "120", 120.0, None, True)],
    *[
        (("attempt",), value)
        for value in (
            None,
            "",
            "120-0a1b2c3d",
            "000000000121-0a1b2c3d",
            "000000000120-0A1B2C3D",
            "000000000120-0a1b2c3d\n",
            "0000000000120-0a1b2c3d",
            "../000000000120-0a1b2c3d",
        )
    ],
    *[(("created_unix_s",), value) for value in (None, "1", -1, 1e300, True, [1], 10**400)],
    *[(("world_size",), value) for value in (0, 2, 4, "3", 3.0, None)],
    *[(("state_bytes",), value) for value in (-1, 2**70, 1.0, None, False)],
    *[(("ranks",), value) for value in (None, [], {}, [None], [[]])],
    *[(("ranks", 1, 0), value) for value in (0, 2, -1, "1", 1.0, True, None)],
    *[
        (("ranks", 1, 1), value)
        for value in ("rank-00000.json", "rank-1.json", "../rank-00001.json", None, 1)
    ],
    *[(("ranks", 1, 2), value) for value in (0, -1, 2**40, "1", 1.5, None)],
    *[(("ranks", 1, 3), value) for value in (None, "", SUM.upper(), SUM[:-1], 1)],
]


@pytest.mark.parametrize(("place", "value"), STEP_EDITS, ids=repr)
def test_a_manifest_with_one_wrong_value_is_refused(place: tuple[Any, ...], value: Any) -> None:
    obj = plain(STEP)
    edit(obj, place, value)
    refused(STEP, sealed(obj))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_a_time_that_is_no_finite_number_is_refused(text: str) -> None:
    body = STEP.encode()[:-28].replace(b"1700000000.25", text.encode())
    refused(STEP, resealed(body))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_without_end_is_refused(opening: bytes) -> None:
    refused(RANK, resealed(b'{"skeleton":' + opening * 100_000))


def test_a_key_that_occurs_twice_is_refused() -> None:
    body = STEP.encode()[:-28]
    assert "'step' twice" in refused(STEP, resealed(body + b',"step":120')).got


def test_a_second_checksum_is_refused() -> None:
    refused(STEP, resealed(STEP.encode()[:-28] + b',"xxh3":"' + SUM.encode() + b'"'))


def test_a_body_that_is_no_object_is_refused() -> None:
    for body in (b"", b"[1", b'"a"', b"{", b"{}", b"\xff", b"\xef\xbb\xbf{"):
        refused(STEP, resealed(body))


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def test_a_skeleton_nests_up_to_its_bound_and_no_deeper() -> None:
    kept = dataclasses.replace(RANK, skeleton=nested(511))
    assert RankManifest.decode(kept.encode(), path=PATH) == kept
    with pytest.raises(ConfigError, match="512 levels"):
        dataclasses.replace(RANK, skeleton=nested(512)).encode()
    refused(RANK, sealed(plain(RANK) | {"skeleton": nested(512)}))


@pytest.mark.parametrize(
    "skeleton",
    [math.nan, math.inf, {1: 2}, b"", object(), {("a",): 1}],
    ids=["nan", "inf", "a key of int", "bytes", "an object", "a key of tuple"],
)
def test_a_skeleton_that_json_would_change_is_refused(skeleton: Any) -> None:
    with pytest.raises(ConfigError, match="manifest of rank 3"):
        dataclasses.replace(RANK, skeleton=skeleton).encode()


BROKEN: list[Callable[[], Either]] = [
    lambda: dataclasses.replace(RANK, rank=4),
    lambda: dataclasses.replace(RANK, leaves=RANK.leaves * 2),
    lambda: dataclasses.replace(RANK, files=RANK.files[:1]),
    lambda: dataclasses.replace(RANK, files=(dataclasses.replace(RANK.files[0], nbytes=1),)),
    lambda: dataclasses.replace(STEP, step=121),
    lambda: dataclasses.replace(STEP, created_unix_s=math.nan),
    lambda: dataclasses.replace(STEP, ranks=STEP.ranks[1:]),
    lambda: dataclasses.replace(STEP, ranks=()),
]


@pytest.mark.parametrize("build", BROKEN)
def test_what_could_not_be_read_is_not_written(build: Callable[[], Either]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        build().encode()


@given(st.binary(max_size=120))
def test_no_bytes_lead_to_another_error(data: bytes) -> None:
    for manifest in EVERY:
        survives(manifest, data)
        survives(manifest, resealed(data))


@given(st.sampled_from(EVERY), st.integers(0, 700), st.binary(max_size=8), st.integers(0, 8))
def test_no_change_of_a_sealed_manifest_leads_to_another_error(
    manifest: Either, place: int, new: bytes, removed: int
) -> None:
    body = manifest.encode()[:-28]
    survives(manifest, resealed(body[:place] + new + body[place + removed :]))


@given(st.data())
def test_no_json_in_place_of_a_value_leads_to_another_error(data: st.DataObject) -> None:
    manifest = data.draw(st.sampled_from(EVERY))
    obj = plain(manifest)
    place: Any = obj
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    survives(manifest, sealed(obj))
