"""A save whose result is a directory of named files that `torch.load` reads.

    open --add(name, tree)*, add_all(trees)*--> open --seal()--> sealed        open --abort()--> given up

`add` pickles all but the bytes of large tensors; the stager copies those, file by file, from the live tensors
through the bounded pool to the writers, while the next file is added.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.layout import is_directory_name, is_file_name, parents_of
from ckpt_core.save.admission import Admission
from ckpt_core.save.contents import Contents, Stored
from ckpt_core.save.handle import SaveHandle
from ckpt_core.save.in_flight import InFlight
from ckpt_core.save.journal import stalling
from ckpt_core.save.open_save import Errand, OpenSave
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.save.reading import Reading, stage_items
from ckpt_core.save.shards import Shards
from ckpt_core.save.staging import guarded
from ckpt_core.save.still_named import NamedStill, named_sharing_for
from ckpt_core.share import TextReference
from ckpt_core.snapshot import (
    CopyStreams,
    EagerCopies,
    LeafWatch,
    ShardImage,
    StageItem,
    StagingPool,
)
from ckpt_core.system.compiling import untraced
from ckpt_core.system.devices import Queued
from ckpt_core.torch_zip import Skipping, ZipPlan, plan_zip, tensor_paths
from ckpt_core.types import Destination, RankInfo

Eager = bool | Callable[[torch.Tensor], bool]

_FIRST_CHUNKS = 128
"""How many chunks the first save of named files is taken for, since nobody has said yet."""


class FilesSaves:
    """Makes the saves of `Checkpointer.begin_files`; used on the training thread.

    Attributes:
        sharing: which files may be links to those of earlier directories.
    """

    def __init__(
        self, admission: Admission, pipeline: Pipeline, shards: Shards, *, info: RankInfo
    ) -> None:
        self.admission = admission
        self.pipeline = pipeline
        self.shards = shards
        self.sharing = named_sharing_for(pipeline.options)
        self._several = info.world_size > 1
        self._count = 0
        self._largest_bytes = 0

    def begin(
        self, step: int, directory: str, *, pointer: str | None, replaces: Iterable[str] | None
    ) -> FilesSave:
        """See `Checkpointer.begin_files`."""
        inflight = self.admission.announce(
            step, partial(self._destination, directory, pointer, replaces)
        )
        self.admission.admit(inflight)
        return FilesSave(self, inflight)

    def pool_for(self, nbytes: int) -> StagingPool:
        """The memory for a save whose first file has `nbytes`; the others are not known yet.

        Made for as much as the largest such save so far took.
        """
        first_bytes = _FIRST_CHUNKS * self.pipeline.options.chunk_size
        most = max(nbytes, self._largest_bytes or first_bytes)
        return self.pipeline.pool_for(self.pipeline.memory.demand_of_files(most))

    def contents(self, inflight: InFlight) -> Contents:
        """What this rank stores of a save; all ranks must mean the same directory."""
        to = inflight.destination
        assert to is not None
        plan = f"files in {to.directory!r} by {to.pointer!r}"
        plans = (plan,) if self._several else ()
        reference = TextReference(plan) if plans else None
        return Contents(Stored(()), None, plans, reference, named_bytes=inflight.file_bytes)

    def took(self, nbytes: int, names: Collection[str]) -> None:
        """Note the length of all files of a save, and their names."""
        self._largest_bytes = max(self._largest_bytes, nbytes)
        self.sharing.ended(names)

    def _destination(
        self, directory: str, pointer: str | None, replaces: Iterable[str] | None
    ) -> Destination:
        if not self.pipeline.options.pipelined:
            raise ConfigError(
                "pipelined=False: the length of named files is not known when a save of them begins, so no "
                "staging memory can be had for all of them; set pipelined=True"
            )
        for field, name in (("directory", directory), ("pointer", pointer)):
            if not is_directory_name(name) and not (field == "pointer" and name is None):
                raise ConfigError(
                    f"{field}={name!r} cannot be a name in the root: give one of 1 to 200 bytes, without a "
                    f"slash, control characters or blanks at its ends, that is not hidden and not that of a "
                    f"step (step-000000000120) or `lost+found`"
                )
        if directory == pointer:
            raise ConfigError(f"pointer={pointer!r} is the directory itself: give it another name")
        known = None if replaces is None else tuple(replaces)
        if isinstance(replaces, str) or not all(isinstance(one, str) for one in known or ()):
            raise ConfigError(f"replaces={replaces!r}: give names of files, such as ['*.pt']")
        self._count += 1
        return Destination(directory, pointer, self._count, known)


class FilesSave(OpenSave):
    """Given by `Checkpointer.begin_files`; used on the training thread. Must be sealed or aborted.

    One that is neither keeps its place among the in-flight checkpoints until `timeout`, and then fails.
    """

    def __init__(self, saves: FilesSaves, inflight: InFlight) -> None:
        super().__init__(inflight, saves.pipeline, saves.admission)
        self._saves = saves
        self._names: set[str] = set()
        self._nbytes = 0
        self._pool: StagingPool | None = None
        # Also when the watchdog gives it up: what was added before is given up by then.
        inflight.open_ended = True

    @untraced
    def add(self, name: str, tree: Any, *, eager: Eager = False) -> None:
        """Give this rank's file `name` the contents that `torch.save(tree)` would, views cut to size.

        Returns when everything is copied but tensors of more than `eager_leaf_bytes`: those must not change
        before `Checkpointer.wait_staged()`, which takes `name` as well. A name is added once over all
        ranks that share a root.

        Args:
            name: a plain file name, or a relative path of plain names; no manifest's name.
            tree: whatever `torch.save` takes.
            eager: copy the large tensors too, into memory of their own beside the staging memory; a
                function: those that it says so of. It is given views of them that are detached and, where
                they are one run of memory, flat.

        Raises:
            ConfigError: the name cannot be used or was added before, or something in the tree cannot be
                saved; the save stays open.
            StagingError: staging memory could not be made larger within `timeout`, or there is no memory for
                copies.
        """
        self.add_all({name: tree}, eager=eager)

    @stalling
    def add_all(self, trees: Mapping[str, Any], *, eager: Eager = False) -> None:
        """`add` for each name, or for none; copying begins when all are pickled, and not in its way.

        Raises:
            ConfigError, StagingError: see `add`.
        """
        self._check_open()
        self._check_names(trees)
        skipping = Skipping()
        self._journal.note(lambda error: skipping.end())
        self._journal.pause_collector()
        plans = {name: plan_zip(tree, skipping) for name, tree in trees.items()}
        nbytes = sum(plan.layout.file_bytes for plan in plans.values())
        files: list[_File] = []
        if plans and not self._inflight.failed():
            if self._pool is None:
                self._pool = self._saves.pool_for(nbytes)
            # No other save may have the pool replaced before the stager comes to these files.
            self._inflight.lease(self._pool)
            for name, plan in plans.items():
                files.append(self._file_of(name, trees[name], plan, eager=eager))
        pieces = {file.name: file.pieces() for file in files}
        names = [name for name, found in pieces.items() for _ in found]
        run = partial(self._run_files, files) if files else None
        note = partial(self._note, plans.keys(), self._nbytes + nbytes)
        self._hand_over(Errand(names, [*chain(*pieces.values())], run, note))

    @stalling
    def seal(self) -> SaveHandle:
        """End the checkpoint: it is committed once the files of all ranks are durable.

        Returns at once, or with `blocking` when it is, and raises what failed it then.
        """
        began = time.monotonic()
        self._check_open()
        self._saves.took(self._nbytes, self._names)
        self._hand_over(Errand((), (), self._run_end, self._note_sealed))
        return self._sealed_handle(began)

    # -- training thread -------------------------------------------------------------------------

    def _check_names(self, names: Iterable[str]) -> None:
        known = set(self._names)
        for name in names:
            if not is_file_name(name):
                raise ConfigError(
                    f"add: {name!r} cannot be the name of a file: give a relative path of names of 1 to 200 "
                    f"bytes, none of them hidden or with control characters or blanks at its ends, and no "
                    f"manifest's name (manifest.json, rank-*.json)"
                )
            if name in known:
                raise ConfigError(f"add: {name!r} was added already: each name is added once")
            clash = parents_of([name]) & known or {name} & parents_of(known)
            if clash:
                raise ConfigError(f"add: {min(clash)!r} would be both a file and a directory")
            known.add(name)

    def _file_of(self, name: str, tree: Any, plan: ZipPlan, *, eager: Eager) -> _File:
        """Copy what must be copied now; nothing is queued yet."""
        assert self._pool is not None
        devices = self._pipeline.devices
        live, clones = _split(
            plan, self._pipeline.eager_leaf_bytes, eager, self._pipeline.eager_copies()
        )
        # Order matters: behind the clones.
        behind = devices.queued(devices.of_all(tensor for tensor, _, _ in (*live, *clones)))
        watch = self._pipeline.watch_for(self._inflight)
        if live:
            watch.begin(_Labels(name, tree, live), live)
        return _File(
            name=name,
            nbytes=plan.layout.file_bytes,
            frames=plan.layout.frames,
            live=live,
            clones=clones,
            pool=self._pool,
            watch=watch,
            streams=self._pipeline.streams,
            behind=behind,
            still=self._saves.sharing.of(name, plan.layout),
        )

    def _note(self, names: Iterable[str], nbytes: int) -> None:
        self._names.update(names)
        self._nbytes = nbytes

    # -- stager thread ---------------------------------------------------------------------------

    def _run_files(self, files: list[_File]) -> None:
        while files:
            self._run_file(files.pop(0))

    def _run_file(self, file: _File) -> None:
        if self._inflight.failed():
            return
        images: list[ShardImage] = []
        with guarded(self._inflight, images, file.streams):
            # Not before: a file that is registered and never filled would fail the checkpoint.
            shards, still = self._saves.shards, file.still
            like = None if still is None else still.looks
            sink = shards.open_named(self._inflight, file.name, file.nbytes, like=like)
            if still is not None:
                self._inflight.stills.append((still, sink.shard, {}))
                still.compare(sink.shard)
            image = shards.image(sink, file.pool, (0, sink.shard.request.nbytes))
            images.append(image)
            file.streams.follow(file.behind)
            if file.live:
                snapshot = self._inflight.snapshot
                stage_items(snapshot, image, file.in_order(), file.reading())
            else:
                image.leaves(file.in_order())
            file.streams.settle()
            file.watch.raise_if_changed()
            image.finish()

    def _run_end(self) -> None:
        with guarded(self._inflight, [], self._pipeline.streams):
            if self._inflight.failed():
                raise StagingError(f"step {self.step} was given up")
            self._inflight.snapshot.complete()
            self._inflight.contents = self._saves.contents(self._inflight)
        self._inflight.staging_ended()


@dataclass(frozen=True, slots=True)
class _File:
    """One file on its way to the writers.

    Attributes:
        name: in the directory.
        nbytes: length of the file.
        frames: offset and bytes of what is not tensor data.
        live: tensors that are read behind training.
        clones: the others.
        behind: what the stager's copies wait for, the clones among it.
        still: what may be known of the last one of that name.
    """

    name: str
    nbytes: int
    frames: tuple[tuple[int, bytes], ...]
    live: Sequence[StageItem]
    clones: Sequence[StageItem]
    pool: StagingPool
    watch: LeafWatch
    streams: CopyStreams
    behind: Queued
    still: NamedStill | None

    def pieces(self) -> list[StageItem | None]:
        """What training must wait for, piece by piece; None for memory that nobody else has.

        Frames and clones count too: the barrier opens when the last piece of the file is copied.
        """
        if not self.live:
            return []
        own = [(offset, None) for offset, *_ in self.frames]
        own += [(offset, None) for _, offset, _ in self.clones]
        found = sorted([*own, *((item[1], item) for item in self.live)], key=itemgetter(0))
        return [item for _, item in found]

    def in_order(self) -> list[StageItem]:
        """Every byte of the file, from front to back."""
        frames = [
            (torch.frombuffer(bytearray(data), dtype=torch.uint8), offset, len(data))
            for offset, data in self.frames
        ]
        return sorted([*frames, *self.live, *self.clones], key=lambda item: item[1])

    def reading(self) -> Reading:
        """How its tensors are read."""
        return Reading(self.streams, self.watch, bool(self.behind.events))


def _split(
    plan: ZipPlan, most: int, eager: Eager, copies: EagerCopies
) -> tuple[list[StageItem], list[StageItem]]:
    """The tensors of more than `most` bytes that are not eager, and clones of the others."""
    live: list[StageItem] = []
    clones: list[StageItem] = []
    for tensor, extent in zip(plan.tensors, plan.layout.extents, strict=True):
        now = extent.nbytes <= most or (eager(tensor) if callable(eager) else eager)
        if now:
            clones.append((copies.of(tensor), extent.offset, extent.nbytes))
        else:
            live.append((tensor, extent.offset, extent.nbytes))
    return live, clones


@dataclass(frozen=True, slots=True)
class _Labels:
    """What an error calls the tensors of a file: where they are in the tree, looked up for the error."""

    name: str
    tree: Any
    items: Sequence[StageItem]

    def __iter__(self) -> Iterator[str]:
        paths: dict[int, str] = {}
        # Training may change the containers by now.
        with contextlib.suppress(RuntimeError):
            paths |= {tensor.data_ptr(): path for path, tensor in tensor_paths(self.tree)}
        for tensor, at, _ in self.items:
            yield f"{self.name}: {paths.get(tensor.data_ptr(), f'byte {at}')}"
