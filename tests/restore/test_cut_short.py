"""A process that ends while a thread of it reads: what was not read is not told to be there."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, Options, RestoreError
from ckpt_core.restore import loading, verifying
from ckpt_core.restore.units import READ_BYTES
from ckpt_core.system.files import Buffer
from tests.restore.harness import Cold

COUNT = 9_000_000
READ, UNREAD = 7.0, 2.0
SOON_S = 60.0


class UntilItEnds(Cold):
    """Reads of tensors wait until the process ends."""

    def __init__(self) -> None:
        self.began, self._ends = threading.Event(), threading.Event()

    def ends(self) -> None:
        # A moment later: first the readers are to be told that it does.
        threading.Timer(0.5, self._ends.set).start()

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if sum(map(len, buffers)) >= READ_BYTES:
            self.began.set()
            self._ends.wait(SOON_S)
        return super().preadv(fd, buffers, offset)


def restored(root: Path, files: UntilItEnds) -> bool:
    state = {"w": torch.full((COUNT,), UNREAD)}
    Checkpointer(root, Options(readers=1), files=files).restore(state)
    return bool((state["w"] == READ).all())


def loaded(root: Path, files: UntilItEnds) -> bool:
    return bool((loading.load(root, files=files, readers=1)["w"] == READ).all())


def verified(root: Path, files: UntilItEnds) -> bool:
    return not verifying.verify(root, files=files, readers=1).ok


def reading(act: Callable[[Path, UntilItEnds], bool], root: Path, said: Path) -> None:
    """Returns, and so ends its process, while a thread reads."""
    files = UntilItEnds()
    Finalize(None, files.ends, exitpriority=1)

    def read() -> None:
        try:
            text = "whole" if act(root, files) else "not whole, and told to be"
        except RestoreError as exc:
            text = str(exc)
        said.write_text(text)

    threading.Thread(target=read).start()
    assert files.began.wait(SOON_S)


@pytest.mark.parametrize("act", [restored, loaded, verified], ids=lambda act: act.__name__)
def test_what_a_process_reads_as_it_ends_is_refused(
    tmp_path: Path, act: Callable[[Path, UntilItEnds], bool]
) -> None:
    root, said = tmp_path / "root", tmp_path / "said"
    with Checkpointer(root) as ck:
        ck.save(1, {"w": torch.full((COUNT,), READ)})
    ends = multiprocessing.get_context("spawn").Process(target=reading, args=(act, root, said))
    ends.start()
    ends.join(SOON_S)
    assert ends.exitcode == 0
    assert "was not read to its end: this process ends" in said.read_text()
    assert ckpt_core.verify(root).ok
