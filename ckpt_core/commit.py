"""Publish a checkpoint whose bytes are all written: the only code that makes a step visible.

Order matters, each line before the next: shard bytes durable -> rank manifest durable -> every rank agrees ->
manifest durable -> names in the attempt's directory durable -> rename to `step-*` -> that name durable.
A kill or a power loss between any two leaves the step unpublished and everything older untouched.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import xxhash

from ckpt_core.coordination import Ballot, Coordination
from ckpt_core.errors import CkptError, CommitError
from ckpt_core.files import Files
from ckpt_core.inflight import Contents, InFlight
from ckpt_core.layout import (
    MANIFEST_NAME,
    ChunkSum,
    FileEntry,
    LeafEntry,
    Manifest,
    RankEntry,
    RankManifest,
    rank_manifest_name,
    shard_name,
)
from ckpt_core.observe import EventLog, EventName
from ckpt_core.persist import advice
from ckpt_core.store import Attempt, StepStore

_log = logging.getLogger("ckpt_core")


class Committer:
    """Publishes or cleans up; runs on the finisher thread only."""

    def __init__(
        self, store: StepStore, coordination: Coordination, *, files: Files, events: EventLog
    ) -> None:
        self._store = store
        self._coordination = coordination
        self._files = files
        self._events = events

    def finish(self, inflight: InFlight) -> None:
        """Publish a checkpoint that is complete and apply retention, or clean up one that failed."""
        if not inflight.begin_commit():
            self.clean_up(inflight)
            return
        self._tell(EventName.PERSISTED, inflight)
        try:
            path = self.commit(inflight)
        except BaseException as exc:
            inflight.fail(exc)
            self.clean_up(inflight)
            return
        for step in self.retire():
            self._events.tell(EventName.RETIRED, step)
        if inflight.succeed(path):
            self._tell(EventName.COMMITTED, inflight)
        else:
            _log.warning("step %d was committed after its deadline had passed", inflight.step)

    def _tell(self, name: EventName, inflight: InFlight) -> None:
        assert inflight.contents is not None
        seconds, nbytes = time.monotonic() - inflight.began, inflight.contents.state_bytes
        self._events.tell(name, inflight.step, seconds=seconds, nbytes=nbytes)

    def commit(self, inflight: InFlight) -> Path:
        """Make the checkpoint durable and visible; returns the directory of the step.

        Raises:
            PersistError: bytes did not become durable.
            CommitError: another rank failed, or the step could not be published.
        """
        attempt, contents = inflight.directory(), inflight.contents
        assert contents is not None
        info = self._coordination.info
        try:
            entry = self._write_rank_manifest(inflight, attempt, contents)
            left = max(inflight.deadline - time.monotonic(), 0.0)
            self._coordination.agree(attempt.id, inflight.step, Ballot("", None), left)
            manifest = Manifest(
                step=inflight.step,
                attempt=attempt.id,
                created_unix_s=time.time(),
                ranks=(entry,),
                state_bytes=contents.state_bytes,
            )
            assert info.world_size == 1, "ranks are not built yet"
            self._files.write_new(attempt.path / MANIFEST_NAME, manifest.encode())
        except OSError as exc:
            raise CommitError(
                f"step {inflight.step} was not published: {exc.strerror or exc} at "
                f"{exc.filename or attempt.path}. Earlier steps are untouched. {advice(exc)}",
                step=inflight.step,
                rank=info.rank,
                path=attempt.path,
            ) from exc
        # Commit point: the rename inside publish.
        return self._store.publish(attempt)

    def clean_up(self, inflight: InFlight) -> None:
        """Remove what a failed checkpoint left behind; never raises."""
        for shard in inflight.shards:
            shard.close()
        if inflight.attempt is not None:
            self._store.abandon(inflight.attempt)

    def retire(self) -> tuple[int, ...]:
        """Apply retention; a failure is logged and tried again after the next commit."""
        try:
            return self._store.retire()
        except (CkptError, OSError) as exc:
            _log.warning(
                "old steps could not be retired, which the next commit tries again: %s", exc
            )
            return ()

    def _write_rank_manifest(
        self, inflight: InFlight, attempt: Attempt, contents: Contents
    ) -> RankEntry:
        rank = self._coordination.info.rank
        entries = []
        for index, shard in enumerate(inflight.shards):
            sums = tuple(ChunkSum(part.nbytes, part.xxh3) for part in shard.sync())
            shard.close()
            entries.append(FileEntry(shard_name(rank, index), shard.request.nbytes, sums))
        leaves = tuple(
            LeafEntry(spec, file, extent.offset, extent.nbytes)
            for spec, file, extent in contents.leaves
        )
        skeleton: Any = contents.skeleton.to_json()
        data = RankManifest(rank, tuple(entries), leaves, skeleton).encode()
        name = rank_manifest_name(rank)
        self._files.write_new(attempt.path / name, data)
        return RankEntry(rank, name, len(data), xxhash.xxh3_64(data).hexdigest())
