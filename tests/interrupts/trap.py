"""Interrupts and errors at every line that a call of the engine executes on the training thread.

An interrupt is real: the signal is made pending as a line begins, and Python raises it at the next place
where it raises such things at all. An error is raised as the line begins, as if what it does had failed.
A second interrupt may strike while what follows the first one is under way.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._device import DeviceContext

import ckpt_core
from ckpt_core.state.quiet import quietly

_PACKAGE = str(Path(ckpt_core.__file__).parent)
_LIBRARY = (
    threading.__file__,
    str(Path(threading.__file__).parent / "contextlib.py"),
    *(
        kind.__enter__.__code__.co_filename
        for kind in (warnings.catch_warnings, torch.no_grad, DeviceContext)
    ),
)
_ANSWERS = ("_host_room", "_Subscriber.call", "_Progress.show", "_Progress.end")
"""The functions to which a MemoryError is an answer: nothing is free; who listens, or looks on, failed."""


class Boom(MemoryError):
    """The error that is injected."""


class _Signal:
    """`+_Signal()` makes SIGINT pending, and no Python code runs between that and the end of the line."""

    __pos__ = ctypes.pythonapi.PyErr_SetInterrupt


ctypes.pythonapi.PyErr_SetInterrupt.restype = None


class Trap:
    """Strikes when the n-th line (counted from 0) of the engine begins; -1: never, it only counts.

    Args:
        n: which one.
        error: the class.
        event: "opcode" counts the instructions instead: an interrupt may come between two calls of a line.
        package: whose lines are counted; None: the engine's, and those of the library that it calls.
        then: an interrupt is followed by another one, when the `then`-th line after it begins; -1: that
            never comes, and the lines after the first are counted.

    Attributes:
        kind: what is raised.
        lines: how many have begun; since the interrupt, if `then` is given.
        struck: where it has struck.
        dropped: whether Python has dropped it, since a destructor was running.
    """

    def __init__(
        self,
        n: int,
        error: type[BaseException] = KeyboardInterrupt,
        event: str = "line",
        then: int | None = None,
        package: str | tuple[str, ...] | None = None,
    ) -> None:
        self._n = n
        self._package = package
        self._then = then
        self.kind = error
        self._event = event
        self._signal: Any = _Signal()
        self.lines = 0
        self.dropped = False
        self.struck = ""

    def run(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; whatever it raises comes out."""
        unraisable, sys.unraisablehook = sys.unraisablehook, self._ignore
        handler = signal.signal(signal.SIGINT, self._interrupt)
        # Python 3.12 heeds it only where some frame had it before the tracing began.
        sys._getframe().f_trace_opcodes = self._event == "opcode"
        sys.settrace(self._enter)
        try:
            try:
                return call()
            finally:
                time.sleep(0)  # an interrupt at the very end is raised here
        finally:
            sys.settrace(None)
            signal.signal(signal.SIGINT, handler)
            sys.unraisablehook = unraisable

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler. Not before it runs are lines traced again: the pending signal would be raised as the
        next one begins, which may be earlier than Python raises it.
        """
        if self._then is not None:
            self._n, self._then, self.lines = self._then, None, 0
            while frame is not None:
                frame.f_trace = self._enter(frame, "call", None)
                frame = frame.f_back
            sys.settrace(self._enter)
        raise KeyboardInterrupt

    def _ignore(self, found: sys.UnraisableHookArgs) -> None:
        """Python itself drops what is raised in a destructor."""
        self.dropped = found.exc_type is self.kind

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        library = name in _LIBRARY and self.kind is KeyboardInterrupt and self._package is None
        if not name.startswith(self._package or _PACKAGE) and not library:
            return None
        if self.kind is Boom and _is_inside(frame, lambda code: code.co_qualname in _ANSWERS):
            return None
        if self.kind is Boom and frame.f_code is quietly.__code__:
            return None  # what puts two flags back cannot fail
        if _is_inside(frame, lambda code: code is threading.Thread.start.__code__):
            return None  # Python's own: a thread whose start is interrupted may never begin
        frame.f_trace_opcodes = self._event == "opcode"
        return functools.partial(self._line, [0])

    def _line(self, last: list[int], frame: FrameType, event: str, arg: Any) -> Any:
        if event != self._event or frame.f_lineno is None:
            return None  # instructions that Python adds are of no line
        leaving = frame.f_lineno < last[0] and frame.f_lineno in _with_lines(
            frame.f_code.co_filename
        )
        last[0] = frame.f_lineno
        sure = leaving or frame.f_lineno in _returns(frame.f_code.co_filename)
        if sure and self.kind is not KeyboardInterrupt:
            return None  # what gives a lock back, or only returns, cannot fail
        self.lines += 1
        if self.lines - 1 != self._n:
            return None
        code = frame.f_code
        self.struck += f" {code.co_filename}:{frame.f_lineno} ({code.co_name})"
        sys.settrace(None)
        if self.kind is not KeyboardInterrupt:
            raise self.kind(f"injected at {self.struck}")
        # Last: nothing of this function may be what is interrupted.
        +self._signal  # noqa: B018
        return None


def _is_inside(frame: FrameType | None, wanted: Callable[[CodeType], bool]) -> bool:
    while frame is not None:
        if wanted(frame.f_code):
            return True
        frame = frame.f_back
    return False


@functools.cache
def _with_lines(path: str) -> frozenset[int]:
    tree = ast.parse(Path(path).read_text())
    return frozenset(node.lineno for node in ast.walk(tree) if isinstance(node, ast.With))


@functools.cache
def _returns(path: str) -> frozenset[int]:
    """Lines that return a name, or nothing."""
    tree = ast.parse(Path(path).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return frozenset(
        node.lineno for node in nodes if node.value is None or isinstance(node.value, ast.Name)
    )
