"""The cyclic garbage collector, kept from walking the whole heap where nothing that is made is garbage."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def uncollected(call: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The same call with no collection by itself meanwhile, of any thread; where there is none anyway, as is.

    No context manager: a second interrupt, as one is left, would put off its end for as long as somebody
    holds the traceback.
    """

    @functools.wraps(call)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if not gc.isenabled():
            return call(*args, **kwargs)
        try:
            try:
                gc.disable()  # in here: an interrupt may come as it returns
                return call(*args, **kwargs)
            finally:
                gc.enable()
        finally:
            gc.enable()  # a second interrupt may have come before the first one's

    return called
