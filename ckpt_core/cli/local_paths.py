"""Options that name files and directories of this machine: read as text, for a `Path` loses a URL's slash."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from typer.models import ArgumentInfo, OptionInfo

from ckpt_core.errors import ConfigError

Request = TypeVar("Request")

_AS_TEXT: dict[Any, Any] = {
    Path: str,
    Path | None: str | None,
    list[Path]: list[str],
    list[Path] | None: list[str] | None,
}


def signature_of(request: type) -> inspect.Signature:
    """What typer reads the options of a command from: the fields of its request, with paths as text."""
    signature = inspect.signature(request, eval_str=True)
    fields = [
        field.replace(annotation=_as_text(field.annotation))
        for field in signature.parameters.values()
    ]
    return signature.replace(parameters=fields, return_annotation=None)


def request_of(kind: type[Request], options: Mapping[str, Any]) -> Request:
    """The request that holds what typer has read.

    Raises:
        ConfigError: nothing, or a URL, is given where only a path of this machine will do.
    """
    given = dict(options)
    for name, field in inspect.signature(kind, eval_str=True).parameters.items():
        fits, info = get_args(field.annotation)
        if fits in _AS_TEXT and given.get(name) is not None:
            given[name] = _paths(given[name], _label(name, info))
    return kind(**given)


def _as_text(annotation: Any) -> Any:
    kind, info = get_args(annotation)
    if kind not in _AS_TEXT:
        return annotation
    shown = copy.copy(info)
    shown.metavar = info.metavar or "PATH"
    return Annotated[_AS_TEXT[kind], shown]


def _paths(text: str | list[str], label: str) -> Path | list[Path]:
    if isinstance(text, list):
        return [_path(one, label) for one in text]
    return _path(text, label)


def _path(text: str, label: str) -> Path:
    if not text:
        raise ConfigError(f"{label} is empty: it names no file or directory")
    if "://" not in text:
        return Path(text)
    # Only here: `--help` needs nothing of it.
    from ckpt_core.cli.places import directory_of

    return directory_of(text, command=label, what="a directory or file of this machine")


def _label(name: str, info: ArgumentInfo | OptionInfo) -> str:
    """What a person knows it as."""
    if isinstance(info, ArgumentInfo):
        return info.metavar or name.upper()
    # Where the default stands elsewhere, the first name is taken for it.
    named = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
    return named[0] if named else "--" + name.replace("_", "-")
