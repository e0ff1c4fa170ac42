"""What one fit is measured with, under any framework.

What a way costs is the time inside its hooks: taking the state, writing it where it does that at once, and
waiting before the optimizer's update. What it costs besides, by keeping the processor or the interpreter's
lock from training, shows in the time of the steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ckpt_core.bench.contenders import State
from ckpt_core.bench.proc import processor_s
from ckpt_core.bench.window import Window


class Begun(Exception):
    """The first step of a fit that was resumed; there is nothing more to be measured."""


@dataclass(slots=True)
class FitClock:
    """When the steps of a window begin and end, and what the way's hooks take meanwhile.

    Attributes:
        worked_s: processor time of the process before the first step under the clock.
    """

    window: Window
    worked_s: float = 0.0
    _begins: list[float] = field(default_factory=list)
    _stall_s: float = 0.0
    _end: float = 0.0

    def step_begins(self, number: int) -> None:
        """Counted from 0."""
        if number >= self.window.lead and not self._end:
            if not self._begins:
                self.worked_s = processor_s(os.getpid())
            self._begins.append(time.perf_counter())

    def window_ends(self) -> None:
        """All of the last step is done, and its save begun. What is called later changes nothing."""
        self._end = self._end or time.perf_counter()

    def add(self, seconds: float) -> None:
        """Of a hook."""
        if self._begins and not self._end:
            self._stall_s += seconds

    def watch(self, saver: Any, names: Iterable[str]) -> None:
        """Count the time of these methods from now on, within the window."""
        for name in names:
            setattr(saver, name, self._timed(getattr(saver, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.add(time.perf_counter() - began)

        return timed

    def found(self, *, fit_s: float, processor_s: float, state: State) -> Fitted:
        """The figures of a fit that is over."""
        ends = [*self._begins[1:], self._end]
        seconds = [end - begin for begin, end in zip(self._begins, ends, strict=True)]
        return Fitted(
            fit_s=fit_s,
            step_s=sum(seconds) / len(seconds),
            longest_step_s=max(seconds),
            # Of one save: all time in hooks, shared out over the saves.
            stall_s=self._stall_s / self.window.timed_saves,
            processor_s=processor_s - self.worked_s,
            state=state,
        )


@dataclass(slots=True)
class Fitted:
    """What one fit found.

    Attributes:
        fit_s: from the call that trains until it returned, with all files complete.
        processor_s: of all threads and children, from the first step under the clock until then.
        state: the live tensors at its end.
    """

    fit_s: float
    step_s: float
    longest_step_s: float
    stall_s: float
    processor_s: float
    state: State
