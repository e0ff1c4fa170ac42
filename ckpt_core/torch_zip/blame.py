"""Which part of a tree is meant: looked for when something is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ckpt_core.errors import ConfigError


def unsavable(tree: Any, error: Exception, attempt: Callable[[Any], None]) -> ConfigError:
    """The error for the caller, with the path of the smallest part that fails on its own.

    Called when `error` came from saving `tree`. Costs about as much as saving it once for each level.

    Args:
        tree: what could not be saved.
        error: why.
        attempt: saves a part, and raises if that cannot be.
    """
    path: list[str] = []
    # Texts, not exceptions: those would hold on to this frame, and with it to the tree.
    why = str(error)
    seen: set[int] = set()
    part = tree
    while id(part) not in seen:
        seen.add(id(part))
        found = _failing(part, attempt)
        if found is None:
            break
        name, part, why = found
        path.append(name)
    place = ".".join(path) or "the state"
    return ConfigError(
        f"{place}: this {type(part).__qualname__} cannot be saved: {why}. "
        "Leave it out of the state, or save something in its place that can be pickled"
    )


def tensor_paths(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree, each with its path; each object is looked into once."""
    seen: set[int] = set()
    waiting = [("", tree)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, Tensor):
            yield path or "the tree itself", part
        elif id(part) not in seen:
            seen.add(id(part))
            below = [(f"{path}.{name}" if path else name, inner) for name, inner in _parts(part)]
            waiting += reversed(below)


def _failing(whole: Any, attempt: Callable[[Any], None]) -> tuple[str, Any, str] | None:
    """The first direct part of `whole` that fails on its own: its name, the part, and why."""
    for name, part in _parts(whole):
        try:
            attempt(part)
        except Exception as exc:
            return name, part, str(exc)
    return None


def _parts(whole: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(whole, dict):
        yield from [(str(key), value) for key, value in whole.items()]
    elif isinstance(whole, list | tuple):
        yield from [(str(index), value) for index, value in enumerate(whole)]
    yield from getattr(whole, "__dict__", {}).items()
