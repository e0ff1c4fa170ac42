"""`StepStore`: every change of a root goes through here, in an order that survives any crash."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from ckpt_core.errors import CommitError, ConfigError, PersistError, RestoreError, RootBusy
from ckpt_core.layout import MANIFEST_NAME
from ckpt_core.store.abandoned import Abandoned
from ckpt_core.store.directories import Directories
from ckpt_core.store.failures import mapped
from ckpt_core.store.holding import HeldRoot
from ckpt_core.store.kept import KeptSteps
from ckpt_core.store.leaving import Left, check_removable, is_kept, take_away
from ckpt_core.store.names import INFLIGHT
from ckpt_core.store.pins import pinned_steps
from ckpt_core.store.publish import Attempt, place, put_back, sync_names
from ckpt_core.store.quarantine import move_aside, moving
from ckpt_core.store.repair import repair
from ckpt_core.store.retention import choose_retired
from ckpt_core.store.rewinds import Rewinds
from ckpt_core.store.slots import Slots
from ckpt_core.store.space import check_space
from ckpt_core.store.trash import Trash
from ckpt_core.store.trees import ensure_dir, find_root
from ckpt_core.system.files import Files
from ckpt_core.system.kept_mappings import KeptMappings
from ckpt_core.types import Destination, check_step

logger = logging.getLogger(__name__)


class StepStore(KeptSteps):
    """The committed steps of one root, and the attempts that may become steps.

    Thread-safe. `begin`, `protect`, `take_slot` and the readers never wait for a disk sync of
    another thread; `publish`, `retire`, `remove` and `quarantine_suspects` take turns. What keeps a
    step, and the two locks, are in `KeptSteps`.
    """

    def __init__(
        self,
        root: Path,
        *,
        files: Files,
        keep_last: int | None,
        keep_every: int | None,
        spare_slots: int | None,
        shared: bool = False,
        rank: int = 0,
        kept: KeptMappings | None = None,
    ) -> None:
        """Writes nothing.

        Args:
            root: directory of the steps; links on the way to it are resolved now.
            files: every change of the filesystem goes through it.
            keep_last: newest steps that `retire` keeps; None keeps all.
            keep_every: `retire` keeps the multiples of it; None keeps none for that reason.
            spare_slots: shard files of retired steps kept for recycling; None: as `Slots`.
            shared: other ranks write to this root too, each through a `GuestStore`.
            rank: of this process.
            kept: what this process has mapped of the root.
        """
        super().__init__(find_root(root), files=files)
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._ours = HeldRoot(self.root, files=files, names=self._names)
        self._shared = shared
        self._slots = Slots(
            self.root, files=files, spare=spare_slots, shared=shared, rank=rank, kept=kept
        )
        self._trash = Trash(files, slots=self._slots)
        self._unsettled: set[str] = set()
        self._stuck: set[int] = set()
        self._abandoned = Abandoned(files, shared=shared)
        self._rewinds = Rewinds(self.root)
        self._directories = Directories(self.root, files=files)

    # -- life ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the root if it is missing, take its lock, and repair what a crash left.

        Raises:
            ConfigError: the root is no directory.
            RootBusy: somebody else writes to it.
            PersistError: it cannot be made, locked or repaired.
        """
        with self._names:
            self._ours.enter()
            try:
                self.repair()
            except BaseException:
                self.close()
                raise

    def repair(self) -> None:
        """Finish or roll back whatever a kill or power loss left. Only while no attempt is alive.

        Raises:
            PersistError: a step could not be brought back, or the names not be made durable.
        """
        with self._names, mapped("repair the checkpoint root", path=self.root):
            repair(self.root, files=self._files, slots=self._slots)

    def owner(self) -> dict[str, Any]:
        """What the lock file says of this process; other ranks find out by it whether they share the root."""
        return self._ours.lock.owner()

    @property
    def has_record_lock(self) -> bool:
        """Whether the root is locked by the weaker kind, for want of the better one."""
        return self._ours.lock.is_record

    def close(self) -> None:
        """Give the lock back. Idempotent, never raises, changes nothing on storage."""
        self._ours.leave()

    # -- one save ------------------------------------------------------------------------------

    def admitted(self, attempt_id: str) -> None:
        """Note the order in which training asks for saves, or ends those it holds open. Never waits."""
        self._rewinds.admitted(attempt_id)

    def gone_back(self) -> None:
        """Publish no save from before this call. Called before a restore, while no save is in flight."""
        self._rewinds.gone_back()

    def begin(
        self,
        step: int,
        attempt_id: str | None = None,
        destination: Destination | None = None,
        brought: bool = False,
    ) -> Attempt:
        """A directory for one save of a step. Makes the root anew if it was removed.

        Called from a background thread: no disk sync, unless the root has to be made.

        Args:
            attempt_id: as agreed with other ranks, which may have made it already; None: a fresh one.
            destination: for named files; None: the save becomes a step.
            brought: it is a save of before, from a further level: training has not gone back.

        Raises:
            ConfigError: the step is no step, or the store is closed.
            RootBusy: the root was removed under us and somebody else has taken it.
            PersistError: the directory cannot be made, or the root not be listed; nothing was begun.
        """
        step = check_step(step)
        self._ours.check()
        name = attempt_id or f"{step:012d}-{secrets.token_hex(4)}"
        path = self.root / INFLIGHT / name
        with mapped("begin a save", path=self.root, step=step):
            ensure_dir(self._files, path.parent)
            if self._shared:
                ensure_dir(self._files, path)
            else:
                self._files.mkdir(path)
        if destination is None and not brought:
            try:
                with self._state:
                    self._rewinds.begun(name, step, committed=self.steps())
            except BaseException as exc:
                with contextlib.suppress(OSError):
                    self._files.rmdir(path)
                if isinstance(exc, RestoreError):
                    raise PersistError(str(exc), step=step, path=self.root) from exc
                raise
        return Attempt(name, step, path, destination)

    def take_slot(self, attempt: Attempt, name: str, nbytes: int) -> bool:
        """Move the best fitting recycled file into the attempt as `name`; its size may be any.

        Called by persist, before it makes the file. Never fails a save: any trouble gives False,
        and the caller writes a new file.
        """
        return self._slots.take(attempt.path / name, nbytes)

    def next_slot(self, nbytes: int) -> Path | None:
        """The file that `take_slot` would give now."""
        return self._slots.next_for(nbytes)

    def check_space(self, *sizes: int, others_bytes: int = 0) -> None:
        """Refuse a save that cannot fit, before anything is written; makes a removed root anew.

        Blocks of the slots that `take_slot` would give files of these sizes count as there already.

        Raises:
            PersistError: the free space is too small; says how much is needed and what to do.
            RootBusy: the root was removed under us and somebody else has taken it.
        """
        self._ours.check()
        check_space(self.root, sizes, others_bytes, slots=self._slots, files=self._files)

    def publish(self, attempt: Attempt) -> Path:
        """Make a complete attempt the committed step; once this returns it survives a power loss.

        Called by the engine when every rank has persisted: all files in the attempt are durable and the
        manifest is among them. A step of that number is replaced atomically, but not by a save from before
        it, or from before `gone_back`. An older step may be published after a newer one and never becomes
        the latest.

        A directory of files replaces whatever directory has its name, and then moves its pointer. If a
        younger one was published first, this one counts as replaced at once.

        Raises:
            CommitError: the step is not committed, what was committed before still is; or only the
                pointer of a directory could not be moved.

        Source: PCcheck section 4.1, Listing 1: data, then its durability, then the pointer.
        """
        target, to = self.root / attempt.target_name, attempt.destination
        with self._names:
            try:
                with mapped("publish", path=self.root, step=attempt.step, error=CommitError):
                    self._replace(attempt, target)
            except (RootBusy, PersistError, ConfigError) as exc:
                raise CommitError(str(exc), step=attempt.step, path=self.root) from exc
            ready = self._trash.take()
        try:
            if to is not None:
                self._point(attempt, to)
        finally:
            self._trash.discard(ready)
        return target

    def _replace(self, attempt: Attempt, target: Path) -> None:
        to = attempt.destination
        if to is not None and self._directories.is_overtaken(to):
            self._trash.add(attempt.path, recycle=False)
            return
        replaced = self._publish(attempt, target)
        if to is not None:
            self._directories.placed(to)
        if replaced is not None:
            # Whoever protects the step from now on reads the new files. Files of a directory are never
            # overwritten: programs that know nothing of us may have mapped them.
            with self._state:
                recycle = to is None and attempt.step not in self._protected()
            self._trash.add(replaced, recycle=recycle)

    def _point(self, attempt: Attempt, to: Destination) -> None:
        error = CommitError
        with (
            self._names,
            mapped("move the pointer", path=self.root, step=attempt.step, error=error),
        ):
            self._directories.point(attempt, to)

    def _publish(self, attempt: Attempt, target: Path) -> Path | None:
        if not (attempt.path / MANIFEST_NAME).is_file():
            text = f"{attempt.path} has no manifest (or is gone): a step is published complete"
            raise CommitError(text, step=attempt.step, path=attempt.path)
        # Order matters: names in the attempt are durable before the attempt has the step's name,
        # and a recycled file is durably no slot before it belongs to a step.
        self._files.sync_dir(attempt.path)
        self._slots.sync()
        self._ours.check()
        self._rewinds.check_turn(attempt.id, attempt.step)
        self._unsettled.add(attempt.id)
        replaced = place(self._files, attempt, target)
        self._unsettled.discard(attempt.id)
        if attempt.destination is None:
            with self._state:
                self._suspects.discard(attempt.step)
                self._rewinds.published(attempt.id, attempt.step)
        return replaced

    def abandon(self, attempt: Attempt, made: Iterable[Path] = ()) -> None:
        """Delete what a failed save has written. Best effort: never raises, keeps nothing.

        Args:
            made: as for `GuestStore.abandon`; the leader deletes the files of all ranks anyway.
        """
        try:
            if attempt.id in self._unsettled:
                # A publish failed half way: the name must be gone for good before the bytes go.
                with self._names:
                    put_back(self._files, attempt, self.root / attempt.target_name)
                    sync_names(self._files, self.root)
                self._unsettled.discard(attempt.id)
            self._abandoned.remove(attempt.path)
        except Exception as exc:
            logger.warning("could not delete %s: %s; reopening does", attempt.path, exc)

    # -- steps that go -------------------------------------------------------------------------

    def retire(self) -> tuple[int, ...]:
        """Take away the steps that retention no longer keeps, and return them, ascending.

        Called by the engine after a commit. What stays: the newest `keep_last`, multiples of `keep_every`,
        pinned and protected steps, those that are `awaited` elsewhere, suspects (which do not count), the
        newest step whatever the settings, and the last one saved if it was below the newest. Shard files
        become slots; the rest is deleted.

        Raises:
            PersistError: steps could not be unpublished durably; none of their bytes was touched. One that
                cannot be renamed stays beside those that can, and is named in the log once.
        """
        with self._names:
            self._ours.check()
            with mapped("retire steps", path=self.root):
                doomed = self._unpublish_retired()
                ready = self._settled_trash()
        self._trash.discard(ready)
        self._abandoned.sweep()
        return doomed

    def _unpublish_retired(self) -> tuple[int, ...]:
        pinned = pinned_steps(self.root)
        with self._state:
            # Invariant: no step is protected between this choice and the renames.
            committed = self.steps()
            doomed = choose_retired(
                committed,
                keep_last=self._keep_last,
                keep_every=self._keep_every,
                kept=pinned.union(
                    self._protected(), self._rewinds.kept(), self.awaited(committed), self.held()
                ),
                suspect=self._suspects,
            )
            left = take_away(self.root, doomed, files=self._files, held=self.held)
            self._throw_away(left, recycle=True)
        return tuple(left.gone)

    def remove(self, steps: Iterable[int], *, held: Callable[[], Collection[int]] = tuple) -> None:
        """Delete steps that a person names, the newest included; their space is given back.

        Args:
            held: what says which steps stay as pinned ones do; asked again when names are gone.

        Raises:
            NotCommitted: one of them is not there; nothing was deleted.
            ConfigError: one of them is pinned, held, or being read by this process; nothing was deleted.
            PersistError: one could not be unpublished durably; none of its bytes was touched.
        """
        wanted = sorted({check_step(step) for step in steps})
        with self._names:
            self._ours.check()
            with self._state, mapped("remove steps", path=self.root):
                kept = pinned_steps(self.root).union(self._protected(), held())
                check_removable(self.root, wanted, committed=self.steps(), kept=kept)
                left = take_away(self.root, wanted, files=self._files, together=True, held=held)
                if left.pinned:
                    raise is_kept(self.root, left.pinned)
                self._throw_away(left, recycle=False)
            with mapped("remove steps", path=self.root):
                ready = self._settled_trash()
        self._trash.discard(ready)

    def _throw_away(self, left: Left, *, recycle: bool) -> None:
        for step, path in left.gone.items():
            self._trash.add(path, recycle=recycle)
            self._suspects.discard(step)
        for step in left.stuck.keys() - self._stuck:
            logger.warning("step %d cannot be retired and stays: %s", step, left.stuck[step])
        self._stuck.update(left.stuck)

    def _settled_trash(self) -> list[tuple[Path, bool]]:
        """What may be recycled or deleted now, since it has lost its name durably."""
        if not self._trash:
            return []
        sync_names(self._files, self.root)
        return self._trash.take()

    # -- steps that were found corrupt -----------------------------------------------------------

    def quarantine_suspects(self) -> None:
        """Move steps that were found corrupt to `.corrupt/`, durably; deletes nothing.

        Called by the engine when the first newer save begins. A suspect that is being read stays
        for a later call.

        Raises:
            PersistError: a step could not be moved; it still is where it was, or was moved whole. Others
                were moved, as far as they could be.
        """
        with self._names:
            if not self._suspects:
                return
            self._ours.check()
            with mapped("move corrupt steps aside", path=self.root):
                self._move_suspects()

    def _move_suspects(self) -> None:
        with moving(self.root, files=self._files), self._state:
            doomed = self._suspects - self._protected()
            there = doomed.intersection(self.steps())
            failed = move_aside(self.root, there, files=self._files)
            self._suspects -= doomed - failed.keys()
        for error in failed.values():
            raise error
