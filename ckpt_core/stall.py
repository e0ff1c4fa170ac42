"""How long the training thread is inside the engine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


@dataclass(slots=True)
class Stall:
    """Time that the training thread has spent inside the engine.

    Attributes:
        seconds: in all so far.
        ended_s: when it last came out, on the monotonic clock; 0 before the first time.
    """

    seconds: float = 0.0
    ended_s: float = 0.0


def stalling(
    method: Callable[Concatenate[Any, _Given], _Result],
) -> Callable[Concatenate[Any, _Given], _Result]:
    """Count the time of a method that training calls, of an object with a `_pipeline`."""

    @functools.wraps(method)
    def counted(self: Any, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        began_s = time.monotonic()
        try:
            return method(self, *args, **kwargs)
        finally:
            stall = self._pipeline.stall
            stall.ended_s = time.monotonic()
            stall.seconds += stall.ended_s - began_s

    return counted
