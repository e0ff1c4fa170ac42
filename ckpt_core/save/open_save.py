"""A save that its caller holds open: it goes on until it is sealed or aborted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.save.admission import Admission
from ckpt_core.save.handle import SaveHandle
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.snapshot import StageItem
from ckpt_core.types import RAISED_TO_CALLER


@dataclass(slots=True)
class Errand:
    """What one call of the training thread asks of the stager, complete before any of it is done.

    Attributes:
        names: of the leaves that may not change until it is done, piece by piece.
        items: these, as `Snapshot.expect` takes them.
        run: for the stager; None: there is nothing to copy.
        note: what the save remembers of it, on the training thread; may be called twice.
        behind: how many leaves had been handed over before.
    """

    names: Sequence[str]
    items: Sequence[StageItem | None]
    run: Callable[[], None] | None
    note: Callable[[], None]
    behind: int = 0
    _taken: bool = False

    def run_once(self) -> None:
        """Called by the stager, twice where the training thread was interrupted as it asked."""
        if self.run is not None and not self._taken:
            self._taken = True
            self.run()


class OpenSave:
    """What the open forms of a save have in common; used on the training thread.

    One that is neither sealed nor aborted keeps its place among the in-flight checkpoints until `timeout`,
    and then fails. A call that is interrupted has happened as a whole, or not at all: it may be repeated.
    """

    def __init__(self, inflight: InFlight, pipeline: Pipeline, admission: Admission) -> None:
        self._inflight = inflight
        self._pipeline = pipeline
        self._admission = admission
        self._journal = admission.journal
        self._sealed = False
        self._handed = 0
        self._errand: Errand | None = None

    @property
    def step(self) -> int:
        """The step it is of."""
        return self._inflight.step

    @property
    def inflight(self) -> InFlight:
        """What is in flight of it."""
        return self._inflight

    def abort(self, raised: BaseException | None = None) -> None:
        """Give the checkpoint up; nothing of it becomes visible. Idempotent.

        Args:
            raised: what the caller is told instead: the other ranks then log it, and do not report it again
                in their next save, as when `save` raises.
        """
        if self._sealed:
            return
        text = f"step {self.step} was aborted by the caller"
        if raised is not None:
            text = f"{RAISED_TO_CALLER}{type(raised).__name__}: {raised}"
        self._admission.give_up(self._inflight, StagingError(text))
        self._sealed = True

    def _check_open(self) -> None:
        if self._sealed:
            raise ConfigError(f"the save of step {self.step} is sealed or aborted: begin a new one")

    # -- handing over ----------------------------------------------------------------------------

    def _hand_over(self, errand: Errand) -> None:
        """Have it done. From the assignment on it happens, whatever interrupts this thread."""
        errand.behind = self._handed
        late = errand.run is not None and self._admission.is_behind_barrier()
        recover, mine = partial(self._recover, late), self._journal.mine
        mine.making = (*mine.making, self._inflight)
        # Together: no interrupt comes between the two.
        self._errand = errand
        mine.undo = recover
        self._carry_out(errand)
        if late:
            self._admission.wait_copied(self._inflight)

    def _carry_out(self, errand: Errand) -> None:
        errand.note()
        if errand.run is not None and not self._inflight.failed():
            # Order matters: nobody passes the barrier before the stager has copied.
            self._handed = self._inflight.snapshot.expect(
                errand.names, errand.items, behind=errand.behind
            )
            self._pipeline.stager.submit(errand.run_once)
        if self._sealed:
            self._inflight.open_ended = False
        self._errand = None

    def _recover(self, late: bool, error: BaseException) -> None:
        """A call was interrupted: finish what it had handed over.

        Args:
            late: the leaves may change before they are copied, since nobody waits any more: it is given up.
        """
        if self._errand is not None:
            self._carry_out(self._errand)
        if late:
            text = f"{RAISED_TO_CALLER}{type(error).__name__}: {error}"
            self._sealed = True  # whoever goes on with it is told
            self._admission.give_up(self._inflight, StagingError(text))

    def _note_sealed(self) -> None:
        self._admission.sealed(self._inflight)
        self._sealed = True

    def _sealed_handle(self, began: float) -> SaveHandle:
        # It goes on by itself from here, also while this thread waits for it.
        self._journal.mine.undo = None
        return SaveHandle.of(self._inflight, began, blocking=self._pipeline.options.blocking)


def in_flight_of(before: int | OpenSave | None) -> int | InFlight | None:
    """What `wait_staged(before=)` leaves out: steps from a number on, one open save, or nothing."""
    return before.inflight if isinstance(before, OpenSave) else before
