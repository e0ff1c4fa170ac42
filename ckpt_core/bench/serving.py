"""The worker's side of every suite: one main for all measured processes, which obey the parent.

Started as `python -m ckpt_core.bench.serving MODULE:CLASS NAME ROOT FD`; makes `CLASS(NAME, ROOT)` and
answers requests over the inherited connection FD until the parent closes that. Every public method of the
class but `close` is a request: it takes and returns plain values.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


def serve(connection: Connection, worker: object) -> None:
    """Answer requests, each by the method of that name, until the parent closes the connection."""
    imported = False
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            gc.freeze()  # the end of the process would look through everything once more
            return
        operation = request.pop("op")
        assert not operation.startswith("_") and operation != "close", "no request has such a name"
        try:
            answer = getattr(worker, operation)(**request)
        except Exception as exc:
            traceback.print_exc()
            answer = {"error": f"{type(exc).__name__}: {exc} (in {_place(exc)})"}
        connection.send_bytes(json.dumps(answer).encode())
        if not imported:
            imported = True
            gc.freeze()  # a million objects that no collection before a window need look through again


def _place(error: Exception) -> str:
    """File and line that raised it; the log that has the rest is removed with the run."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def raise_descriptor_limit() -> None:
    """Shared memory costs a descriptor for each tensor: more than the usual limit for many leaves."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: list[str]) -> None:
    """Entry of the process. A worker that has `close` is closed at the end, whatever happened."""
    place, name, root, descriptor = arguments
    raise_descriptor_limit()
    module, _, attribute = place.partition(":")
    worker = getattr(import_module(module), attribute)(name, Path(root))
    try:
        with Connection(int(descriptor)) as connection:
            serve(connection, worker)
    finally:
        if hasattr(worker, "close"):
            worker.close()


if __name__ == "__main__":
    main(sys.argv[1:])
