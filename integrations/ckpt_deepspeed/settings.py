"""What the key `checkpoint_engine` of a DeepSpeed configuration says."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Self

from ckpt_core import ConfigError, Level, Mode, Options

KEY = "checkpoint_engine"
TYPE = "ckpt_core"
_OWN = ("type", "wait", "verify", "preset")


class Wait(StrEnum):
    """When `save_checkpoint` returns.

    STAGED: once staging has been started; the next update waits for its end. PERSISTED: once the tag is
    durable and `latest` names it.
    """

    STAGED = "staged"
    PERSISTED = "persisted"


@dataclass(frozen=True)
class EngineSettings:
    """One engine's settings.

    Attributes:
        options: of each Checkpointer.
        wait: when a save returns.
        verify: compare checksums before a tag is loaded.
    """

    options: Options = Options()
    wait: Wait = Wait.STAGED
    verify: bool = True

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Self:
        """From the section of a configuration.

        Raises:
            ConfigError: a key is unknown, or its value wrong.
        """
        section = plain(section)  # as it will be kept: two engines of one configuration are alike
        fields = {field.name for field in dataclasses.fields(Options)}
        unknown = sorted(set(section) - fields - set(_OWN))
        if unknown:
            known = ", ".join([*_OWN, *sorted(fields)])
            raise ConfigError(f"{KEY}.{unknown[0]} is not a setting: known are {known}")
        verify = section.get("verify", True)
        if not isinstance(verify, bool):
            raise ConfigError(f"{KEY}.verify={verify!r} must be true or false")
        try:
            given = {key: section[key] for key in section if key in fields}
            options = Options.preset(section.get("preset", "default"), **given).or_places_from_env()
        except ConfigError as exc:
            raise ConfigError(f"{KEY}.{exc}") from exc
        _check(options, section)
        return cls(options, _wait(section.get("wait", Wait.STAGED)), verify)


def _check(options: Options, section: Mapping[str, Any]) -> None:
    """ConfigError for what files of DeepSpeed cannot be saved with, asked for by itself or by a preset."""

    def where(key: str) -> str:
        return f"{KEY}." if key in section else f"{KEY}.preset={section['preset']!r} sets "

    if not options.pipelined:
        raise ConfigError(
            f"{where('pipelined')}pipelined=false: the files of a tag become known one by one, so no "
            f"staging memory can be had for all of them; remove the key, or set it to true"
        )
    # By itself the mode does nothing here; a preset that is known by it would not be what it says.
    if options.mode is Mode.DIRECT and "mode" not in section:
        raise ConfigError(
            f'{where("mode")}mode="direct": the files of a tag go through staging memory and are not '
            f'mapped; take another preset, or set "mode": "host"'
        )
    if options.frozen:
        raise ConfigError(
            f"{where('frozen')}frozen={list(options.frozen)}: the files of a tag are shared whole, and which "
            f"of them stay the same is found by itself; remove the key, and keep share_unchanged"
        )
    if options.blocking:
        raise ConfigError(
            f'{where("blocking")}blocking=true: use "wait": "persisted", which is the same here, and '
            f'"blocking": false'
        )


def _wait(value: object) -> Wait:
    try:
        return Wait(str(value))
    except ValueError:
        known = " or ".join(repr(item.value) for item in Wait)
        raise ConfigError(f"{KEY}.wait={value!r} is unknown: use {known}") from None


def section_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that selects this engine; None if the configuration does not.

    Raises:
        ConfigError: the key is there and names another engine, or one of DeepSpeed's own is chosen as well.
    """
    section = config.get(KEY)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ConfigError(f'{KEY}={section!r} must be an object, such as {{"type": "{TYPE}"}}')
    if section.get("type") != TYPE:
        raise ConfigError(
            f'{KEY}.type={section.get("type")!r} is unknown: this key selects "{TYPE}". DeepSpeed\'s own '
            f"engines have the keys checkpoint.writer and datastates_ckpt"
        )
    own = config.get("checkpoint")
    writer = own.get("writer") if isinstance(own, Mapping) else None
    if writer is not None or config.get("datastates_ckpt"):
        other = "checkpoint.writer" if writer is not None else "datastates_ckpt"
        raise ConfigError(f"{KEY} and {other} both select a checkpoint engine: remove one of them")
    return section


def plain(value: Any) -> Any:
    """What a configuration says, in values of JSON: DeepSpeed prints it, and pickles it into files that are
    read without this package.
    """
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Level):
        usual = {one.name: one.default for one in dataclasses.fields(Level)}
        given = {name: getattr(value, name) for name in usual}
        value = {name: one for name, one in given.items() if one != usual[name]}
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value
