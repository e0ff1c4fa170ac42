"""The cyclic garbage collector, kept from walking the whole heap where nothing that is made is garbage."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckpt_core.system.interrupts import putting_back

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def uncollected(call: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The same call with no collection by itself meanwhile, of any thread; where it is off anyway, as is."""

    @functools.wraps(call)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        def undisturbed() -> _Result:
            gc.disable()
            return call(*args, **kwargs)

        if not gc.isenabled():
            return call(*args, **kwargs)
        return putting_back(undisturbed, gc.enable)

    return called
