"""Further roots under the callback."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_core import ConfigError, Level, Options
from ckpt_lightning import AsyncCheckpoint


def test_levels_are_given_to_the_callback_in_its_options_or_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_CORE_LEVELS", '["/environment"]')
    given = {"url": "/argument", "every": 100}
    options = Options(levels=["/options"])
    assert AsyncCheckpoint(tmp_path).options.levels == (Level("/environment"),)
    assert AsyncCheckpoint(tmp_path, options=options).options.levels == (Level("/options"),)
    both = AsyncCheckpoint(tmp_path, levels=[given], options=options)
    assert both.options.levels == (Level("/argument", every=100),)


def test_a_level_that_is_none_is_refused_where_the_callback_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="levels: number 1: 'often' is no field of a level"):
        AsyncCheckpoint(tmp_path, levels=[{"url": "/far", "often": 1}])
