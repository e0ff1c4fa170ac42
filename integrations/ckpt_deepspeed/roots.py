"""The Checkpointers of this process: one for each directory that engines save to."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt_core import Checkpointer, CkptError, Options, TorchStore


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
        self._open: dict[str, _Root] = {}

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
                coordination = TorchStore.from_process_group(node=node)
            found = _Root(Checkpointer(save_dir, options, coordination=coordination), group)
            self._open[key] = found
        return found.checkpointer

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
        for key, root in self._open.items():
            if wanted is None or _is_within(wanted, key):
                root.checkpointer.wait()

    def close(self) -> None:
        """Finish what is in flight, and close all.

        Raises:
            CkptError: a save failed and was not reported yet.
        """
        while self._open:
            self._open.popitem()[1].checkpointer.close()

    def _drop(self, key: str) -> None:
        with contextlib.suppress(CkptError):  # it was logged when it happened
            self._open.pop(key).checkpointer.close()


def _is_within(path: str, root: str) -> bool:
    """Whether `path` is the root, or a directory in it: readers name the one or the other."""
    return Path(root) in (Path(path), *Path(path).parents)


ROOTS = Roots()
"""Of the process: `ckpt_deepspeed.wait(save_dir)` knows nothing but a directory."""
