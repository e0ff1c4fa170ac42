"""Interrupts and errors at every line that a call of the engine executes on the training thread.

An interrupt is real: the signal is made pending as a line begins, and Python raises it at the next place
where it raises such things at all. An error is raised as the line begins, as if what it does had failed.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ckpt_core

_PACKAGE = str(Path(ckpt_core.__file__).parent)
_LIBRARY = (threading.__file__, str(Path(threading.__file__).parent / "contextlib.py"))


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

    Attributes:
        kind: what is raised.
        lines: how many have begun.
        struck: where it has struck.
        dropped: whether Python has dropped it, since a destructor was running.
    """

    def __init__(
        self, n: int, error: type[BaseException] = KeyboardInterrupt, event: str = "line"
    ) -> None:
        self._n = n
        self.kind = error
        self._event = event
        self._signal: Any = _Signal()
        self.lines = 0
        self.dropped = False
        self.struck = ""

    def run(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; whatever it raises comes out."""
        unraisable, sys.unraisablehook = sys.unraisablehook, self._ignore
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(None)
            sys.unraisablehook = unraisable

    def _ignore(self, found: sys.UnraisableHookArgs) -> None:
        """Python itself drops what is raised in a destructor."""
        self.dropped = found.exc_type is self.kind

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not (
            name in _LIBRARY and self.kind is KeyboardInterrupt
        ):
            return None
        if _starts_thread(frame):
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
        self.struck = f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
        sys.settrace(None)
        if self.kind is not KeyboardInterrupt:
            raise self.kind(f"injected at {self.struck}")
        # Last: nothing of this function may be what is interrupted.
        +self._signal  # noqa: B018
        return None


def _starts_thread(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is threading.Thread.start.__code__:
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
