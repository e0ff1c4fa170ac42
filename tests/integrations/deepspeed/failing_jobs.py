"""Jobs in which a save fails, a rank raises, or the process ends early. Each function runs in every rank."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import zero_to_fp32

import ckpt_deepspeed
from ckpt_core import CkptError, verify
from ckpt_core.system.files import Files
from ckpt_deepspeed import installing
from ckpt_deepspeed.roots import ROOTS
from tests.crash.layers import hooked
from tests.integrations.deepspeed.crash_jobs import SMALL, SlowFiles, client_of, die, save_by
from tests.integrations.deepspeed.training import engine, train
from tests.interrupts.trap import Trap
from tests.places import some

PATIENT = SMALL | {"timeout": 30.0}


def _raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except (CkptError, AssertionError, KeyboardInterrupt) as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def _left(root: str) -> dict[str, Any]:
    tags = [path for path in Path(root).iterdir() if path.is_dir() and path.name[0] != "."]
    whole = {path.name: verify(path).ok for path in tags}
    return {"whole": whole, "latest": (Path(root) / "latest").read_text()}


def full_disk(root: str) -> dict[str, Any]:
    """The disk is full for the second save; the third one reports it, the fourth one works."""
    filler, rank = Path(root).parent / "filler", dist.get_rank()
    made = engine(2, "bf16", **PATIENT)
    raised = []
    for step in range(1, 5):
        train(made, step - 1, step)
        if step == 2 and rank == 0:
            _fill(filler)
        dist.barrier()
        raised.append(_raised(lambda: made.save_checkpoint(root, client_state=client_of(step))))  # noqa: B023
        _settle(root)
        dist.barrier()
        if step == 3:
            during = _left(root)
            dist.barrier()
            if rank == 0:
                filler.unlink()
            dist.barrier()
    ckpt_deepspeed.close()
    return {"raised": raised, "during": during, "after": _left(root)}


def _fill(filler: Path) -> None:
    with open(filler, "wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
        os.fsync(file.fileno())


class Fault:
    """What becomes of the writes of rank 1 while it is on."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.on = threading.Event()
        self.mended = threading.Event()

    def files(self) -> Files:
        """Files with this fault."""
        return hooked(Files, self._hook, ("pwrite",))

    def _hook(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        if self.on.is_set() and dist.get_rank() == 1:
            if self._kind == "EIO":
                raise OSError(errno.EIO, os.strerror(errno.EIO), "disk")
            if self._kind == "end of the thread":
                raise SystemExit
            self.mended.wait(60)
        return act()


def failing_write(root: str, kind: str, on_error: str) -> dict[str, Any]:
    """The writes of the second save fail, and those of the last one; who is told, and when."""
    fault = Fault(kind)
    save_by(fault.files())
    settings = PATIENT | {"on_error": on_error} | ({"timeout": 12.0} if kind == "hang" else {})
    made = engine(2, "bf16", **settings)
    raised, logged = [], _Log()
    for step in range(1, 6):
        train(made, step - 1, step)
        fault.mended.clear()
        (fault.on.set if step in (2, 5) else fault.on.clear)()
        raised.append(_raised(lambda: made.save_checkpoint(root, client_state=client_of(step))))  # noqa: B023
        _settle(root)
        fault.mended.set()
        dist.barrier()
    began = time.monotonic()
    raised.append(_raised(ckpt_deepspeed.close))
    return {
        "raised": raised,
        "logged": logged.texts,
        "close_s": time.monotonic() - began,
        **_left(root),
    }


def _settle(root: str) -> None:
    """Let the saves end, whatever comes of them, without being told."""
    flights = ROOTS._open[os.path.realpath(root)].checkpointer._engine.flights
    assert flights.wait_empty(deadline=time.monotonic() + 60), "a save hangs"


class _Log(logging.Handler):
    """Errors that were logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        logging.getLogger("ckpt_core").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def lost_rank(root: str) -> dict[str, Any]:
    """Rank 1 dies after its second save has returned; what rank 0 is told, by whom, and how soon."""
    save_by(SlowFiles())
    made = engine(2, "bf16", **SMALL | {"timeout": 12.0})
    for step in (1, 2):
        train(made, step - 1, step)
        made.save_checkpoint(root, client_state=client_of(step))
        if step == 1:
            ckpt_deepspeed.wait(root)
    if dist.get_rank() == 1:
        die()
    raised, began = [], time.monotonic()
    acts = (ckpt_deepspeed.wait, lambda: made.save_checkpoint(root), ckpt_deepspeed.close)
    for act in acts:
        try:
            act()
            raised.append("")
        except Exception as exc:
            raised.append(f"{type(exc).__name__}: {exc}")
    return {"raised": raised, "took_s": time.monotonic() - began, **_left(root)}


class _Odd:
    """Raises when it is pickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        raise self._error


def raising(root: str) -> list[dict[str, Any]]:
    """A rank raises inside save_checkpoint; the ranks mean different tags; what comes of it and after it."""
    made = engine(3, "bf16", **PATIENT)  # every rank pickles what is passed as client_state
    rank, found, step = dist.get_rank(), [], 0
    clients: dict[str, list[Any]] = {
        "unpicklable on rank 0": [threading.Lock(), 0],
        "raises on rank 0": [_Odd(ValueError), 0],
        "interrupted on all": [_Odd(KeyboardInterrupt)] * 2,
        "different tags": [0, 0],
    }
    for name, odd in clients.items():
        raised, tags = [], []
        for turn in range(3):
            step += 1
            train(made, step - 1, step)
            client = client_of(step) | ({"odd": odd[rank]} if turn == 0 else {})
            tag = f"{turn}-{step}" + (
                f"-of-{rank}" if (name, turn) == ("different tags", 0) else ""
            )
            tags.append(tag)
            raised.append(_raised(lambda: made.save_checkpoint(root, tag=tag, client_state=client)))  # noqa: B023
            _settle(root)
            dist.barrier()
        there = [(Path(root) / tag).exists() for tag in tags]
        dist.barrier()
        found.append({"name": name, "raised": raised, "there": there})
    ckpt_deepspeed.close()
    return [*found, _left(root)]


def raising_inside(root: str, zero: int) -> dict[str, Any]:
    """Rank 1 raises in DeepSpeed's own part of its second save; what comes of it and after it."""
    made = engine(zero, "bf16", **PATIENT)
    state_dict, raised = made.optimizer.state_dict, []

    def fails() -> Any:
        raise AssertionError("out of memory")

    for step in range(1, 5):
        train(made, step - 1, step)
        if step == 2 and dist.get_rank() == 1:
            made.optimizer.state_dict = fails
        raised.append(_raised(lambda: made.save_checkpoint(root, client_state=client_of(step))))  # noqa: B023
        made.optimizer.state_dict = state_dict
    ckpt_deepspeed.close()
    return {"raised": raised, **_left(root)}


def loads_after_a_failure(root: str) -> list[str]:
    """A save has failed, and rank 0 knows already: what loads make of it on each rank."""
    fault = Fault("EIO")
    save_by(fault.files())
    made = engine(2, "bf16", **PATIENT)
    raised = []
    for step in (1, 2):
        train(made, step - 1, step)
        (fault.on.set if step == 2 else fault.on.clear)()
        made.save_checkpoint(root, client_state=client_of(step))
        _settle(root)
    if dist.get_rank() == 0:
        raised.append(_raised(ckpt_deepspeed.wait))
    dist.barrier()
    found: list[Any] = []
    raised += [_raised(lambda: found.append(made.load_checkpoint(root))) for _ in range(2)]
    assert [client["step"] for _, client in found] == [1]
    ckpt_deepspeed.close()
    return raised


def reads_after_a_failure(root: str) -> dict[str, Any]:
    """A save has failed, and rank 0 alone reads the tag before: who is told of it, and when."""
    fault = Fault("EIO")
    save_by(fault.files())
    made = engine(2, "bf16", **PATIENT)
    raised, read = [], ""
    for step in range(1, 5):
        train(made, step - 1, step)
        (fault.on.set if step == 2 else fault.on.clear)()
        raised.append(_raised(lambda: made.save_checkpoint(root, client_state=client_of(step))))  # noqa: B023
        _settle(root)
        if step == 2 and dist.get_rank() == 0:
            reader = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
            read = _raised(functools.partial(reader, root))
        dist.barrier()
    raised.append(_raised(ckpt_deepspeed.close))
    return {"raised": raised, "read": read}


def forked(root: str) -> dict[str, Any]:
    """A fork of a rank neither waits for what is in flight nor ends it."""
    fault = Fault("hang")
    save_by(fault.files())
    made = engine(2, "bf16", **PATIENT)
    train(made, 0, 1)
    fault.on.set()
    made.save_checkpoint(root, client_state=client_of(1))
    child = multiprocessing.get_context("fork").Process(target=_wait_and_close)
    child.start()
    child.join(60)
    code, there = child.exitcode, (Path(root) / "latest").exists()
    dist.barrier()
    fault.mended.set()
    ckpt_deepspeed.close()
    return {"code": code, "there": there, **_left(root)}


def _wait_and_close() -> None:
    ckpt_deepspeed.wait()
    ckpt_deepspeed.close()


def unwritable(root: str) -> list[str]:
    """save_dir cannot be made: its parent is a file."""
    made = engine(2, "bf16", **PATIENT)
    train(made, 0, 1)
    place = Path(root)
    if dist.get_rank() == 0:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("in the way")
    dist.barrier()
    return [_raised(lambda: made.save_checkpoint(str(place / "ckpts"))) for _ in range(2)]


def ending(root: str, how: str) -> str:
    """Save three times and leave, without `ckpt_deepspeed.close()` and with saves in flight."""
    save_by(SlowFiles())
    made = engine(2, "bf16", **PATIENT)
    for step in range(1, 4):
        train(made, step - 1, step)
        made.save_checkpoint(root, client_state=client_of(step))
    if how == "engine.destroy":
        made.destroy()
        return (Path(root) / "latest").read_text()
    if how == "os._exit":
        os._exit(0)
    if how == "destroy_process_group":
        dist.destroy_process_group()
    if how == "sys.exit":
        raise SystemExit(3)
    return torch.__version__


def loads_without_threads(root: str) -> list[str]:
    """Rank 1 cannot start a thread to read with; then it can."""
    made = engine(1, "bf16", **PATIENT)
    for step in (1, 2):
        train(made, step - 1, step)
        made.save_checkpoint(root, client_state=client_of(step))
    ckpt_deepspeed.wait()
    dist.barrier()
    start = threading.Thread.start
    if dist.get_rank() == 1:
        threading.Thread.start = _refuse  # type: ignore[method-assign]
    raised = _raised(lambda: made.load_checkpoint(root))
    threading.Thread.start = start  # type: ignore[method-assign]
    path, _ = made.load_checkpoint(root)
    return [raised, Path(path).parent.name]


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def interrupted_loads(root: str) -> dict[str, Any]:
    """Ctrl-C at each instruction of what is around DeepSpeed's own load."""
    made = engine(1, "bf16", **PATIENT)
    train(made, 0, 1)
    made.save_checkpoint(root, client_state=client_of(1))
    ckpt_deepspeed.wait()

    def struck(n: int) -> Trap:
        trap = Trap(n, event="opcode", package=installing.__file__)
        with contextlib.suppress(KeyboardInterrupt):
            trap.run(lambda: made.load_checkpoint(root, tag="global_step1"))
        return trap

    # Python 3.13 tells of instructions from a function's second call on.
    struck(-1)
    count = struck(-1).lines
    left = [n for n in range(count) if struck(n) and installing._LOADED.get() is not None]
    return {"count": count, "left": left}


def interrupted_saves(root: str) -> dict[str, Any]:
    """Ctrl-C at lines of what is around DeepSpeed's own save, and once more while that is cleaned up."""
    ours = str(Path(installing.__file__).parent)
    made = engine(1, "bf16", **PATIENT)
    train(made, 0, 1)
    left: list[str] = []

    def struck(n: int, then: int | None = None) -> Trap:
        trap = Trap(n, package=ours, then=then)
        kept: BaseException | None = None
        try:
            trap.run(lambda: made.save_checkpoint(root, tag="last"))
        except KeyboardInterrupt as exc:
            kept = exc  # as a notebook keeps it, with all that its frames hold
        engine = made.checkpoint_engine
        told = _raised(ckpt_deepspeed.wait)
        if told or engine._tag is not None or engine._saving is not None:
            left.append(f"{trap.struck} then {then}: {told}")
            engine._abort()
        del kept
        return trap

    struck(-1)
    count = struck(-1).lines
    ends = range(count - 30, count)  # where it is sealed
    for n in [*some(range(count - 30), 60, of="a save of DeepSpeed"), *ends]:
        struck(n)
    cleaned = [struck(n, then=-1).lines for n in (count // 2, ends[0])]
    for n, lines in zip((count // 2, ends[0]), cleaned, strict=True):
        for then in range(lines):
            struck(n, then)
    train(made, 1, 2)
    made.save_checkpoint(root, tag="next")
    ckpt_deepspeed.wait()
    path, _ = made.load_checkpoint(root)
    return {"count": count, "cleaned": cleaned, "left": left, "loaded": Path(path).parent.name}
