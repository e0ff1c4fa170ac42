"""Opaque values: pickled when they are saved, opened by an unpickler that can call almost nothing."""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
from typing import Any

import torch

from ckpt_core.errors import ConfigError, CorruptCheckpoint, RestoreError, UntrustedData
from ckpt_core.state.building import Refused
from ckpt_core.state.generators import reduce_torch
from ckpt_core.state.keys import TooMuchWork
from ckpt_core.state.nodes import Opaque
from ckpt_core.state.unpickling import read_harmless

_log = logging.getLogger("ckpt_core")
_PROTOCOL = 4
_SHOWN = 200
_told: set[str] = set()
"""Types of which this process has told."""
_looked_bytes: dict[str, int] = {}
"""Of each type, what was looked at: values that are always harmless shall not be looked at for ever."""
_MOST_LOOKED_BYTES = 1 << 16


def pickle_opaque(value: Any, where: str) -> Opaque:
    """Opaque node of a value, pickled at once.

    A restore that will refuse it is told of now, once for a type; the first 64 KiB of a type are looked at.

    Raises:
        ConfigError: it cannot be pickled; names `where` and the type.
    """
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        node = Opaque(name, _pickled(value))
    except Exception as exc:
        raise ConfigError(
            f"{where} is a {name}, which cannot be stored ({type(exc).__name__}: {exc}): leave it"
            " out of the state, or give its class state_dict() and load_state_dict()"
        ) from exc
    looked = _looked_bytes.get(name, 0)
    if name not in _told and looked < _MOST_LOOKED_BYTES:
        _looked_bytes[name] = looked + len(node.data)
        _tell_if_refused(node, where)
    return node


def _tell_if_refused(node: Opaque, where: str) -> None:
    try:
        read_harmless(node.data)
    except Exception as exc:
        _told.add(node.type_name)
        why = f"that calls {exc}" if isinstance(exc, Refused) else str(exc)
        _log.warning(
            "%s is a %s: it is saved, but a restore gives it back only with trusted=True, since %s; leave it"
            " out of the state, or give its class state_dict() and load_state_dict()",
            where,
            node.type_name[:_SHOWN],
            why[:_SHOWN],
        )


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Generator: reduce_torch}
    pickler.dump(value)
    return file.getvalue()


def open_opaque(node: Opaque, *, trusted: bool, path: str) -> Any:
    """The value of an opaque node; `path` names the checkpoint in errors.

    Raises:
        UntrustedData: it needs a global outside the list, or more work than its bytes are worth, and
            `trusted` is False.
        CorruptCheckpoint: the bytes are no harmless pickle.
        RestoreError: `trusted`, and this program cannot open it: a class is another one than was saved.
    """
    name = node.type_name[:_SHOWN]
    try:
        if trusted:
            return pickle.loads(node.data)
        return read_harmless(node.data)
    except Refused as exc:
        raise UntrustedData(
            f"the checkpoint holds a {name}, and loading it would call {exc}: pass"
            " trusted=True if you know who wrote this checkpoint; nothing was run",
            type_name=str(exc),
            path=path,
        ) from exc
    except TooMuchWork as exc:
        raise UntrustedData(
            f"the checkpoint holds a {name} with {exc}: pass trusted=True if you know who"
            " wrote this checkpoint; nothing was run",
            type_name=name,
            path=path,
        ) from exc
    except Exception as exc:
        if trusted:
            raise RestoreError(
                f"the pickled {name} cannot be opened here: {type(exc).__name__}: {str(exc)[:_SHOWN]}. "
                "Nothing was changed: restore it with the class as it was, where it was",
                path=path,
            ) from exc
        raise CorruptCheckpoint(
            f"the pickled {name} cannot be read: {type(exc).__name__}: {str(exc)[:_SHOWN]}",
            path=path,
        ) from exc
