"""`look_at`: what reads a root reads it in an object store as well, and no more of it than it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import (
    Checkpointer,
    ConfigError,
    CorruptCheckpoint,
    NotCommitted,
    Options,
    RestoreError,
    restore,
    store,
)
from ckpt_core.cli import main
from ckpt_core.levels import look_at
from ckpt_core.levels.far.door import Away
from ckpt_core.restore import LeafReader, Retired, read_manifests
from tests.levels.memory_far import MemoryFar

MIB = 1 << 20
SHARD = "shard-00000-0.safetensors"
STEPS = (10, 20, 30)


def _state() -> dict[str, Any]:
    big = torch.arange(6 * MIB, dtype=torch.float32)
    return {"model": {"big": big, "small": torch.ones(3)}, "lr": 0.5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of 24 MiB in chunks of 4; not to be changed."""
    root = tmp_path_factory.mktemp("reading") / "run"
    with Checkpointer(root, Options(keep_last=None, chunk_bytes=4 * MIB)) as checkpointer:
        for step in STEPS:
            checkpointer.save(step, _state()).committed.result(60)
    return root


@pytest.fixture
def far(root: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryFar:
    """What its URL leads to as well."""
    far = MemoryFar(root)
    monkeypatch.setattr("ckpt_core.levels.far.reading.open_far", lambda url: far)
    return far


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing temporary may be left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.iterdir())


def _load(far: MemoryFar, url: str = MemoryFar.url) -> Any:
    with look_at(url, far=far) as look:
        step = look.ready(store.resolve(look.path))
        return restore.load(step, files=look.files)


def _verify(far: MemoryFar) -> restore.Report:
    return ckpt_core.verify(far.url)


def test_the_newest_step_is_loaded_and_each_byte_is_fetched_once(far: MemoryFar) -> None:
    assert torch.equal(_load(far)["model"]["big"], _state()["model"]["big"])
    ranges = [(start, start + length) for name, start, length in far.ranges if name == SHARD]
    ranges.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert far.requests["manifest"] == 1, "only of the step that is read"


def test_a_step_is_named_by_its_url(far: MemoryFar) -> None:
    assert _load(far, f"{far.url}/step-000000000010")["lr"] == 0.5
    assert far.requests["steps"] == 0


def test_a_step_that_is_not_there_is_told_with_those_that_are(far: MemoryFar) -> None:
    with pytest.raises(NotCommitted, match=r"newest steps: 10, 20, 30"):
        _load(far, f"{far.url}/step-000000000011")
    far.targets.clear()
    with pytest.raises(NotCommitted, match=r"s3://bucket/run holds no committed step"):
        _load(far)


def test_every_step_is_verified_and_named_by_its_url(far: MemoryFar) -> None:
    report = _verify(far)
    assert report.ok
    assert [str(step.path) for step in report.steps] == [
        f"s3://bucket/run/step-{step:012d}" for step in STEPS
    ]
    assert report.checked_bytes == 3 * len(far.targets["step-000000000010"][SHARD])


@pytest.mark.parametrize(
    "damage", ["a byte", "a file that is shorter", "a file that is gone", "a rank manifest"]
)
def test_damage_at_the_level_is_found_and_named(far: MemoryFar, damage: str) -> None:
    held = far.targets["step-000000000020"]
    if damage == "a byte":
        held[SHARD] = held[SHARD][:-1] + b"\xff"
    elif damage == "a file that is shorter":
        held[SHARD] = held[SHARD][:-1]
    elif damage == "a file that is gone":
        del held[SHARD]
    else:
        held["rank-00000.json"] = held["rank-00000.json"].replace(b"model", b"m0del")
    report = _verify(far)
    assert [step.ok for step in report.steps] == [True, False, True]
    told = " ".join([*report.problems, *map(str, report.bad_chunks)])
    assert "s3://bucket/run/step-000000000020/" in told
    assert tempfile.gettempdir() not in told


@pytest.mark.parametrize("ranges", [0, 1, 3])
def test_a_store_that_goes_away_is_no_damage_but_an_error_that_says_so(
    far: MemoryFar, ranges: int
) -> None:
    far.gone_after = ranges
    for read in (_load, _verify):
        far.ranges.clear()
        with pytest.raises(RestoreError, match="cannot be reached: connection refused") as caught:
            read(far)
        assert "try again" in str(caught.value)
        assert tempfile.gettempdir() not in str(caught.value)


@pytest.mark.parametrize("read", [_load, _verify], ids=["load", "verify"])
@pytest.mark.parametrize("asked", ["manifest", "files"])
def test_a_step_of_which_the_level_tells_nothing_once_is_not_damaged(
    far: MemoryFar, asked: str, read: Callable[[MemoryFar], Any]
) -> None:
    def away(*given: Any) -> Any:
        delattr(far, asked)
        raise Away("503 slow down")

    setattr(far, asked, away)
    with pytest.raises(RestoreError, match="503 slow down") as caught:
        read(far)
    assert not isinstance(caught.value, CorruptCheckpoint)


def _change(far: MemoryFar, how: str) -> None:
    """Retire a step, or replace it by another save, between two reads of it."""
    real = far.read_into
    name = "step-000000000030"

    def read_into(copy: Any, file: str, buffer: memoryview, offset: int) -> None:
        if file == SHARD and offset > MIB and name in far.targets:
            if how == "retired":
                del far.targets[name]
            else:
                manifest = json.loads(far.targets[name]["manifest.json"])
                manifest["attempt"] = "000000000030-0123abcd"
                far.targets[name] = {"manifest.json": json.dumps(manifest).encode()}
        real(copy, file, buffer, offset)

    far.read_into = read_into  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["retired", "replaced"])
def test_a_step_that_goes_while_it_is_read_is_told_as_such(far: MemoryFar, how: str) -> None:
    _change(far, how)
    with pytest.raises(Retired, match=r"s3://bucket/run/step-000000000030 was retired or replaced"):
        _load(far)


def _away(far: MemoryFar, step: int, before: str) -> None:
    """Retire a step before a range of its shard is read, or before its files are listed."""
    real, name = getattr(far, before), f"step-{step:012d}"

    def once(copy: Any, *more: Any) -> Any:
        if copy.step != step or (before == "read_into" and more[0] != SHARD):
            return real(copy, *more)
        far.targets.pop(name, None)
        return {} if before == "files" else real(copy, *more)

    setattr(far, before, once)


@pytest.mark.parametrize("before", ["files", "read_into"])
def test_load_of_a_root_goes_on_to_the_newest_step_where_its_own_is_retired(
    far: MemoryFar, before: str
) -> None:
    _away(far, 30, before)
    assert ckpt_core.load(far.url, only=iter(["model", "lr"]))["lr"] == 0.5
    assert "step-000000000030" not in far.targets


@pytest.mark.parametrize("before", ["files", "read_into"])
def test_load_of_a_step_that_is_retired_says_so(far: MemoryFar, before: str) -> None:
    _away(far, 30, before)
    with pytest.raises(Retired, match=r"s3://bucket/run/step-000000000030 was retired or replaced"):
        ckpt_core.load(f"{far.url}/step-000000000030")


@pytest.mark.parametrize("before", ["files", "read_into"])
def test_verify_of_a_root_leaves_out_what_is_retired_and_reads_all_else(
    far: MemoryFar, before: str
) -> None:
    held = far.targets["step-000000000030"]
    held[SHARD] = held[SHARD][:-1] + b"\xff"
    _away(far, 20, before)
    assert [(step.step, step.ok) for step in _verify(far).steps] == [(10, True), (30, False)]


def test_the_command_leaves_out_what_is_retired_too(
    far: MemoryFar, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _away(far, 20, "read_into")
    monkeypatch.setattr(sys, "argv", ["ckpt-core", "verify", far.url, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = json.loads(capsys.readouterr().out)
    assert not ended.value.code and told["retired"] == [20]
    assert [step["step"] for step in told["steps"]] == [10, 30]


def test_a_list_of_many_steps_reads_no_ranges(far: MemoryFar) -> None:
    for step in range(100, 150):
        far.targets[f"step-{step:012d}"] = far.targets["step-000000000010"]
    with look_at(far.url, far=far) as look:
        look.outline()
        assert len(store.committed_steps(look.path)) == 53
        size = (look.path / "step-000000000100" / SHARD).stat().st_size
        assert size == len(far.targets["step-000000000010"][SHARD])
    assert far.requests == {"steps": 1, "manifest": 53, "files": 53}
    assert not far.ranges


def test_leaves_are_read_in_large_pieces_and_each_byte_once(far: MemoryFar) -> None:
    with look_at(far.url, far=far) as look:
        step = read_manifests(look.ready(store.resolve(look.path)), files=look.files)
        far.ranges.clear()
        with LeafReader(step, files=look.files) as reader:
            data = b"".join(map(bytes, reader.blocks(reader.leaves.shared["model.big"])))
    assert data == bytes(_state()["model"]["big"].numpy().tobytes())
    fetched = sum(length for _, _, length in far.ranges)
    assert fetched <= len(far.targets["step-000000000030"][SHARD])
    assert len(far.ranges) <= 12


def test_a_leaf_is_read_without_the_rest_of_its_file(far: MemoryFar) -> None:
    with look_at(far.url, far=far) as look:
        step = read_manifests(look.ready(store.resolve(look.path)), files=look.files)
        far.ranges.clear()
        with LeafReader(step, files=look.files) as reader:
            list(reader.blocks(reader.leaves.shared["model.small"]))
    assert sum(length for _, _, length in far.ranges) <= 8 * MIB


def test_names_that_lead_out_of_the_step_make_no_file(far: MemoryFar, tmp_path: Path) -> None:
    held = far.targets["step-000000000030"]
    held |= {"../../../../outside": b"x", "/outside": b"x", "../step-000000000099/a": b"x"}
    with look_at(far.url, far=far) as look:
        for step in list(look.path.iterdir()):
            look.ready(step)
        names = {path.name for path in Path(os.fspath(look.path)).rglob("*")}
    assert "outside" not in " ".join(names)
    assert "step-000000000099" not in names


def test_what_was_read_of_one_file_is_not_given_for_another(far: MemoryFar, root: Path) -> None:
    with look_at(far.url, far=far) as look:
        for step in list(look.path.iterdir()):
            look.ready(step)
        for _ in range(2):
            for step in STEPS:
                path = look.path / f"step-{step:012d}" / SHARD
                fd = look.files.open_read(path)
                got = bytearray(5000)
                assert look.files.preadv(fd, [memoryview(got)], 4000) == 5000
                look.files.close(fd)
                assert got == far.targets[path.parent.name][SHARD][4000:9000]


@pytest.mark.parametrize(
    "read",
    [
        ckpt_core.load,
        ckpt_core.verify,
        ckpt_core.committed_steps,
        ckpt_core.committed_directories,
    ],
)
def test_a_url_that_cannot_be_is_refused_at_once(read: Callable[[str], Any]) -> None:
    for url, text in {"http://x/y": "unknown scheme", "s3://": "names no bucket"}.items():
        with pytest.raises(ConfigError, match=text):
            read(url)


def test_a_url_of_a_file_is_a_directory(root: Path) -> None:
    assert ckpt_core.committed_steps(f"file://{root}") == STEPS
    assert ckpt_core.load(f"file://{root}")["lr"] == 0.5
    assert ckpt_core.verify(f"file://{root}").ok


_HERE = """
import sys
import ckpt_core
root = sys.argv[1]
ckpt_core.load(root), ckpt_core.verify(root), ckpt_core.committed_steps(root)
print([name for name in sys.modules if name.startswith(("ckpt_core.levels", "obstore"))])
"""


def test_a_directory_is_read_without_anything_of_levels(root: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", _HERE, str(root)], capture_output=True, timeout=120, check=True
    )
    assert made.stdout.strip() == b"[]"
