"""CKPT_CORE_LEVELS under integrations: it counts where nobody names levels, and nothing else does."""

from __future__ import annotations

import pytest

from ckpt_core import ConfigError, Level, Options

ENV = {"CKPT_CORE_LEVELS": '[{"url": "/far", "every": 100}]', "CKPT_CORE_WRITERS": "3"}


def test_levels_of_the_environment_count_where_none_are_named() -> None:
    assert Options().or_places_from_env(ENV) == Options(levels=[Level("/far", every=100)])


def test_levels_that_are_named_win() -> None:
    named = Options(levels=["/near"])
    assert named.or_places_from_env(ENV) == named


def test_without_the_variable_nothing_changes() -> None:
    assert Options(writers=2).or_places_from_env({"CKPT_CORE_WRITERS": "3"}) == Options(writers=2)


def test_what_does_not_parse_is_said() -> None:
    with pytest.raises(ConfigError, match="is no JSON"):
        Options().or_places_from_env({"CKPT_CORE_LEVELS": "/far"})
