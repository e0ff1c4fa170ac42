"""`save_on_exception`: the last whole step, kept at hand until the next one begins to change it.

One process saves it by itself. Several ranks save it together, or not at all:

    the rank that fails    tells the others its step, then meets them
    the others             hear of it in a thread of their own, since training may hang in a collective that
                           the one that failed does not come to; they meet it as soon as they hold that step
    all of them            save, if all hold the same step; the engine commits it as any other

No collective is used, and every wait has a deadline. On a device nobody listens: a copy would wait behind the
collective that hangs. There only ranks that all fail meet.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

from ckpt_core import CkptError, CommitError, TorchStore
from ckpt_lightning.texts import CheckpointWarning

Tree = dict[str, Any]
_log = logging.getLogger("ckpt_core")
Save = Callable[[int, Tree], object]

_TOPIC = "save_on_exception"
_WITHIN_S = 30.0
_LISTEN_EVERY_S = 0.5


class Armed:
    """The last whole step of one process, if a failure would save it. Used on the training thread."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._held: tuple[int, Tree] | None = None

    def arm(self, step: int, tree: Tree) -> None:
        """This step is whole; `tree` stays so until `disarm`."""
        self._held = (step, tree)

    def disarm(self) -> None:
        """What `tree` refers to is about to change, or is saved already."""
        self._held = None

    def outlast(self, copied: Callable[[Tree], Tree]) -> None:
        """What `tree` refers to is about to change without a step: hold a copy from here on."""
        if self._held is not None:
            step, tree = self._held[0], copied(self._held[1])
            self.disarm()
            self.arm(step, tree)

    def fail(self) -> None:
        """Training has failed: save the step that is held.

        Raises:
            CkptError: as a save.
        """
        if self._held is not None:
            self._save(*self._held)
            self._held = None

    def close(self) -> None:
        """Nothing is saved from here on. Idempotent."""
        self._held = None


class ArmedTogether(Armed):
    """The same for several ranks. Made on every rank.

    Args:
        save: starts a save; called on the training thread, or on the listener's while `disarm` waits for it.
        store: how the ranks reach each other.
        timeout_s: of a save; they wait for each other no longer, and 30 s at most.
        listens: hear of the others' failures in a thread.
    """

    def __init__(self, save: Save, *, store: TorchStore, timeout_s: float, listens: bool) -> None:
        super().__init__(save)
        self._store = store
        self._timeout_s = timeout_s
        self._within_s = min(timeout_s, _WITHIN_S)
        self._changed = threading.Condition()
        self._met = self._meeting = self._closed = self._changing = False
        self._listener = threading.Thread(target=self._listen, name="ckpt-rescue", daemon=True)
        if listens:
            self._listener.start()

    def arm(self, step: int, tree: Tree) -> None:
        """See Armed."""
        with self._changed:
            self._changing, self._held = False, (step, tree)
            self._changed.notify_all()

    def disarm(self) -> None:
        """See Armed. Waits while the ranks are about to save what is held: one of them has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._meeting, self._within_s)
            self._changing, self._held = self._held is not None, None

    def fail(self) -> None:
        """See Armed. Returns when a save was started, or when it is known that there will be none."""
        try:
            if self._may_meet():
                self._tell_and_meet()
        except CkptError as exc:
            _warn(str(exc))
        finally:
            self._leave()
            self.close()

    def close(self) -> None:
        """See Armed. Waits for the listener."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._listener.is_alive():
            # What it may be in: two requests, a wait for the others, the start of a save.
            self._listener.join(3 * self._within_s + self._timeout_s)
        self._held = None

    # -- inside ----------------------------------------------------------------------------------

    def _tell_and_meet(self) -> None:
        told = self._store.tell_once(_TOPIC, {"step": self._step}, self._within_s)
        if told["step"] is not None:
            self._meet()
        elif self._changing:
            _warn("this rank had begun to change it")

    def _meet(self) -> None:
        """Save what is held, if all ranks hold the same."""
        held = self._held
        steps = self._store.gather(_TOPIC, self._step, self._within_s)
        if len(set(steps)) > 1:
            shown = ", ".join(f"rank {rank}: {_shown(step)}" for rank, step in enumerate(steps[:8]))
            raise CommitError(f"the ranks do not hold the same step ({shown})")
        with self._changed:
            # Not if training has gone on meanwhile: then it changes already.
            if held is not None and held is self._held:
                self._save(*held)

    @property
    def _step(self) -> int | None:
        held = self._held
        return None if held is None else held[0]

    def _may_meet(self) -> bool:
        """Whether this thread is to meet the other ranks: they meet once."""
        with self._changed:
            if self._met or self._closed:
                return False
            self._met = self._meeting = True
            self._changed.notify_all()
            return True

    def _leave(self) -> None:
        with self._changed:
            self._meeting = False
            self._changed.notify_all()

    def _listen(self) -> None:
        """The listener's thread."""
        try:
            while (told := self._store.told(_TOPIC, self._within_s)) is None:
                if self._over(_LISTEN_EVERY_S):
                    return
            if told["step"] is not None and self._reached(told["step"]):
                try:
                    self._meet()
                finally:
                    self._leave()
        except CkptError:
            # The rank that failed says why, and training here learns of it in its own way.
            _log.info("save_on_exception: this rank could not take part", exc_info=True)

    def _over(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._met or self._closed, seconds)

    def _reached(self, step: int) -> bool:
        """Wait until this step is held, a while at most; whether this thread is to meet the others then."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._met or self._closed or (self._step or 0) >= step, self._within_s / 2
            )
            # At once: `disarm` must not come between.
            return self._may_meet()


def _shown(step: int | None) -> str:
    return "none" if step is None else f"step {step}"


def _warn(why: str) -> None:
    # By the rank that failed, whichever it is: the others may know nothing of it.
    warnings.warn(
        f"save_on_exception: the last whole step was not saved: {why}. Earlier steps are safe",
        CheckpointWarning,
        stacklevel=2,
    )
