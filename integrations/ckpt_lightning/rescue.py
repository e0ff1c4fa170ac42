"""`save_on_exception`: the last whole step, kept at hand until the next one begins to change it.

One process saves it by itself. Several ranks save it together, or not at all:

    the rank that fails    tells the others its step, and its place in the run; then meets them
    the others             hear of it in a thread of their own, since training may hang in a collective that
                           the one that failed does not come to; they meet it as soon as they are there
    all of them            save, if all hold the same step of one place; the engine commits it as any other

The number of a step is not enough: where batches make none, the same one is taken again behind a validation
and between two epochs, with another place in the data.

No collective is used, and every wait has a deadline. On a device nobody listens: a copy would wait behind the
collective that hangs. There only ranks that all fail meet.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckpt_core import CkptError, CommitError, TorchStore
from ckpt_lightning.capture import EXTRAS
from ckpt_lightning.texts import CheckpointWarning

Tree = dict[str, Any]
_log = logging.getLogger("ckpt_core")
Save = Callable[[int, Tree], object]
Where = tuple[int, ...]
_BEHIND = ("", " and a validation", " and their hooks", " and an epoch")

_TOPIC = "save_on_exception"
_WITHIN_S = 30.0
_LISTEN_EVERY_S = 0.5


def where_taken(tree: Tree) -> Where:
    """Which state of its step this is: equal on ranks that took it in the same hook, greater later on.

    Returns:
        Epochs begun, batches begun, and behind what of the last batch, as in `_BEHIND`.
    """
    loops, ours = tree["loops"]["fit_loop"], tree[EXTRAS]
    begun = [
        loops[name]["total"]["ready"] for name in ("epoch_progress", "epoch_loop.batch_progress")
    ]
    # `Moment.owed`: nothing is, behind a module's own hook and where training stops.
    behind = 3 if ours["boundary"] else ("batch", "validation", "").index(ours["owed"])
    return (*begun, behind)


@dataclass(frozen=True)
class _Held:
    """A whole step; its place in the run is the step, and where it was taken."""

    step: int
    tree: Tree
    place: list[int]


class Armed:
    """The last whole step of one process, if a failure would save it. Used on the training thread."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._held: _Held | None = None

    def arm(self, step: int, tree: Tree, where: Where = ()) -> None:
        """This step is whole; `tree` stays so until `disarm`. `where`: as of `where_taken`."""
        self._hold(_Held(step, tree, [step, *where]))

    def disarm(self, *, saved: bool = False) -> None:
        """What `tree` refers to is about to change, or `saved` by who asks."""
        self._held = None

    def outlast(self, copied: Callable[[Tree], Tree]) -> None:
        """What `tree` refers to is about to change without a step: hold a copy from here on."""
        if self._held is not None:
            held = replace(self._held, tree=copied(self._held.tree))
            self.disarm()
            self._hold(held)

    def fail(self) -> None:
        """Training has failed: save the step that is held.

        Raises:
            CkptError: as a save.
        """
        if self._held is not None:
            self._save(self._held.step, self._held.tree)
            self._held = None

    def close(self) -> None:
        """Nothing is saved from here on. Idempotent."""
        self._held = None

    def _hold(self, held: _Held) -> None:
        self._held = held


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

    def disarm(self, *, saved: bool = False) -> None:
        """See Armed. Waits while the ranks are about to save what is held: one of them has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._meeting, self._within_s)
            # Still, if it was before: until another step is whole.
            self._changing = not saved and (self._changing or self._held is not None)
            self._held = None

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

    def _hold(self, held: _Held) -> None:
        with self._changed:
            self._changing, self._held = False, held
            self._changed.notify_all()

    def _tell_and_meet(self) -> None:
        told = self._store.tell_once(_TOPIC, {"place": self._place}, self._within_s)
        if told["place"] is not None:
            self._meet()
        elif self._changing:
            _warn("this rank had begun to change it")

    def _meet(self) -> None:
        """Save what is held, if all ranks hold the same."""
        held = self._held
        places = self._store.gather(_TOPIC, self._place, self._within_s)
        if any(place != places[0] for place in places):
            shown = ", ".join(
                f"rank {rank}: {_shown(place)}" for rank, place in enumerate(places[:8])
            )
            raise CommitError(f"the ranks do not hold the same step ({shown})")
        with self._changed:
            # Not if training has gone on meanwhile: then it changes already.
            if held is not None and held is self._held:
                self._save(held.step, held.tree)

    @property
    def _place(self) -> list[int] | None:
        held = self._held
        return None if held is None else held.place

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
            if told["place"] is not None and self._reached(told["place"]):
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

    def _reached(self, place: list[int]) -> bool:
        """Wait until training is there, a while at most; whether this thread is to meet the others then."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._met or self._closed or (self._place or []) >= place,
                self._within_s / 2,
            )
            # At once: `disarm` must not come between.
            return self._may_meet()


def _shown(place: list[int] | None) -> str:
    if place is None:
        return "none"
    step, *where = place
    return f"step {step}" + (f" behind {where[1]} batches{_BEHIND[where[2]]}" if where else "")


def _warn(why: str) -> None:
    # By the rank that failed, whichever it is: the others may know nothing of it.
    warnings.warn(
        f"save_on_exception: the last whole step was not saved: {why}. Earlier steps are safe",
        CheckpointWarning,
        stacklevel=2,
    )
