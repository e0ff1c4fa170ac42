"""A stand-in for training: a state of a given size, iterations of a given length, and the real engine."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ckpt_core.checkpointer import Checkpointer
from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.observe import Event, EventName
from ckpt_core.options import Options
from ckpt_core.policy import tuning
from ckpt_core.system.devices import Devices
from ckpt_core.tune.driver import Driver, Turn
from ckpt_core.tune.settings import StandIn, TuneSettings

_MATRIX = 384
_CALIBRATION_S = 0.2
_SHORT, _COLUMNS = 1024, 256

State = dict[str, torch.Tensor]


class Training(Driver):
    """Holds the state. All turns share one root, so that files of earlier turns are recycled."""

    def __init__(self, folder: Path, settings: TuneSettings) -> None:
        """Allocate the state.

        Raises:
            ConfigError: the device cannot be used.
        """
        assert settings.model_bytes is not None and settings.iteration_s is not None
        self._folder = folder
        self._timeout_s = settings.timeout_s
        state = _state(settings.model_bytes, settings.leaves)
        try:
            self._state = {name: tensor.to(settings.device) for name, tensor in state.items()}
        except (RuntimeError, AssertionError) as exc:
            raise ConfigError(f"device={settings.device!r} cannot be used: {exc}") from exc
        self._work = _work(settings.stand_in, settings.iteration_s, settings.device)
        self._step = 0

    @property
    def nbytes(self) -> int:
        """Of the state."""
        return sum(tensor.nbytes for tensor in self._state.values())

    def run(self, turn: Turn) -> tuning.Trace:
        """A loop as a user would write it."""
        options = _options(turn, self._timeout_s)
        events: deque[Event] = deque()
        with _settled(Checkpointer(self._folder, options)) as checkpointer:
            checkpointer.events.subscribe(events.append)
            checkpointer.prepare(self._state)
            moments = self._train(checkpointer, turn, events)
            # What ends after the turn ends with less company.
            told = tuple(events)
        # What a turn leaves in the page cache must not be written in the next one's time.
        os.sync()
        saves = [(e.time_s - e.seconds, e.time_s) for e in told if e.name is EventName.COMMITTED]
        return tuning.Trace(tuple(saves), tuning.iterations_of(moments, ()), self.nbytes)

    def _train(self, checkpointer: Checkpointer, turn: Turn, events: deque[Event]) -> list[float]:
        """Train until the turn is over; the moments of the barriers."""
        moments: list[float] = []
        while not _is_over(turn, events, len(moments) - 1):
            self._work()
            checkpointer.wait_staged()
            moments.append(time.monotonic())
            self._step += 1
            _mark(self._state, self._step)
            if turn.every and (len(moments) - 1) % turn.every == 0:
                checkpointer.save(self._step, self._state)
        return moments

    def close(self) -> None:
        """Free the state."""
        self._state = {}


def _state(nbytes: int, leaves: int) -> State:
    """About so many bytes in float32: three quarters matrices of one size, one quarter vectors."""
    vectors = leaves // 4
    matrices = leaves - vectors
    rows = max(1, (nbytes - 4 * _SHORT * vectors) // matrices // (4 * _COLUMNS))
    shapes: list[tuple[int, ...]] = [(rows, _COLUMNS)] * matrices + [(_SHORT,)] * vectors
    return {f"block{index:05d}.weight": torch.rand(shape) for index, shape in enumerate(shapes)}


def _mark(state: State, step: int) -> None:
    """Make the state of one step differ from that of any other."""
    for tensor in (next(iter(state.values())), next(reversed(state.values()))):
        tensor.view(-1)[0] = step


@contextlib.contextmanager
def _settled(checkpointer: Checkpointer) -> Iterator[Checkpointer]:
    """Closed in the end, with nothing under way any more even if Ctrl-C ends the closing."""
    try:
        with checkpointer:
            yield checkpointer
    except BaseException:
        # Else a save would be published into a directory that is being removed.
        with contextlib.suppress(CkptError):
            checkpointer.wait()
        raise


def _options(turn: Turn, timeout_s: float) -> Options:
    chosen = turn.candidate
    assert chosen is not None
    return Options(
        in_flight=chosen.in_flight,
        writers=chosen.writers,
        chunk_bytes=chosen.chunk_bytes,
        staging_bytes=chosen.staging_bytes,
        direct_io=chosen.direct_io,
        # One kept step is enough: what is measured does not depend on how many there are.
        keep_last=1,
        timeout=timeout_s,
    )


def _is_over(turn: Turn, events: deque[Event], iterations: int) -> bool:
    if turn.saves:
        return sum(e.name is EventName.COMMITTED for e in tuple(events)) >= turn.saves
    return iterations >= turn.iterations


def _work(stand_in: StandIn, iteration_s: float, device: str) -> Callable[[], None]:
    """One iteration: asleep, or multiplying matrices for as long as nothing disturbs it."""
    if stand_in is StandIn.IDLE:
        return lambda: time.sleep(iteration_s)
    matrix, devices = torch.rand(_MATRIX, _MATRIX, device=device), Devices()

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)
        devices.queued(devices.of_all([matrix])).wait()

    multiply(10)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < _CALIBRATION_S:
        multiply(10)
        done += 10
    each_s = (time.perf_counter() - began) / done
    times = max(1, round(iteration_s / each_s))
    return lambda: multiply(times)
