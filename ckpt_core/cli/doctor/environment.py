"""Python, torch, the frameworks, and environment variables of ours."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_core._version import __version__
from ckpt_core.cli.doctor.finding import Finding, note, ok, problem, warning
from ckpt_core.cli.doctor.framework import Framework
from ckpt_core.cli.doctor.trials import Trial
from ckpt_core.cli.doctor.versions import installed_version, is_older, is_there, least_version
from ckpt_core.errors import ConfigError
from ckpt_core.options import ENV_PREFIX, Options
from ckpt_core.units import size_text

_TORCH = """
import warnings
import torch
from ckpt_core.system.devices import Devices
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    told["devices"] = Devices().inventory()
versions = [getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")]
told["build"] = next(filter(None, versions), None) or Devices().kind()
told["said"] = [str(warning.message) for warning in caught]
"""


def check_environment(
    trials: Mapping[str, Trial], frameworks: Sequence[Framework], *, asked: bool
) -> list[Finding]:
    """What is installed, and whether it can be imported.

    Args:
        trials: by name; those that are missing were not tried.
        frameworks: those that have an integration.
        asked: the user asked about a job of one.
    """
    return [
        _python(),
        *_ourselves(),
        *_checked(TORCH, trials.get("torch")),
        *_frameworks(trials, frameworks, asked=asked),
        *check_variables(os.environ),
    ]


def check_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables with our prefix, one by one: those that `Options.from_env` would refuse, and the others."""
    good = []
    for name in sorted(key for key in environ if key.upper().startswith(ENV_PREFIX)):
        try:
            Options.from_env({name: environ[name]})
        except ConfigError as exc:
            yield problem("variables", f"Options.from_env() refuses it: {exc}", "correct it")
            continue
        if name.startswith(ENV_PREFIX):
            good.append(f"{name}={environ[name]}")
        else:
            yield warning("variables", f"{name} is ignored", "write it in capitals")
    if good:
        advice = "integrations read levels, events_file and metrics of them, and ignore the others"
        yield note("variables", f"{', '.join(good)}: read by Options.from_env()", advice)


def _python() -> Finding:
    text = (
        f"{platform.python_version()}, {platform.system()} {platform.release().partition('-')[0]}"
    )
    if platform.system() != "Linux":
        return problem("python", text, "ckpt-core needs Linux")
    return ok("python", text)


def _ourselves() -> Iterator[Finding]:
    version = installed_version("ckpt-core")
    if version is None:
        advice = "install it, or no minimum versions of others are known"
        yield note("ckpt-core", f"{__version__}, not installed as a package", advice)
    elif version != __version__:
        text = f"the code that runs is {__version__}, the package installed is {version}"
        yield warning("ckpt-core", text, "there are two copies: uninstall one, or install again")
    else:
        yield ok("ckpt-core", __version__)


def _checked(one: Framework, trial: Trial | None) -> Iterator[Finding]:
    yield _package(one, trial)
    if trial is not None and trial.error is None:
        yield from one.judge(trial.told)


def _package(one: Framework, trial: Trial | None) -> Finding:
    if not is_there(one.name):
        return problem(one.name, "not installed", one.install)
    version, least = installed_version(one.name), least_version(one.name)
    if version is not None and least is not None and is_older(version, least):
        return problem(one.name, f"{version} is too old", f"ckpt-core needs {least} or newer")
    text = (version or "of unknown version") + ("" if least is None else f" (needs {least})")
    if trial is not None and trial.error is not None:
        found = f"{text}, but {one.needs} cannot be imported: {trial.error}"
        advice = f"`python -c 'import {one.needs}'` says more; or {one.install}"
        return problem(one.name, found, advice)
    return ok(one.name, text if trial is not None else f"{text}, not tried")


def _frameworks(
    trials: Mapping[str, Trial], frameworks: Sequence[Framework], *, asked: bool
) -> Iterator[Finding]:
    absent = {one.name: one.absent(asked) for one in frameworks if not is_there(one.name)}
    for one in frameworks:
        if one.name not in absent:
            yield from _checked(one, trials.get(one.name))
    yield from [found for _, found in sorted(absent.items()) if found is not None]
    silent = [name for name, found in absent.items() if found is None]
    if silent:
        yield note("frameworks", f"not installed: {', '.join(silent)}")


def _devices(told: Mapping[str, Any]) -> Iterator[Finding]:
    build, devices = told["build"], told["devices"]
    if devices:
        names = [f"{name} ({size_text(nbytes)})" if nbytes else name for name, nbytes in devices]
        kinds = {name: names.count(name) for name in names}
        yield ok("devices", ", ".join(f"{count} x {name}" for name, count in kinds.items()))
    elif build is None:
        yield note("devices", "none: this torch is built for CPUs alone")
    else:
        said = " ".join([" ".join(text.split()) for text in told["said"]])
        found = f"torch is built for {build} and sees no device{': ' if said else ''}{said}"
        advice = (
            "fine where no job trains on one; else see what its driver says, such as nvidia-smi"
        )
        yield note("devices", found, advice)


TORCH = Framework(
    name="torch",
    needs="torch",
    install="pip install torch",
    place=0,
    program=_TORCH,
    judge=_devices,
)
