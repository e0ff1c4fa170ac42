"""Calls of torch that warn of what the caller knows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from ckpt_core.system.interrupts import putting_back

T = TypeVar("T")


def quietly(call: Callable[[], T], message: str = "") -> T:
    """What `call` returns; warnings that begin like this, by default all, are not shown meanwhile.

    Whether gradients are recorded is as before, whatever `call` has made of it.
    """
    filters, gradients = warnings.filters, torch.is_grad_enabled()

    def unheard() -> T:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=message)
            return call()

    def back() -> None:
        # An interrupt between the calls of a `with`, of the one above or of torch's `no_grad` in a load,
        # would leave warnings or gradients off for as long as the process lives.
        warnings.filters = filters
        torch._C._set_grad_enabled(gradients)

    return putting_back(unheard, back)
