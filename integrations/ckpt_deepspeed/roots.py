"""The Checkpointers of this process: one for each directory that engines save to."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt_core import Checkpointer, CkptError, Options, StoreOptions, TorchStore


@dataclass(slots=True)
class _Root:
    checkpointer: Checkpointer
    group: Any
    count: int = 0


class Roots:
    """Opened at the first save to a directory, and shared by all engines of the process: a directory has one
    writer. Used on the training thread; all ranks open the same directories in the same order.
    """

    def __init__(self) -> None:
        self._all: dict[str, _Root] = {}
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
        self, save_dir: str | os.PathLike[str], options: Options, *, per_node: bool
    ) -> Checkpointer:
        """The Checkpointer of a directory; all ranks call it.

        Args:
            options: for one that is opened now.
            per_node: each node has a directory of its own of this name.

        Raises:
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
            found = _Root(Checkpointer(save_dir, options, coordination=coordination), group)
            self._open[key] = found
        return found.checkpointer

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

    def close(self) -> None:
        """Finish what is in flight, and close all.

        Raises:
            CkptError: a save failed and was not reported yet.
        """
        found = list(self._open.values())
        self._open.clear()
        _all_of(root.checkpointer.close for root in found)

    def forget(self, save_dir: str | os.PathLike[str]) -> None:
        """A directory whose Checkpointer has been closed is opened anew by the next save."""
        self._open.pop(os.path.realpath(save_dir), None)

    def _drop(self, key: str) -> None:
        with contextlib.suppress(CkptError):  # it was logged when it happened
            self._open.pop(key).checkpointer.close()


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


def _store_options(options: Options) -> StoreOptions:
    """A rank that is lost is found out within `timeout` too."""
    usual, timeout_s = StoreOptions(), options.timeout_s
    return StoreOptions(
        dead_after=min(usual.dead_after_s, timeout_s), timeout=min(usual.timeout_s, timeout_s)
    )


def _is_within(path: str, root: str) -> bool:
    """Whether `path` is the root, or a directory in it: readers name the one or the other."""
    return Path(root) in (Path(path), *Path(path).parents)


ROOTS = Roots()
"""Of the process: `ckpt_deepspeed.wait(save_dir)` knows nothing but a directory."""
