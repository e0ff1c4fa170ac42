"""Live generators, and containers whose type made the save pickle them whole: what is filled in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ckpt_core.state.generators import are_alike, is_generator, put_generator, shown_generator
from ckpt_core.state.homes import fill_tensor
from ckpt_core.state.optimizers import load_exactly
from ckpt_core.state.plain import (
    SEQUENCES,
    has_state,
    is_array,
    is_filled,
    is_plain_live,
    live_form,
)

Literal = tuple[str, Any, Any]
"""A path, what is live there, and what was pickled in its place."""


class Unlike(Exception):
    """The path where a pickled and a live value differ, and how."""


def pair_up(value: Any, live: Any, path: str) -> Iterator[Literal]:
    """Tensors, arrays, generators and objects with `load_state_dict` in `live`, each with the one in `value`.

    Raises:
        Unlike: they do not fit.
    """
    if is_plain_live(live) and is_plain_live(value):
        return
    if is_filled(live):
        if not _fits(value, live):
            raise Unlike(path, f"{_shown(value)} in the checkpoint, {_shown(live)} here")
        yield path, live, value
        return
    mine, saved = _parts(live), _parts(value)
    prefix = f"{path}." if path else ""
    for key in [*saved, *(key for key in mine if key not in saved)]:
        if key not in mine:
            raise Unlike(f"{prefix}{key}", "unexpected: in the checkpoint, not here")
        if key not in saved:
            raise Unlike(f"{prefix}{key}", "missing: here, not in the checkpoint")
        yield from pair_up(saved[key], mine[key], f"{prefix}{key}")


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, SEQUENCES):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {}


def _fits(value: Any, live: Any) -> bool:
    if isinstance(live, Tensor) and isinstance(value, Tensor):
        same = (value.dtype, value.shape, live_form(value)) == (
            live.dtype,
            live.shape,
            live_form(live),
        )
        return same and type(live) in (Tensor, torch.nn.Parameter) and not live.is_meta
    if is_array(live) and is_array(value):
        return bool((value.dtype, value.shape) == (live.dtype, live.shape) and live.flags.writeable)
    if is_generator(live):
        return are_alike(live, value)
    loads = callable(getattr(live, "load_state_dict", None))
    return loads and type(value) is type(live) and has_state(value)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) or is_array(value):
        return f"{type(value).__name__} of {value.dtype} {list(value.shape)}"
    return shown_generator(value) if is_generator(value) else type(value).__name__


def put(live: Any, value: Any) -> None:
    """Make a live tensor, array, generator or object what the pickled one is."""
    if isinstance(live, Tensor):
        fill_tensor(live, value.detach())
    elif is_array(live):
        live[...] = value
    elif is_generator(live):
        put_generator(live, value)
    else:
        load_exactly(live, value.state_dict)
