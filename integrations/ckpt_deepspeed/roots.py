"""The Checkpointers of this process: one for each directory that engines save to."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt_core import (
    Checkpointer,
    CkptError,
    ConfigError,
    Options,
    SaveHandle,
    StoreOptions,
    TorchStore,
)

_USUALLY_OPEN, _MOST_OPEN = 2, 8
_TRAINERS = re.compile(r"checkpoint-\d+")


@dataclass(slots=True)
class _Root:
    checkpointer: Checkpointer
    group: Any
    options: Options
    stays: bool
    is_back: bool
    saves: list[Future[Path]] = field(default_factory=list)


class Roots:
    """Opened at the first save to a directory, and shared by all engines of the process: a directory has one
    writer. Used on the training thread; all ranks open the same directories in the same order.
    """

    def __init__(self) -> None:
        self._all: dict[str, _Root] = {}
        self._trimmed: list[str] = []
        self._inherited: list[object] = []
        self._pid = os.getpid()

    @property
    def _open(self) -> dict[str, _Root]:
        # A fork can neither write there nor wait for threads that it has not got. They are kept: the end of
        # a store would wait for its thread.
        if self._pid != os.getpid():
            self._inherited.append(self._all)
            self._all, self._pid = {}, os.getpid()
        return self._all

    def of(
        self,
        save_dir: str | os.PathLike[str],
        options: Options,
        *,
        per_node: bool,
        stays: bool = False,
    ) -> Checkpointer:
        """The Checkpointer of a directory; all ranks call it.

        Args:
            options: of this directory.
            per_node: each node has a directory of its own of this name.
            stays: `trim` leaves it open: the caller holds it.

        Raises:
            ConfigError: it is open with other options.
            CkptError: it cannot be opened on some rank.
        """
        key = os.path.realpath(save_dir)
        group = dist.group.WORLD if dist.is_initialized() else None
        found = self._open.get(key)
        if found is not None and found.group is not group:
            # Another process group is another job, as far as votes are concerned.
            self._drop(key)
            found = None
        if found is None:
            coordination = None
            if group is not None and dist.get_world_size() > 1:
                node = socket.gethostname() if per_node else None
                coordination = TorchStore.from_process_group(
                    node=node, options=_store_options(options)
                )
            made = Checkpointer(save_dir, options, coordination=coordination)
            found = _Root(made, group, options, stays, is_back=key in self._trimmed)
        else:
            _check_same(found.options, options, key)
        # The one that was used last is the last. In one assignment: an interrupt leaves all of them known.
        others = {name: root for name, root in self._open.items() if name != key}
        self._all = others | {key: found}
        return found.checkpointer

    def trim(self, save_dir: str | os.PathLike[str], *, moves: bool = False) -> None:
        """Close directories that nobody has saved to for long, before `save_dir` is opened: each has threads
        and staging memory of its own. One that was closed and comes back is saved to by turns with others:
        it gets a place beside them, unless its name is Trainer's, which deletes it. All ranks call it, and
        know no more than what was saved where; waits for their saves.

        Args:
            moves: the engine saved elsewhere before. If `save_dir` is open and no tag is left in it, as where
                it was deleted, it is closed too, and so opened as a new one is.

        Raises:
            CkptError: one of these failed and was not reported yet.
        """
        key = os.path.realpath(save_dir)
        if self.has(key) and not (moves and self._is_emptied(key)):
            return
        passing = [name for name, root in self._open.items() if name != key and not root.stays]
        back = sum(self._open[name].is_back for name in passing) + (key in self._trimmed)
        going = passing[: 1 - min(_USUALLY_OPEN + back, _MOST_OPEN)]
        # Of all names those of a run with a directory for each save would become many.
        kept = [*self._trimmed, *(name for name in going if not is_trainers(name))]
        self._trimmed = kept[-_MOST_OPEN:]
        going += [key] * self.has(key)
        _all_of(partial(self._close, name) for name in going)

    def saved(self, save_dir: str | os.PathLike[str], handle: SaveHandle) -> None:
        """Note a save, for `wait_ended`."""
        root = self._open[os.path.realpath(save_dir)]
        root.saves = [*(one for one in root.saves if not one.done()), handle.committed]

    def has(self, save_dir: str | os.PathLike[str]) -> bool:
        """Whether this process has a directory open for writing; the same on all ranks."""
        return os.path.realpath(save_dir) in self._open

    def wait_staged(self) -> None:
        """Return when parameters may change."""
        for root in self._open.values():
            root.checkpointer.wait_staged()

    def wait(self, save_dir: str | os.PathLike[str] | None = None) -> None:
        """Return when nothing is in flight for this directory; None: for none.

        Raises:
            CkptError: a save failed and was not reported yet.
        """
        wanted = None if save_dir is None else os.path.realpath(save_dir)
        _all_of(
            root.checkpointer.wait
            for key, root in self._open.items()
            if wanted is None or _is_within(wanted, key)
        )

    def wait_ended(self, path: str | os.PathLike[str] | None = None) -> None:
        """As `wait`, for one rank alone: a save that failed is still to be told, on all of them.

        Args:
            path: wait for saves to this directory, or to one that it lies in.
        """
        wanted = None if path is None else os.path.realpath(path)
        for key, root in list(self._open.items()):
            if wanted is None or _is_within(wanted, key):
                wait_for(root.saves)

    def close(self) -> None:
        """Finish what is in flight, and close all. Interrupted, it can be called again.

        Raises:
            CkptError: a save failed and was not reported yet.
        """
        _all_of(partial(self._close, key) for key in list(self._open))

    def forget(self, save_dir: str | os.PathLike[str]) -> None:
        """A directory whose Checkpointer has been closed is opened anew by the next save."""
        self._open.pop(os.path.realpath(save_dir), None)

    def _is_emptied(self, key: str) -> bool:
        """Whether an open directory holds no tag any more, for some rank: each node may have its own."""
        if self._open[key].stays:
            return False
        found = [True]
        with contextlib.suppress(OSError):  # the other ranks are in the collective
            found = [not any(Path(key).glob("[!.]*/manifest.json"))]
        if dist.is_initialized() and dist.get_world_size() > 1:
            mine, found = found[0], [True] * dist.get_world_size()
            dist.all_gather_object(found, mine)
        return any(found)

    def _drop(self, key: str) -> None:
        with contextlib.suppress(CkptError):  # it was logged when it happened
            self._close(key)

    def _close(self, key: str) -> None:
        # Interrupted, it stays known: the next call closes it.
        try:
            self._open[key].checkpointer.close()
        except Exception:
            del self._open[key]
            raise
        del self._open[key]


def _all_of(acts: Iterable[Callable[[], None]]) -> None:
    """Do all of them, whatever some raise; then raise the first error, with a note of the others."""
    errors = []
    for act in acts:
        try:
            act()
        except CkptError as exc:
            errors.append(exc)
    for other in errors[1:]:
        errors[0].add_note(f"Then also: {other}")
    if errors:
        raise errors[0]


def _check_same(known: Options, asked: Options, key: str) -> None:
    for one in fields(Options):
        first, second = getattr(known, one.name), getattr(asked, one.name)
        if first != second:
            raise ConfigError(
                f"checkpoint_engine.{one.name}={second!r}: {key} is open with {first!r}, for another engine "
                f"of this process; give both the same settings, or another save_dir to one of them"
            )


def _store_options(options: Options) -> StoreOptions:
    """A rank that is lost is found out within `timeout` too."""
    usual, timeout_s = StoreOptions(), options.timeout_s
    return StoreOptions(
        dead_after=min(usual.dead_after_s, timeout_s), timeout=min(usual.timeout_s, timeout_s)
    )


def is_trainers(save_dir: str) -> bool:
    """Whether a directory is called as Trainer calls one that it makes for each save."""
    return _TRAINERS.fullmatch(os.path.basename(save_dir)) is not None


def _is_within(path: str, root: str) -> bool:
    """Whether `path` is the root, or a directory in it: readers name the one or the other."""
    return Path(root) in (Path(path), *Path(path).parents)


ROOTS = Roots()
"""Of the process: `ckpt_deepspeed.wait(save_dir)` knows nothing but a directory."""
