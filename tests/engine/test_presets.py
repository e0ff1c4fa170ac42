"""Published strategies as settings: each saves and restores every bit."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, ConfigError, DirectIO, Level, Mode, Options, StoreOptions
from ckpt_core.options.presets import PRESETS
from tests.engine.engine_training import Run
from tests.engine.test_barriers import SlowFiles, assert_each_step_holds, layerwise

TOP = Path(__file__).parents[2]
NAMES = sorted(PRESETS)
EXPECTED: dict[str, dict[str, Any]] = {
    "default": {},
    "checkfreq": {
        "in_flight": 1,
        "writers": 1,
        "pipelined": False,
        "mode": Mode.AUTO,
        "direct_io": DirectIO.OFF,
        "checksum": False,
    },
    "gpm": {
        "in_flight": 1,
        "writers": 1,
        "mode": Mode.DIRECT,
        "blocking": True,
        "checksum": False,
    },
    "lightcheck": {"in_flight": 1, "writers": 1, "mode": Mode.DIRECT, "checksum": False},
    "pccheck": {"in_flight": 2, "writers": 6, "mode": Mode.HOST, "checksum": False},
    "deepfreeze": {
        "in_flight": 1,
        "writers": 1,
        "mode": Mode.HOST,
        "direct_io": DirectIO.OFF,
        "checksum": False,
    },
}


def test_the_table_has_what_the_papers_have() -> None:
    assert sorted(EXPECTED) == NAMES
    for name, fields in EXPECTED.items():
        assert Options.preset(name) == Options(**fields), name


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_the_state_at_its_step(tmp_path: Path, name: str) -> None:
    options = Options.preset(name, chunk_bytes=4096, eager_leaf_bytes=64, keep_last=None)
    run, copies = Run(), {}
    with Checkpointer(tmp_path, options, files=SlowFiles(1, 0.002)) as ck:
        for _ in range(8):
            run.forward()
            ck.wait_staged()
            run.update()
            copies[run.step] = run.copy()
            ck.save(run.step, run.state())
    assert_each_step_holds(tmp_path, copies)


@pytest.mark.parametrize("name", NAMES)
def test_layer_by_layer_as_well(tmp_path: Path, name: str) -> None:
    run, copies = Run(), {}
    options = Options.preset(name, chunk_bytes=4096, keep_last=None)
    with Checkpointer(tmp_path, options, files=SlowFiles(2, 0.002)) as ck:
        for _ in range(4):
            run.forward()
            ck.wait_staged()
            run.update()
            copies[run.step] = run.copy()
            layerwise(ck, run, lambda names: names[::-1])
    assert_each_step_holds(tmp_path, copies)


def test_changes_win_over_the_preset_and_are_checked() -> None:
    changed = Options.preset("checkfreq", writers=4, pipelined=True, staging_bytes="1GiB")
    assert (changed.writers, changed.pipelined, changed.staging_bytes) == (4, True, 2**30)
    assert changed.in_flight == 1
    assert dataclasses.replace(changed, checksum=True).checksum
    with pytest.raises(ConfigError, match="writers=0"):
        Options.preset("gpm", writers=0)


@pytest.mark.parametrize("name", ["gemini", "PCcheck", "", 3, None, ["gpm"]])
def test_an_unknown_preset_is_an_error_that_lists_all(name: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"preset={name!r} is unknown")) as caught:
        Options.preset(name)
    assert all(known in str(caught.value) for known in NAMES)


def test_an_unknown_field_is_an_error_that_lists_all() -> None:
    for make in (Options, functools.partial(Options.preset, "gpm"), Options.from_env):
        with pytest.raises(ConfigError, match=r"inflight is not .* mean in_flight\? Known are .*"):
            make(inflight=2)
    with pytest.raises(ConfigError, match=r"quux is not a setting: known are .*in_flight"):
        Options(quux=2)


@pytest.mark.parametrize("kind", [Options, Level, StoreOptions])
def test_who_asks_for_the_signature_of_options_finds_them_all(kind: Any) -> None:
    """LightningCLI makes objects from configurations by it."""
    names = [field.name for field in dataclasses.fields(kind)]
    assert list(inspect.signature(kind).parameters) == names
    assert list(inspect.signature(kind.__init__).parameters) == ["self", *names]


def test_the_new_settings_come_from_the_environment_too() -> None:
    environ = {"CKPT_CORE_PIPELINED": "no", "CKPT_CORE_BLOCKING": "true"}
    options = Options.from_env(environ)
    assert (options.pipelined, options.blocking) == (False, True)
    assert not Options.from_env(environ, blocking=False).blocking
    for field in ("pipelined", "blocking"):
        with pytest.raises(ConfigError, match=f"{field}=1 must be True or False"):
            Options(**{field: 1})
        with pytest.raises(ConfigError, match="neither true nor false"):
            Options.from_env({f"CKPT_CORE_{field.upper()}": "maybe"})


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_a_row_for_each(name: str) -> None:
    page = (TOP / "docs" / "presets.md").read_text()
    row = re.search(rf"^\| `{name}` \|(.*)\|$", page, re.MULTILINE)
    assert row is not None
    for field, value in PRESETS[name].fields.items():
        text = f'"{value}"' if isinstance(value, str) else str(value)
        assert f"`{field}={text}`" in row[1], field
