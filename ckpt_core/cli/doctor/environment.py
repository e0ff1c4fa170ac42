"""Python, torch, the frameworks, and environment variables of ours."""

from __future__ import annotations

import dataclasses
import difflib
import os
import platform
from collections.abc import Iterator, Mapping

from ckpt_core._version import __version__
from ckpt_core.cli.doctor.finding import Finding, note, ok, problem, warning
from ckpt_core.cli.doctor.trials import Trial
from ckpt_core.cli.doctor.versions import installed_version, is_older, is_there, least_version
from ckpt_core.cli.text import size_text
from ckpt_core.errors import ConfigError
from ckpt_core.options import ENV_PREFIX, Options

_FRAMEWORKS = ("lightning", "deepspeed", "horovod")
_INSTALL = {
    "torch": "pip install torch",
    "lightning": "pip install 'ckpt-core[lightning]'",
    "deepspeed": "pip install 'ckpt-core[deepspeed]'",
    "horovod": "build it as docs/horovod.md says",
}


def framework_names() -> list[str]:
    """What is installed of torch and the frameworks that have an integration."""
    return [name for name in ("torch", *_FRAMEWORKS) if is_there(name)]


def check_environment(trials: Mapping[str, Trial], *, wants_deepspeed: bool) -> list[Finding]:
    """What is installed, and whether it can be imported.

    Args:
        trials: by name; those that are missing were not tried.
        wants_deepspeed: the user asked about a job of DeepSpeed.
    """
    return [
        _python(),
        *_ourselves(),
        *_package("torch", trials.get("torch")),
        *_cuda(trials.get("torch")),
        *_frameworks(trials, wants_deepspeed=wants_deepspeed),
        *check_variables(os.environ),
    ]


def check_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables with our prefix, one by one: those that `Options.from_env` would refuse, and the others."""
    known = [ENV_PREFIX + field.name.upper() for field in dataclasses.fields(Options)]
    good = []
    for name in sorted(key for key in environ if key.upper().startswith(ENV_PREFIX)):
        try:
            Options.from_env({name: environ[name]})
        except ConfigError as exc:
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]}?" if close and name not in known else "correct it"
            yield problem("variables", f"Options.from_env() refuses it: {exc}", advice)
            continue
        if name.startswith(ENV_PREFIX):
            good.append(f"{name}={environ[name]}")
        else:
            yield warning("variables", f"{name} is ignored", "write it in capitals")
    if good:
        advice = "everything else ignores them, a DeepSpeed configuration too"
        yield note("variables", f"{', '.join(good)}: read by Options.from_env() alone", advice)


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


def _package(name: str, trial: Trial | None) -> Iterator[Finding]:
    if not is_there(name):
        yield problem(name, "not installed", _INSTALL[name])
        return
    version, least = installed_version(name), least_version(name)
    if version is not None and least is not None and is_older(version, least):
        yield problem(name, f"{version} is too old", f"ckpt-core needs {least} or newer")
        return
    text = (version or "of unknown version") + ("" if least is None else f" (needs {least})")
    if trial is not None and trial.error is not None:
        what = name if name == "torch" else f"ckpt_{name}"
        found = f"{text}, but {what} cannot be imported: {trial.error}"
        yield problem(name, found, f"`python -c 'import {what}'` says more; or {_INSTALL[name]}")
        return
    yield ok(name, text if trial is not None else f"{text}, not tried")


def _cuda(torch: Trial | None) -> Iterator[Finding]:
    if torch is None or torch.error is not None:
        return
    build, devices = torch.told["build"], torch.told["devices"]
    if devices:
        names = [f"{name} ({size_text(nbytes)})" for name, nbytes in devices]
        kinds = {name: names.count(name) for name in names}
        yield ok("cuda", ", ".join(f"{count} x {name}" for name, count in kinds.items()))
    elif build is None:
        yield note("cuda", "none: this torch is built for CPUs alone")
    else:
        said = " ".join([" ".join(text.split()) for text in torch.told["said"]])
        found = f"torch is built for {build} and sees no device{': ' if said else ''}{said}"
        yield note("cuda", found, "fine where no job trains on a GPU; see nvidia-smi")


def _frameworks(trials: Mapping[str, Trial], *, wants_deepspeed: bool) -> Iterator[Finding]:
    absent = [name for name in _FRAMEWORKS if not is_there(name)]
    for name in _FRAMEWORKS:
        if name not in absent:
            yield from _package(name, trials.get(name))
            yield from _controllers(trials.get(name))
    if wants_deepspeed and "deepspeed" in absent:
        absent.remove("deepspeed")
        advice = "run the command where the job runs, too"
        yield warning("deepspeed", "not installed here", advice)
    if "lightning" in absent and is_there("pytorch_lightning"):
        absent.remove("lightning")
        text = "only pytorch_lightning is installed, whose Trainer takes no callback of ours"
        yield warning("lightning", text, f"{_INSTALL['lightning']}, and import lightning.pytorch")
    if absent:
        yield note("frameworks", f"not installed: {', '.join(absent)}")


def _controllers(trial: Trial | None) -> Iterator[Finding]:
    if trial is not None and trial.told.get("controllers") == []:
        yield problem("horovod", "built with neither Gloo nor MPI", _INSTALL["horovod"])
