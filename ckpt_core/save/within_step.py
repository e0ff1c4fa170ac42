"""Whether a save is made within a step of a torch optimizer, whose barrier it comes too late for.

    step(closure) -> hooks of all optimizers: the barrier -> its own hooks -> closure -> the update

An update follows on what is saved in its own hooks before it and in a closure, with no barrier between. It is
told by the frames of the thread, so that steps cost nothing, and one that raises leaves nothing behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

import torch
from torch.optim.optimizer import Optimizer

_FILE = Optimizer.profile_hook_step.__code__.co_filename
_STEP = "wrapper"
"""What torch calls the function around each `step`; the compiler's parts of it have longer names."""

_NOT_IN_BACKWARD = -1


class OwnBarriers:
    """The optimizers whose owners see to the barrier.

    Attributes:
        ids: of these.
    """

    def __init__(self) -> None:
        self.ids: set[int] = set()

    def is_passed(self) -> bool:
        """Whether this thread is within a step that may change leaves without another barrier.

        What an owner's step saves it waits for by itself, but not what is saved in the step of the class
        below, which it calls in turn.
        """
        owners, frame = set[int](), None
        try:
            for frame in _innermost():
                for optimizer in _stepping(frame):
                    if optimizer not in self.ids or optimizer in owners:
                        return True
                    owners.add(optimizer)
            return False
        finally:
            # It may be this one, which would keep itself and all above it, with what they have in hand.
            del frame


def _innermost() -> Iterable[FrameType]:
    """Where this thread is; within a backward pass, all threads: it may run on one of its own."""
    if torch._C._current_graph_task_id() == _NOT_IN_BACKWARD:
        return (sys._getframe(1),)
    return sys._current_frames().values()


def _stepping(frame: FrameType | None) -> Iterable[int]:
    """The optimizers, by id, of the steps that this frame is in, and whose updates may still come."""
    while frame is not None:
        code = frame.f_code
        if _STEP in code.co_name and code.co_filename == _FILE:
            found = frame.f_locals
            # What the step has returned; only hooks behind it are still called.
            if "out" not in found:
                yield id(found.get("self"))
        frame = frame.f_back
