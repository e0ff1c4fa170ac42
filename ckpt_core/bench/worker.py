"""The process of one contender of the suite `core`: it times with its own clock, and holds one state.

Requests (`ckpt_core.bench.serving`), in this order for each workload: hello, then build -> open -> save,
restore, check or train, tidy -> drop.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_core.bench import proc, workloads
from ckpt_core.bench.contenders import Contender, Handle, Profile, State, contender_class
from ckpt_core.bench.serving import Answer


class StateWorker:
    """One state, and the time of what is done with it: base of the workers of contenders and of ranks."""

    def __init__(self) -> None:
        self._state: State = {}
        self._training: workloads.Training | None = None

    def build(self, workload: str, **size: Any) -> Answer:
        """Allocate and fill the state of a workload: "large", "small_leaves", "still" or "training"."""
        if workload == "training":
            self._training = workloads.Training.start(size)
            self._state = self._training.state()
        elif workload == "small_leaves":
            self._state = workloads.small_leaves_state(**size)
        elif workload == "still":
            self._state = workloads.still_state(**size)
        else:
            self._state = self._large(**size)
        gc.collect()
        return {"state_bytes": sum(tensor.nbytes for tensor in self._state.values())}

    def _large(self, *, state_bytes: int, leaves: int) -> State:
        return workloads.large_state(state_bytes=state_bytes, leaves=leaves)

    def _meet(self) -> None:
        """Called before each clock starts, and before a restore: ranks wait for each other."""

    def _time_save(self, contender: Contender, step: int, below: str | None = None) -> Answer:
        """One save, with the barrier right behind it: no compute hides the copy.

        Args:
            below: what has names that begin so has changed since the last one; None: a little of the state.
        """
        if below is None:
            workloads.mark(self._state, step)
        else:
            workloads.change(self._state, below)
        gc.collect()
        self._meet()
        worked_s = proc.processor_s(os.getpid())
        began = time.perf_counter()
        handle = contender.save(self._state, step)
        returned = time.perf_counter()
        handle.barrier()
        released = time.perf_counter()
        handle.wait_durable()
        durable_s = time.perf_counter() - began
        contender.settle()
        return {
            "processor_s": proc.processor_s(os.getpid()) - worked_s,
            "call_s": returned - began,
            "barrier_s": released - returned,
            "durable_s": durable_s,
            "persist_s": durable_s if handle.persist_s is None else handle.persist_s,
        }

    def _destroy_and_restore(self, contender: Contender) -> Answer:
        """What the state was, and what came back."""
        saved = workloads.digest(self._state)
        workloads.scramble(self._state)
        self._meet()
        contender.load_into(self._state)
        return {"saved": saved, "restored": workloads.digest(self._state)}

    def _time_training(self, save: Callable[[], Handle], *, every: int, steps: int) -> Answer:
        """`steps` steps, saving after each `every`-th from the first on; 0 saves never.

        What is in flight at the end is waited for outside the clock, and its processor time counts; that
        of earlier windows never reaches into this one.
        """
        assert self._training is not None, "build the training workload first"
        stalls = Stalls()
        self._meet()
        worked_s = proc.processor_s(os.getpid())
        began = time.perf_counter()
        for number in range(steps):
            self._training.step(stalls.before_update)
            if every and number % every == 0:
                stalls.start(save)
        seconds = time.perf_counter() - began
        stalls.finish()
        return {
            "step_s": seconds / steps,
            "stalls_s": stalls.seconds,
            "processor_s": (proc.processor_s(os.getpid()) - worked_s) / steps,
            "state_bytes": sum(tensor.nbytes for tensor in self._state.values()),
        }

    def _free(self) -> None:
        self._training, self._state = None, {}
        gc.collect()


class Worker(StateWorker):
    """One contender and its state."""

    def __init__(self, name: str, root: Path) -> None:
        super().__init__()
        self._class = contender_class(name)
        self._root = root
        self._contender: Contender | None = None
        self._step = 0

    def hello(self) -> Answer:
        """What the parent must know before anything is written."""
        reason = self._class.available(self._root)
        return {
            "reason": reason,
            "version": "" if reason else self._class.version(),
            "title": self._class.title,
            "fsyncs": self._class.fsyncs,
            "disk_states": self._class.disk_states,
            "memory_states": self._class.memory_states,
            "reference": self._class.reference,
        }

    def _large(self, *, state_bytes: int, leaves: int) -> State:
        if self._class.reference:
            return workloads.untouched_state(state_bytes=state_bytes)
        return super()._large(state_bytes=state_bytes, leaves=leaves)

    def open(self, folder: str, staging_bytes: int | None, timeout_s: float) -> Answer:
        """Construct the contender on a new directory below its root."""
        root = self._root / folder
        root.mkdir()
        self._contender = self._class(Profile(root, staging_bytes, timeout_s))
        return {}

    def save(self, below: str | None = None) -> Answer:
        """See `_time_save`."""
        self._step += 1
        return self._time_save(self._opened(), self._step, below)

    def tidy(self) -> Answer:
        """Leave no old step and no dirty page behind for the next turn, whoever has it."""
        contender = self._opened()
        contender.tidy()
        os.sync()
        return {"settings": contender.settings}

    def restore(self) -> Answer:
        """One restore into the live tensors."""
        contender = self._opened()
        gc.collect()
        began = time.perf_counter()
        own_s = contender.load_into(self._state)
        return {"restore_s": time.perf_counter() - began if own_s is None else own_s}

    def check(self, step: int, below: str | None = None) -> Answer:
        """Save a state that every contender has at that step, destroy it, restore it, compare."""
        self._step = step - 1
        self.save(below)
        return self._destroy_and_restore(self._opened())

    def train(self, every: int, steps: int) -> Answer:
        """See `_time_training`."""

        def save() -> Handle:
            self._step += 1
            return self._opened().save(self._state, self._step)

        return self._time_training(save, every=every, steps=steps)

    def drop(self) -> Answer:
        """Close the contender and free the state."""
        contender, self._contender = self._contender, None
        self._step = 0
        if contender is not None:
            contender.close()
        self._free()
        return {}

    def close(self) -> None:
        """End of the process."""
        self.drop()

    def _opened(self) -> Contender:
        assert self._contender is not None, "open comes first"
        return self._contender


class Stalls:
    """Time that the training thread spends in saves: the call, then the wait before the update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._handle: Handle | None = None
        self._released = True

    def start(self, save: Callable[[], Handle]) -> None:
        """Call `save` under the clock."""
        began = time.perf_counter()
        self._handle = save()
        self._released = False
        self.seconds.append(time.perf_counter() - began)

    def before_update(self) -> None:
        """Pass the barrier of the last save, if it was not passed yet, under the clock."""
        if self._handle is None or self._released:
            return
        began = time.perf_counter()
        self._handle.barrier()
        self._released = True
        self.seconds[-1] += time.perf_counter() - began

    def finish(self) -> None:
        """Wait for the last save, outside the clock."""
        if self._handle is None:
            return
        if not self._released:
            self.seconds.pop()  # no update came after the last save: its stall is not known
            self._handle.barrier()
        self._handle.wait_durable()
