"""File layers that fail, hang or dawdle; the real engine runs above them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ckpt_core.system.files import Files
from tests.crash.layers import CHANGES, hooked
from tests.crash.promises import QuickFiles


class FaultAt:
    """The n-th operation (counted from 0) of the given names fails with an errno.

    Args:
        n: which operation; None: none, until `n` is set.
        code: the errno.
        lasting: all later operations fail as well, until `mend`.
        names: which operations count.
    """

    def __init__(
        self,
        n: int | None,
        code: int,
        *,
        lasting: bool = False,
        names: tuple[str, ...] = CHANGES,
    ) -> None:
        self.n = n
        self._code = code
        self._lasting = lasting
        self._names = names
        self._count = 0
        self._lock = threading.Lock()
        self.struck: list[str] = []
        self.mended_at = 0

    def files(self, base: type[Files] = QuickFiles) -> Files:
        """Files of class `base` that fail here."""
        return hooked(base, self)

    def mend(self) -> None:
        """The cause is gone."""
        with self._lock:
            self.n, self.mended_at = None, self._count

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        if name in self._names:
            with self._lock:
                due = self.n is not None and (
                    self._count == self.n or (self._lasting and self._count > self.n)
                )
                self._count += 1
                if due:
                    self.struck.append(name)
            if due:
                fail(name, self._code, args, act)
        return act()


def fail(name: str, code: int, args: tuple[Any, ...], act: Callable[[], Any]) -> NoReturn:
    """Raise as storage does: Linux closes a descriptor whatever `close` says."""
    if name == "close":
        act()
    raise OSError(code, os.strerror(code), str(args[0]))


class Stuck:
    """Operations of one name hang, once `engage`d, until `release`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._free = threading.Event()
        self._free.set()
        self.entered = threading.Event()

    def files(self, base: type[Files] = QuickFiles) -> Files:
        """Files of class `base` that hang here."""
        return hooked(base, self)

    def engage(self) -> None:
        """Hang from now on."""
        self.entered.clear()
        self._free.clear()

    def release(self) -> None:
        """Go on, and hang no more."""
        self._free.set()

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        if name == self._name and not self._free.is_set():
            self.entered.set()
            assert self._free.wait(120), "nobody released the disk"
        return act()


class Delays:
    """Every operation takes a random while, up to `most_s`; closing, as forked children do, none."""

    def __init__(self, most_s: float, *, seed: int = 0) -> None:
        self.most_s = most_s
        self._random = random.Random(seed)

    def files(self, base: type[Files] = QuickFiles) -> Files:
        """Files of class `base` that dawdle."""
        return hooked(base, self)

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        if name != "close":
            time.sleep(self._random.random() ** 3 * self.most_s)
        return act()
