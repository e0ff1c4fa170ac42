"""Bits that flip and files that shrink: `verify` finds them, and `restore` falls back."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, CorruptCheckpoint, load, verify
from ckpt_core.restore import RestoreWarning
from tests.crash.layers import hooked
from tests.crash.promises import QuickFiles
from tests.crash.states import blank_like, describe, make_state, options

FILES = ("shard-00000-0.safetensors", "rank-00000.json", "manifest.json")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the steps 10 and 20."""
    root = tmp_path_factory.mktemp("prepared") / "root"
    with Checkpointer(root, options(), files=QuickFiles()) as ck:
        for step in (10, 20):
            ck.save(step, make_state(step)).committed.result(60)
    return root


def flip(place: float) -> Callable[[bytes], bytes | None]:
    def damage(data: bytes) -> bytes:
        at = min(int(len(data) * place), len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return damage


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    **{f"flip at {place}": flip(place) for place in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)},
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte long": lambda data: data + b"\0",
    "a page short": lambda data: data[:-4096],
    "zeros": lambda data: bytes(len(data)),
    "gone": lambda data: None,
}


def hurt(path: Path, damage: Callable[[bytes], bytes | None]) -> None:
    data = damage(path.read_bytes())
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_restore_falls_back(
    name: str, damage: str, prepared: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    hurt(root / "step-000000000020" / name, DAMAGES[damage])
    report = verify(root)
    assert [step.ok for step in report.steps] == [True, False]
    with pytest.raises(CorruptCheckpoint):
        load(root)
    with Checkpointer(root, options(), files=QuickFiles()) as ck:
        live = blank_like(make_state(0))
        with pytest.raises(CorruptCheckpoint):
            ck.restore(live, step=20)
        with pytest.raises(CorruptCheckpoint):
            ck.restore(live, strict=True)
        with pytest.warns(RestoreWarning, match="step 20 was not restored"):
            found = ck.restore(live)
        assert found is not None and found.step == 10
        assert describe(live | {key: found.state[key] for key in ("step", "mark", "notes")}) == (
            10,
            0,
        )
        ck.save(30, make_state(30)).committed.result(60)
        assert ck.steps() == (10, 30)
    assert len(list((root / ".corrupt").glob("step-000000000020-*"))) == 1
    assert verify(root).ok


def test_a_corrupt_step_that_cannot_be_moved_fails_no_save(
    prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def held_fast(name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        if Path(args[0]).name == "step-000000000020":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(args[0]))
        return act()

    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    hurt(root / "step-000000000020" / FILES[0], flip(0.5))
    caplog.set_level("WARNING", logger="ckpt_core")
    with Checkpointer(root, options(), files=hooked(QuickFiles, held_fast, ("rename",))) as ck:
        live = blank_like(make_state(0))
        with pytest.warns(RestoreWarning, match="step 20 was not restored"):
            ck.restore(live)
        for step in (30, 40):
            ck.save(step, make_state(step)).committed.result(60)
        assert ck.steps() == (20, 30, 40)
    assert "A corrupt step stays where it is" in caplog.text


def test_damage_to_every_step_is_an_error_that_names_each(prepared: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    for step in (10, 20):
        hurt(root / f"step-{step:012d}" / FILES[0], flip(0.5))
    with Checkpointer(root, options()) as ck:
        both = pytest.raises(CorruptCheckpoint, match=r"(?s)step 20.*step 10")
        with pytest.warns(RestoreWarning), both:
            ck.restore(blank_like(make_state(0)))
        assert ck.steps() == (10, 20), "nothing is deleted"


def test_every_single_flipped_byte_of_a_step_is_found(prepared: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    missed = []
    for name in FILES:
        path = root / "step-000000000020" / name
        whole = path.read_bytes()
        for at in range(0, len(whole), max(len(whole) // 60, 1)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            if verify(root / "step-000000000020").ok:
                missed.append((name, at))
        path.write_bytes(whole)
    assert not missed
    assert verify(root).ok
