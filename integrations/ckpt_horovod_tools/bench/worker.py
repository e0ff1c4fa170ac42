"""One rank of the Horovod job: windows of one way after the other, each from scratch, on request.

Launched by `horovodrun` as `python -m ckpt_horovod_tools.bench.worker ROOT ADDRESS`; it calls the parent back
at that address and says its rank. All ranks get the same requests: hello -> check, train. What a window has
written is removed, and dirty pages are written, before the answer goes out and after the clock has stopped.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.bench.contenders.base import missing, release
from ckpt_core.bench.proc import processor_s
from ckpt_core.bench.serving import Answer, raise_descriptor_limit, serve
from ckpt_core.bench.window import Window
from ckpt_horovod_tools.bench.ways import INSTALL

if TYPE_CHECKING:
    from ckpt_horovod_tools.bench.training import Training

_CHECK = Window(every=100, warm_saves=1, lead=2, steps=0)
_CHECKED = 3
_PAST = 2
"""Iterations behind the checked one: the copy must not have taken anything of them."""


class HorovodWorker:
    """One rank."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._windows = 0

    def hello(self) -> Answer:
        """Whether it can run here; joins the other ranks if so."""
        reason = missing("horovod.torch", "ckpt_horovod")
        if reason is not None:
            return {"reason": f"{reason}; {INSTALL}", "version": ""}
        import horovod.torch as hvd

        hvd.init()
        return {"reason": None, "version": release("horovod")}

    def train(self, window: dict[str, int], **way: Any) -> Answer:
        """One window: the time of its iterations, and what its saves took from training."""
        with self._training(Window(**window), **way) as training:
            iteration_s, stalled_s = training.window()
            training.saver.settle()
            worked_s = processor_s(os.getpid()) - training.worked_s
            state = training.state()
            return {
                "processor_s": worked_s,
                "iteration_s": iteration_s,
                "stalled_s": stalled_s,
                "state_bytes": sum(tensor.nbytes for tensor in state.values()),
                "leaves": len(state),
                "remarks": training.saver.remarks(),
            }

    def check(self, **way: Any) -> Answer:
        """Save, train on, destroy the state, restore it: it must be what it was at the save."""
        from ckpt_core.bench import workloads

        with self._training(_CHECK, **way) as training:
            training.iterate(1, _CHECKED)
            live = workloads.digest(training.state())
            training.iterate(_CHECKED + 1, _CHECKED + _PAST)
            training.saver.settle()
            workloads.scramble(training.state())
            training.saver.restore()
            return {"live": live, "saved": workloads.digest(training.state())}

    @contextmanager
    def _training(
        self, window: Window, *, size: dict[str, Any], **settings: Any
    ) -> Iterator[Training]:
        """A training of one way in a directory of its own; nothing of it is left behind.

        After an error nothing is closed: the other ranks may not be there, and all of them are ended.

        Args:
            window: which iterations are saved.
            size: fields of `ModelSize`.
            settings: the other fields of `WaySettings`.
        """
        import horovod.torch as hvd

        from ckpt_horovod_tools.bench.saving import WaySettings
        from ckpt_horovod_tools.bench.training import Training

        gc.collect()  # what the window before had
        self._windows += 1
        root = self._root / f"window-{self._windows}"
        training = Training(size, WaySettings(root=root, window=window, **settings))
        yield training
        training.saver.close()
        hvd.barrier()  # no rank writes any more
        if hvd.rank() == 0:
            shutil.rmtree(root, ignore_errors=True)
            os.sync()


def main(arguments: list[str]) -> None:
    """Entry of the process."""
    root, address = arguments
    raise_descriptor_limit()
    with socket.socket(socket.AF_UNIX) as calling:
        calling.connect(address)
        connection = Connection(calling.detach())
    with connection:
        connection.send_bytes(json.dumps({"rank": int(os.environ["HOROVOD_RANK"])}).encode())
        serve(connection, HorovodWorker(Path(root)))


if __name__ == "__main__":
    main(sys.argv[1:])
