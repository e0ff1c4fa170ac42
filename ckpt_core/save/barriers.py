"""The barrier that nobody can forget: a step of any torch optimizer waits for the leaves that it may change.

    optimizer.step() -> torch's hook for all optimizers -> wait -> the update

An optimizer changes its parameters and its state, and what is made of them behind its back: weights in
another precision, the shards of other ranks, averages that follow it. So its step waits for every leaf that
is not known to be another optimizer's alone. What changes before the first step after a save, or without a
torch optimizer, is for `wait_staged`; the sample of `LeafWatch` finds where that is missing.

Source: CheckFreq (FAST '21), whose barrier sits in a wrapped optimizer.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt_core.errors import ConfigError
from ckpt_core.observe import EventLog, EventName
from ckpt_core.save.flights import Flights
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.journal import Stall
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.save.within_step import OwnBarriers
from ckpt_core.snapshot import Snapshot
from ckpt_core.state import local_of
from ckpt_core.system.compiling import untraced
from ckpt_core.system.threads import own_lock


class Barriers:
    """The barriers of one Checkpointer; must be closed. Called from any thread that makes a step.

    Args:
        flights: whose leaves may not change yet.
        pipeline: may be page-locking memory; its devices may be recording a graph.
        own: whose steps do not wait.
        events: is told of each wait.
        stall: counts what steps have waited.
        timeout_s: longest wait.

    Attributes:
        passed: called once in each iteration, at the end of a barrier; None: nobody wants to know.
    """

    def __init__(
        self,
        flights: Flights,
        pipeline: Pipeline,
        own: OwnBarriers,
        *,
        events: EventLog,
        stall: Stall,
        timeout_s: float,
    ) -> None:
        self._flights = flights
        self._pipeline = pipeline
        self._events = events
        self._stall = stall
        self._timeout_s = timeout_s
        self.passed: Callable[[], None] | None = None
        self._pid = os.getpid()
        self._lock = own_lock()
        # Every optimizer that has made a step, by id.
        self._met: dict[int, Callable[[], Optimizer | None]] = {}
        self._left = own.ids
        self._leaves: dict[Snapshot, _Leaves] = {}
        self._hook: RemovableHandle | None = None

    def open(self) -> None:
        """Steps wait from here on. Called once."""
        self._hook = register_optimizer_step_pre_hook(_hook_of(self))

    def close(self) -> None:
        """Steps wait no more. Idempotent."""
        if self._hook is not None:
            self._hook.remove()

    def leave_to_owner(self, optimizer: Optimizer) -> None:
        """Steps of this optimizer do not wait: whoever makes them sees to the barrier.

        Raises:
            ConfigError: it is no optimizer.
        """
        if not callable(getattr(optimizer, "step", None)):
            raise ConfigError(f"leave_barrier_to_owner({optimizer!r}): give an optimizer")
        self._meet(optimizer)
        self._left.add(id(optimizer))

    def wait(self, names: Iterable[str] | None, *, before: int | InFlight | None) -> None:
        """See `Checkpointer.wait_staged`."""
        self._refuse_capture()
        began = time.monotonic()
        deadline = self._flights.patience(began + self._timeout_s)
        waited = True
        try:
            waited = self._flights.wait_staged(names, before=before, deadline=deadline)
        finally:
            # Also a wait that was in vain.
            if waited:
                self._events.tell(EventName.WAITED, None, seconds=time.monotonic() - began)
        self._pass(None)

    def before_step(self, optimizer: Optimizer) -> None:
        """Return when no snapshot reads what a step of `optimizer` may change.

        Called by torch at the start of each step, before anything has changed. Costs next to nothing while
        nothing is in flight. A save that has failed holds no step up.

        Raises:
            StagingError: not within `timeout`; nothing was changed.
            ConfigError: the step is captured as a graph while a save is under way, or memory is
                page-locked; nothing was changed.
        """
        number = id(optimizer)
        # Order matters: in a forked child, locks of threads that stayed behind may be held for ever.
        if number in self._left or os.getpid() != self._pid:
            return
        if number not in self._met:
            self._meet(optimizer)
        if not self._flights.idle:
            self._refuse_capture()
            self._wait_for(optimizer)
        elif self._pipeline.locking:
            self._refuse_capture()
        self._pass(number)

    # -- inside ----------------------------------------------------------------------------------

    def _refuse_capture(self) -> None:
        # A wait would become a part of the graph, or break its capture with an error of the driver.
        if self._flights.idle and not self._pipeline.locking:
            return
        if self._pipeline.devices.is_capturing():
            raise ConfigError(
                "a graph is being captured while a save is under way, which copies what the graph changes, "
                "or staging memory is page-locked behind prepare(), which may break the capture. Nothing was "
                "changed, and both go on. Call wait() before a capture, and wait_staged() before each replay"
            )

    def _pass(self, number: int | None) -> None:
        """The steps of the first optimizer tell iterations apart; without one, every `wait_staged` does."""
        if self.passed is None:
            return
        if number == next((met for met in list(self._met) if met not in self._left), None):
            self.passed()

    def _meet(self, optimizer: Optimizer) -> None:
        number, met, left = id(optimizer), self._met, self._left

        def forget(_: Any) -> None:
            met.pop(number, None)
            left.discard(number)

        met[number] = weakref.ref(optimizer, forget)

    def _wait_for(self, optimizer: Optimizer) -> None:
        live = [flight.snapshot for flight in self._flights.active() if flight.snapshot.has_live()]
        if not live:
            return
        began = time.monotonic()
        deadline = self._flights.patience(began + self._timeout_s)
        places = self._places(live, optimizer)
        waited = True
        try:
            pairs = zip(live, places, strict=True)
            waits = [one.wait_copied(place, deadline=deadline) for one, place in pairs]
            waited = any(waits)
        finally:
            ended = time.monotonic()
            self._stall.ended_s = ended
            self._stall.seconds += ended - began
            # Also a wait that was in vain.
            if waited:
                self._events.tell(EventName.WAITED, None, seconds=ended - began)

    def _places(self, live: list[Snapshot], optimizer: Optimizer) -> list[int]:
        """How many leaves of each snapshot must have been copied before a step of `optimizer`."""
        if len(self._met) == 1:
            # Nothing can be another's alone; finding out takes a microsecond for each tensor.
            return [snapshot.handed for snapshot in live]
        own = set(_memories(optimizer))
        with self._lock:
            kept = {snapshot: self._leaves.get(snapshot) for snapshot in live}
            if None in kept.values():
                # Now, while these snapshots keep their memory: no address in it can be another tensor's.
                met = [known for ref in list(self._met.values()) if (known := ref())]
                owned = {memory for known in met for memory in _memories(known)} - {0}
                kept |= {snapshot: _Leaves(owned) for snapshot in live if kept[snapshot] is None}
            self._leaves = {snapshot: leaves for snapshot, leaves in kept.items() if leaves}
            return [self._leaves[snapshot].last(snapshot, own) for snapshot in live]


class _Leaves:
    """Where the live leaves of one snapshot lie.

    Args:
        owned: memory of optimizers.
    """

    def __init__(self, owned: set[int]) -> None:
        self._owned = owned
        self._seen = 0
        self._place: dict[int, int] = {}
        self._last_of_nobody = 0

    def last(self, snapshot: Snapshot, own: set[int]) -> int:
        """Place of the last leaf that lies in `own`, or in no optimizer's memory."""
        handed = snapshot.live_from(self._seen)
        for before, items in handed:
            for place, item in enumerate(items, before + 1):
                if item is None:
                    continue
                memory = _memory(item[0])
                if memory in self._owned:
                    self._place[memory] = place
                else:
                    self._last_of_nobody = place
        self._seen += len(handed)
        mine = [self._place[memory] for memory in own & self._place.keys()]
        return max([self._last_of_nobody, *mine])


def _hook_of(barriers: Barriers) -> Callable[..., None]:
    """What torch calls; it keeps nothing alive."""
    found = weakref.ref(barriers)

    @untraced
    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        barriers = found()
        if barriers is not None:
            barriers.before_step(optimizer)

    return before_step


def _memories(optimizer: Optimizer) -> Iterator[int]:
    """The memory of the parameters that an optimizer steps now, and of what it keeps of them."""
    state: dict[Any, Any] = optimizer.state
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield _memory(param)
            yield from map(_memory, _tensors(state.get(param)))
    for key, value in state.items():
        if not isinstance(key, torch.Tensor):
            yield from map(_memory, _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _memory(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 for what shows none, which nobody is known to own."""
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # sparse tensors, and wrappers of others
        return 0
