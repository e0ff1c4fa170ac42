"""The code with which `ckpt_deepspeed` reads its section, without DeepSpeed.

`import ckpt_deepspeed.settings` would import the package first, and with it DeepSpeed. The module itself
needs `ckpt_core` alone, so it is run from its file, under a name that is nobody else's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Protocol

from ckpt_core import Options
from ckpt_core.errors import ConfigError

_NAME = "_ckpt_core_doctor_settings"


class EngineSettings(Protocol):
    """What is used of the settings."""

    @property
    def wait(self) -> str: ...
    @property
    def verify(self) -> bool: ...
    @property
    def options(self) -> Options: ...


def settings_of(config: Mapping[str, Any]) -> EngineSettings | None:
    """Settings of a DeepSpeed configuration, as the integration reads them; None if it does not select it.

    Raises:
        ConfigError: it would be refused.
    """
    module = _module()
    section = module.section_of(config)
    if section is None:
        return None
    settings: EngineSettings = module.EngineSettings.of(section)
    return settings


def _module() -> Any:
    package = find_spec("ckpt_deepspeed")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "ckpt_deepspeed is not installed beside ckpt_core: install ckpt-core again"
        )
    file = Path(package.submodule_search_locations[0]) / "settings.py"
    spec = spec_from_file_location(_NAME, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    # dataclasses look their module up while it runs.
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[_NAME]
    return module
