"""A DeepSpeed configuration: does it select this engine, and would the engine take it?"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpt_core import Options
from ckpt_core.cli.doctor import Finding, is_there, note, ok, problem
from ckpt_core.errors import ConfigError
from ckpt_deepspeed_tools.doctor.settings_code import settings_of

KEY = "checkpoint_engine"
TYPE = "ckpt_core"
_OTHERS = frozenset({"checkpoint", "datastates_ckpt"})
"""Keys of DeepSpeed itself that resemble ours."""

_ALIKE = 0.75
_WITHOUT_EFFECT = ("keep_last", "keep_every")


@dataclass(frozen=True, slots=True)
class ConfigReport:
    """What is to be said of a configuration.

    Attributes:
        path: its file.
        has_key: whether it has the key `checkpoint_engine`, right or wrong.
        findings: about it alone.
    """

    path: Path
    has_key: bool
    findings: tuple[Finding, ...]


def check_config(path: Path) -> ConfigReport:
    """Read a configuration and judge it.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    try:
        config = _parse(data.decode())
    except ValueError as exc:
        reason = " ".join(str(exc).split())
        found = problem("config", f"{path} is no configuration: {reason}", "correct it")
        return ConfigReport(path, has_key=False, findings=(found,))
    has_key = config.get(KEY) is not None
    checks = _with_key(config) if has_key else _misnamed(config)
    return ConfigReport(path, has_key, tuple(checks))


def is_ours(value: object) -> bool:
    """Whether a value is a section that names this engine."""
    return isinstance(value, Mapping) and value.get("type") == TYPE


def _with_key(config: Mapping[str, Any]) -> Iterator[Finding]:
    if not isinstance(config.get("checkpoint") or {}, Mapping):
        yield problem("config", "checkpoint is no object", "correct it: DeepSpeed cannot read it")
        return
    try:
        settings = settings_of(config)
    except ConfigError as exc:
        yield problem("config", f"the job would end with: {exc}", "correct it")
        return
    assert settings is not None
    checked = "" if settings.verify else ", and loads without comparing checksums"
    yield ok("config", f'{KEY} selects "{TYPE}": wait="{settings.wait}"{checked}')
    yield from _conflicts(config, settings.options)


def _conflicts(config: Mapping[str, Any], options: Options) -> Iterator[Finding]:
    if _device(config, "offload_optimizer") == "nvme":
        text = "zero_optimization.offload_optimizer to nvme: initialize would refuse"
        yield problem("config", text, f"offload to cpu, or remove the key {KEY}")
    if (config.get("checkpoint") or {}).get("use_node_local_storage") and options.levels:
        text = f"checkpoint.use_node_local_storage with levels of {KEY}: initialize would refuse"
        yield problem("config", text, "remove the levels, or save to storage that all nodes share")
    idle = [name for name in _WITHOUT_EFFECT if name in config[KEY]]
    if idle:
        text = f"{' and '.join(idle)} of {KEY} have no effect: tags are yours to delete"
        yield note("config", text)


def _device(config: Mapping[str, Any], name: str) -> object:
    found: object = config
    for key in ("zero_optimization", name, "device"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _misnamed(config: Mapping[str, Any]) -> Iterator[Finding]:
    """What may have been meant as the key; DeepSpeed ignores keys that it does not know."""
    for place, key, value in _places(config):
        if key == KEY and place:
            text = f"{KEY} is inside {place}, where nobody looks for it"
            yield problem("config", text, "move it to the top level")
        elif key != KEY and (is_ours(value) or (not place and _resembles(key))):
            where = f"{place}.{key}" if place else key
            text = f'"{where}" is ignored: the key is "{KEY}"'
            yield problem("config", text, "rename it, or DeepSpeed saves by its own engine")


def _places(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for key, value in config.items():
        yield "", str(key), value
        for inner, item in value.items() if isinstance(value, Mapping) and key != KEY else ():
            yield str(key), str(inner), item


def _resembles(key: str) -> bool:
    plain = key.lower().replace("-", "_").replace(" ", "_")
    if key in _OTHERS:
        return False
    return difflib.SequenceMatcher(None, plain, KEY).ratio() >= _ALIKE


def _parse(text: str) -> dict[str, Any]:
    """As DeepSpeed does: Hjson, which allows comments, and no key twice.

    Raises:
        ValueError: it is neither JSON nor Hjson, or no object.
    """
    # Hjson comes with DeepSpeed.
    loads = import_module("hjson" if is_there("hjson") else "json").loads
    config = loads(text, object_pairs_hook=_unique)
    if not isinstance(config, dict):
        raise ValueError("it is not one object, {...}")
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"keys that occur twice: {', '.join(twice)}")
    return found
