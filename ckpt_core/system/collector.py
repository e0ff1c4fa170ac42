"""The cyclic garbage collector, kept from walking the whole heap where nothing that is made is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection by itself, of any thread; where there is none anyway, nothing changes."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()  # in here: an interrupt may come as it returns
        yield
    finally:
        gc.enable()
