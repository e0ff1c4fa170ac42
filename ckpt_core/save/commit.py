"""Publish a checkpoint whose bytes are all written: the only code that makes a step visible.

Order matters, each line before the next: shard bytes durable -> rank manifest durable -> every rank agrees ->
manifest durable -> names in the attempt's directory durable -> rename to `step-*` -> that name durable.
A kill or a power loss between any two leaves the step unpublished and everything older untouched.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ckpt_core.coordination import Ballot, Coordination, Json
from ckpt_core.errors import CkptError, CommitError, CoordinationTimeout
from ckpt_core.layout import (
    MANIFEST_NAME,
    MAX_UNIX_S,
    ChunkSum,
    FileEntry,
    Manifest,
    RankEntry,
    parents_of,
    rank_manifest_name,
)
from ckpt_core.observe import EventLog, EventName
from ckpt_core.save.contents import Contents
from ckpt_core.save.further import NoLevels
from ckpt_core.save.in_flight import InFlight, Phase
from ckpt_core.share import Auditor, Cuts
from ckpt_core.store import Attempt, GuestStore, StepStore, newest_unix_s
from ckpt_core.system.files import Files, advice
from ckpt_core.system.kept_mappings import KeptMappings

_log = logging.getLogger("ckpt_core")

_LATER_S = 1e-3
_LOOK_AGAIN_S = 0.05
_SEEN_WITHIN_S = 10.0
"""Network filesystems may show a file of another host only after a while."""


class Committer:
    """Publishes or cleans up; runs on finisher threads only.

    Args:
        in_flight: most saves at a time.
        announce: called before each publication, by the rank that leads a root. Never raises.
    """

    def __init__(
        self,
        store: StepStore | GuestStore,
        coordination: Coordination,
        *,
        files: Files,
        events: EventLog,
        auditor: Auditor,
        levels: NoLevels,
        kept: KeptMappings,
        in_flight: int,
        announce: Callable[[], None],
    ) -> None:
        self._store = store
        self._coordination = coordination
        self._files = files
        self._events = events
        self._auditor = auditor
        self._levels = levels
        self._kept = kept
        self._announce = announce
        self._cuts = Cuts(in_flight)
        self._found_unix_s: float | None = None

    def finish(self, inflight: InFlight) -> None:
        """Publish a checkpoint that is complete and apply retention, or clean up one that failed."""
        try:
            self._finish(inflight)
        finally:
            for shard in inflight.shards:
                shard.let_go()
            self._kept.drop_gone()
        if inflight.phase is Phase.COMMITTED:
            inflight.let_go()

    def _finish(self, inflight: InFlight) -> None:
        if not inflight.begin_commit():
            assert inflight.error is not None
            self._coordination.decline(inflight.attempt_id, inflight.step, inflight.error)
            self._clean_up(inflight)
            return
        try:
            path = self.commit(inflight)
        except BaseException as exc:
            inflight.fail(exc)
            self._cuts.forget()
            # Perhaps a file that was to be shared is damaged: the next save writes its own.
            for group, *_ in inflight.stills:
                group.forget()
            # Danger: what this rank has voted for may be published whatever it did since, so from then on
            # only the leader removes files; or all do, once it is certain that nobody publishes. The
            # leader's removal alone is not enough: a slower rank may make the directory again behind it.
            certain = isinstance(exc, CkptError) and exc.nowhere
            if self._coordination.info.leads or not inflight.voted or certain:
                self._clean_up(inflight)
            return
        self.retire()
        if inflight.succeed(path):
            self._tell(EventName.COMMITTED, inflight)
        else:
            _log.warning("step %d was committed after its deadline had passed", inflight.step)

    def _tell(self, name: EventName, inflight: InFlight) -> None:
        assert inflight.contents is not None
        seconds, nbytes = time.monotonic() - inflight.began, inflight.contents.state_bytes
        attempt = inflight.attempt_id
        self._events.tell(name, inflight.step, attempt=attempt, seconds=seconds, nbytes=nbytes)

    def commit(self, inflight: InFlight) -> Path:
        """Make the checkpoint durable and visible; returns the directory of the step.

        Raises:
            PersistError: bytes did not become durable.
            CommitError: another rank failed, or the step could not be published.
            CoordinationTimeout: another rank did not answer in time.
        """
        coordination, step = self._coordination, inflight.step
        contents = inflight.contents
        assert contents is not None
        try:
            attempt = inflight.directory()
            with self._mapped(inflight, attempt):
                entry = self._write_rank_manifest(inflight, attempt, contents)
            if inflight.failed():
                # Given up while storage hung: with this vote it could still be published.
                assert inflight.error is not None
                raise inflight.error
        except BaseException as exc:
            # Looked for first: once this rank has declined, it hears of no other.
            reason = inflight.explained(exc)
            coordination.decline(inflight.attempt_id, step, exc)
            raise reason from reason.__cause__
        self._tell(EventName.PERSISTED, inflight)
        left = max(inflight.deadline - time.monotonic(), 0.0)
        inflight.voted = True
        is_step = attempt.destination is None
        aside = self._levels.aside(step, attempt.id) if is_step else None
        parts = self._cuts.vote(contents.cut)
        ballot = Ballot("+".join(contents.plans), entry.to_json(), contents.reference, aside, parts)
        ballots = coordination.agree(attempt.id, step, ballot, left)
        error: BaseException | None = None
        try:
            if isinstance(self._store, StepStore):
                with self._mapped(inflight, attempt):
                    self._publish(self._store, inflight, attempt, ballots)
        except BaseException as exc:
            error = exc
        self._settle(inflight, attempt, error)
        if error is not None:
            raise error
        if is_step:
            self._auditor.agreed(contents.plans)
        if parts is not None:
            parts.agreed()
        path = self._store.root / attempt.target_name
        # Before retention: where a file is linked from may go.
        for group, shard, look in inflight.stills:
            group.committed(shard, path, look)
        return path

    def _settle(self, inflight: InFlight, attempt: Attempt, error: BaseException | None) -> None:
        """Hear whether every root has the step; `error` is why this rank's has not."""
        info = self._coordination.info
        left = max(inflight.deadline - time.monotonic(), 0.0)
        try:
            self._coordination.settle(attempt.id, inflight.step, error, left)
        except (CommitError, CoordinationTimeout) as exc:
            if error is not None:
                return  # it says that again
            published = info.leads
            if published and len(info.members) == info.world_size:
                # The only root has it, so it is committed, whoever has died since.
                _log.warning(
                    "step %d is committed; the ranks lost touch after: %s", attempt.step, exc
                )
                return
            if published and isinstance(exc, CommitError) and attempt.destination is None:
                # Another node's root has not got it: it must not stand as this one's newest step.
                self._store.suspect(attempt.step)
            raise

    def retire(self) -> None:
        """Apply retention; a failure is logged and tried again after the next commit."""
        try:
            retired = self._store.retire()
        except (CkptError, OSError) as exc:
            _log.warning(
                "old steps could not be retired, which the next commit tries again: %s", exc
            )
            return
        for step in retired:
            self._events.tell(EventName.RETIRED, step)

    # -- inside ----------------------------------------------------------------------------------

    def _clean_up(self, inflight: InFlight) -> None:
        """Remove what a failed checkpoint left behind; never raises."""
        for shard in inflight.shards:
            # A network filesystem says it again: the save has failed already.
            with suppress(OSError):
                shard.close()
        if inflight.attempt is not None:
            made = [shard.path for shard in inflight.shards if shard.path is not None]
            self._store.abandon(inflight.attempt, made)

    @contextmanager
    def _mapped(self, inflight: InFlight, attempt: Attempt) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise CommitError(
                f"step {inflight.step} was not published: {exc.strerror or exc} at "
                f"{exc.filename or attempt.path}. Earlier steps are untouched. {advice(exc)}",
                step=inflight.step,
                rank=self._coordination.info.rank,
                path=attempt.path,
            ) from exc

    def _write_rank_manifest(
        self, inflight: InFlight, attempt: Attempt, contents: Contents
    ) -> RankManifestFile:
        info = self._coordination.info
        entries = []
        for shard in inflight.shards:
            sums = tuple(ChunkSum(part.nbytes, part.xxh3) for part in shard.sync())
            shard.close()
            entries.append(FileEntry(shard.request.name, shard.request.file_bytes, sums))
        for folder in sorted(parents_of(entry.name for entry in entries), reverse=True):
            self._files.sync_dir(attempt.path / folder)
        skeleton = "null" if contents.skeleton is None else contents.skeleton.to_text()
        version = 1 if info.world_size == 1 else 2
        version = version if attempt.destination is None else 3
        data = contents.stored.manifest(info.rank, entries, skeleton, version=version)
        name = rank_manifest_name(info.rank)
        self._files.write_new(attempt.path / name, data)
        if len(info.members) > 1:
            # The leader may be on another host: names of this rank's files are made durable here.
            self._files.sync_dir(attempt.path)
        files = tuple((entry.name, entry.nbytes) for entry in entries)
        return RankManifestFile(
            RankEntry(info.rank, name, len(data), xxhash.xxh3_64(data).hexdigest()),
            contents.state_bytes,
            files,
        )

    def _publish(
        self, store: StepStore, inflight: InFlight, attempt: Attempt, ballots: Sequence[Json]
    ) -> None:
        written = [RankManifestFile.from_json(ballot) for ballot in ballots]
        _check_names(attempt, written)
        self._await_files(attempt, written, deadline=inflight.deadline)
        to = attempt.destination
        manifest = Manifest(
            step=inflight.step,
            attempt=attempt.id,
            created_unix_s=self._created_unix_s(inflight),
            ranks=tuple([one.entry for one in written]),
            state_bytes=sum(one.state_bytes for one in written),
            world_size=self._coordination.info.world_size,
            directory=None if to is None else to.directory,
            pointer=None if to is None else to.pointer,
        )
        self._files.write_new(attempt.path / MANIFEST_NAME, manifest.encode())
        self._announce()
        # Commit point: the rename inside publish.
        store.publish(attempt)

    def _created_unix_s(self, inflight: InFlight) -> float:
        """When it was let in; of a directory, later than those of earlier processes, for their order."""
        created_unix_s, to = inflight.created_unix_s, inflight.destination
        if to is None:
            return created_unix_s
        if self._found_unix_s is None:
            self._found_unix_s = newest_unix_s(self._store.root, self._files)
        # The clock may have been set back since: in the order in which these began.
        behind_s = min(self._found_unix_s + to.order * _LATER_S, MAX_UNIX_S)
        return max(created_unix_s, behind_s)

    def _await_files(
        self, attempt: Attempt, written: Sequence[RankManifestFile], *, deadline: float
    ) -> None:
        """Be sure that what other ranks have written is in this very directory."""
        until = min(deadline, time.monotonic() + _SEEN_WITHIN_S)
        for one in written:
            rank = one.entry.rank
            if rank == self._coordination.info.rank:
                continue
            for name, nbytes in ((one.entry.file, one.entry.nbytes), *one.files):
                path = attempt.path / name
                while _size(path) != nbytes:
                    if time.monotonic() >= until:
                        raise CommitError(
                            f"step {attempt.step} was not published: rank {rank} wrote {name} of "
                            f"{nbytes} bytes, and {path} has {_size(path)} as this rank sees it. All "
                            f"ranks of a root must write to the same directory",
                            step=attempt.step,
                            rank=rank,
                            path=path,
                        )
                    time.sleep(_LOOK_AGAIN_S)


@dataclass(frozen=True, slots=True)
class RankManifestFile:
    """What a rank says of its files in its vote.

    Attributes:
        entry: its rank manifest.
        state_bytes: bytes of its leaves and slices.
        files: name and length of each of its shard files.
    """

    entry: RankEntry
    state_bytes: int
    files: tuple[tuple[str, int], ...]

    def to_json(self) -> Json:
        """For the vote."""
        entry = self.entry
        row = [entry.rank, entry.file, entry.nbytes, entry.xxh3]
        return [row, self.state_bytes, [list(file) for file in self.files]]

    @classmethod
    def from_json(cls, value: Json) -> RankManifestFile:
        """As `to_json` gave it."""
        row, state_bytes, files = value
        return cls(RankEntry(*row), state_bytes, tuple([(name, size) for name, size in files]))


def _check_names(attempt: Attempt, written: Sequence[RankManifestFile]) -> None:
    """No two ranks have a file of the same name."""
    owners: dict[str, int] = {}
    for one in written:
        for name, _ in one.files:
            if name in owners:
                ranks = f"ranks {owners[name]} and {one.entry.rank}"
                raise CommitError(
                    f"step {attempt.step} was not published: {ranks} have both added {name!r}: each name "
                    f"is added by one rank",
                    step=attempt.step,
                    rank=one.entry.rank,
                    path=attempt.path / name,
                )
            owners[name] = one.entry.rank


def _size(path: Path) -> int | None:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return None
