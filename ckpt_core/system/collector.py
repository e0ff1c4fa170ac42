"""The cyclic garbage collector, kept from walking the whole heap where nothing that is made is garbage."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckpt_core.system.interrupts import putting_back

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_paused = False


def pause() -> None:
    """Switch it off, where it is on, until `resume`."""
    global _paused
    # Order matters: an interrupt between the two leaves no collector that is off and not known to be.
    _paused = True
    gc.disable()
    # Again: a handler that came in between may have resumed.
    _paused = True


def resume() -> None:
    """Switch it on again. Idempotent."""
    global _paused
    gc.enable()
    _paused = False


def _after_fork() -> None:
    # Who has paused it may be a thread that the child does not have.
    if _paused:
        resume()


os.register_at_fork(after_in_child=_after_fork)


def uncollected(call: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The same call with no collection by itself meanwhile, of any thread; where it is off anyway, as is."""

    @functools.wraps(call)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        def undisturbed() -> _Result:
            pause()
            return call(*args, **kwargs)

        if not gc.isenabled():
            return call(*args, **kwargs)
        try:
            # Not `resume`: what is written in C is done or not begun, also for a second interrupt.
            return putting_back(undisturbed, gc.enable)
        finally:
            resume()

    return called
