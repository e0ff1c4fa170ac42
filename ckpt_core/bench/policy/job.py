"""The training of one condition: a loop as a user would write it, cut into blocks. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_core.bench import workloads
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.options import Options
from ckpt_core.policy import Auto, Policy
from ckpt_core.save import SaveHandle

_PAST = 2
"""Iterations behind a save that is checked: its copy must not have taken anything of them."""


class FromTheLast(Policy):
    """A save every so many steps after the last one, wherever that was.

    `EveryNSteps` counts from step 0, so that the first interval of a block would be shorter than the rest.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._last: int | None = None

    def due(self, step: int) -> bool:
        """After so many steps, or never before."""
        return self._last is None or step >= self._last + self.steps

    def saved(self, step: int) -> None:
        """Count from here."""
        self._last = step


@dataclass(slots=True)
class Block:
    """Some iterations in a row; a save is timed with the iteration behind it.

    Attributes:
        first: step before them.
        seconds: of each iteration.
        saves: after how many of these iterations each save was made.
        active: numbers of the iterations in which a save was under way.
        intervals: after how many iterations which interval held; a new entry where it changes.
        stall_s: that the training thread was inside the engine.
        cut: the time was up before the last interval was over.
    """

    first: int
    seconds: list[float] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    intervals: list[tuple[int, int]] = field(default_factory=list)
    stall_s: float = 0.0
    cut: bool = False


class Job:
    """A model, the engine and a policy; trains whenever it is told, and is never idle in between."""

    def __init__(self, size: dict[str, Any], root: Path, policy: Policy, options: Options) -> None:
        """Build it and take the first step.

        Args:
            size: fields of `ModelSize`.
            root: of the checkpoints.
            policy: asked after each iteration of a block with saves; shown the engine.
            options: of the engine.
        """
        self._training = workloads.Training.start(size)
        self._checkpointer = Checkpointer(root, options)
        self._policy = policy
        policy.watch(self._checkpointer)
        self._handles: list[SaveHandle] = []
        self._step = 0
        self._under_way = False
        self._mark_s = time.monotonic()

    @property
    def interval(self) -> int | None:
        """Steps between saves now; None while `Auto` finds that out."""
        if isinstance(self._policy, Auto):
            return None if self._policy.interval is None else self._policy.interval.steps
        assert isinstance(self._policy, FromTheLast)
        return self._policy.steps

    @property
    def told_overhead(self) -> float | None:
        """What `Auto` says that saves cost."""
        return self._policy.overhead if isinstance(self._policy, Auto) else None

    def settle(self, saves: int, *, within_s: float) -> Block:
        """Train until the interval is known, and so many saves were made at it."""
        block = self._begin()
        deadline = self._mark_s + within_s
        while self.interval is None:
            self._act(block)
        enough = len(block.saves) + saves
        while len(block.saves) < enough and not self._over(block, deadline):
            self._act(block)
        return self._end(block)

    def base(self, steps: int) -> Block:
        """Iterations without saves, once nothing is in flight; the policy sees a jump of so many steps."""
        self.drain()
        block = self._begin()
        for _ in range(steps):
            self._train(block)
        return self._end(block)

    def saving(self, least: int, *, within_s: float) -> Block:
        """Whole intervals, of at least so many iterations: from a save to right before another one."""
        lead = self._begin()
        while not self._ask(lead):
            pass
        block = self._begin()
        deadline = self._mark_s + within_s
        while len(block.seconds) < least and not block.cut:
            self._save(block)
            while not self._over(block, deadline) and not self._ask(block):
                pass
        return self._end(block)

    def change(self, least: int, start: Callable[[], None], *, within_s: float) -> Block:
        """Call `start` in the middle of an interval, and train on until one ends after so many iterations."""
        lead = self._begin()
        # From a save on, or the load might begin right with one.
        while not self._act(lead):
            pass
        for _ in range((self.interval or 1) // 2):
            self._act(lead)
        start()
        block = self._begin()
        deadline = self._mark_s + within_s
        while len(block.seconds) < least and not self._over(block, deadline):
            self._act(block)
        while not self._over(block, deadline) and not self._ask(block):
            pass
        return self._end(block)

    def calm(self, below: int, *, most: int, within_s: float) -> Block:
        """Train until the interval is at most `below`; no longer than so many iterations."""
        block = self._begin()
        deadline = self._mark_s + within_s
        while len(block.seconds) < most and not self._over(block, deadline):
            if self.interval is not None and self.interval <= below:
                break
            self._act(block)
        return self._end(block)

    def drain(self) -> Block:
        """Train without a new save until nothing is in flight; the policy is asked, and not obeyed."""
        block = self._begin()
        while any(not handle.committed.done() for handle in self._handles):
            self._ask(block)
        for handle in self._handles:
            handle.committed.result()
        self._handles.clear()
        return self._end(block)

    def check(self) -> tuple[str, str]:
        """Save, train on, destroy the state, restore the newest committed step: digests of both."""
        self.drain()
        block = self._begin()
        self._train(block)
        self._save(block)
        live = workloads.digest(self._training.state())
        saved_at = self._step
        for _ in range(_PAST):
            self._train(block)
        self._checkpointer.wait()
        assert self._checkpointer.latest_step() == saved_at
        state = self._training.state()
        workloads.scramble(state)
        self._checkpointer.restore(state)
        return live, workloads.digest(state)

    def size(self) -> tuple[int, int]:
        """Bytes and leaves of the state."""
        state = self._training.state()
        return sum(tensor.nbytes for tensor in state.values()), len(state)

    def close(self) -> None:
        """Waits for what is in flight."""
        self._checkpointer.close()

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self) -> Block:
        self._mark_s = time.monotonic()
        block = Block(self._step, stall_s=-self._checkpointer.gauges.stall.seconds)
        self._note(block)
        return block

    def _end(self, block: Block) -> Block:
        block.stall_s += self._checkpointer.gauges.stall.seconds
        return block

    def _over(self, block: Block, deadline: float) -> bool:
        block.cut = self._mark_s > deadline
        return block.cut

    def _train(self, block: Block) -> None:
        """One iteration that nobody asks about."""
        self._training.step(self._checkpointer.wait_staged)
        self._step += 1
        self._tick(block)

    def _ask(self, block: Block) -> bool:
        """One iteration; whether the policy wants a save behind it, which is not made."""
        self._training.step(self._checkpointer.wait_staged)
        self._step += 1
        due = self._policy.due(self._step)
        self._tick(block)
        return due

    def _act(self, block: Block) -> bool:
        """One iteration, and a save if the policy wants one; whether it did."""
        due = self._ask(block)
        if due:
            self._save(block)
        return due

    def _save(self, block: Block) -> None:
        self._policy.saved(self._step)
        self._handles = [handle for handle in self._handles if not handle.committed.done()]
        self._handles.append(self._checkpointer.save(self._step, self._training.state()))
        block.saves.append(len(block.seconds))
        self._under_way = True

    def _tick(self, block: Block) -> None:
        now_s = time.monotonic()
        if self._under_way:
            block.active.append(len(block.seconds))
            self._under_way = any(not handle.committed.done() for handle in self._handles)
        block.seconds.append(now_s - self._mark_s)
        self._mark_s = now_s
        self._note(block)

    def _note(self, block: Block) -> None:
        interval = self.interval
        if interval is not None and (not block.intervals or block.intervals[-1][1] != interval):
            block.intervals.append((len(block.seconds), interval))
