"""Calls that `torch.compile` leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def untraced(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The same function; a compiled one calls it as it is, and nothing that it does is traced.

    It would trace and compile the engine frame by frame, for a minute at the first call. As
    `torch.compiler.disable`, which imports the compiler, for seconds, and puts a frame of its own around
    each call. Of a function that is made anew for each method all are meant: they have one code.
    """
    assert isinstance(function, FunctionType)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    try:
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):
        pass  # Not documented: where it is not there, or another one, a compiled call is only slower.
    return function
