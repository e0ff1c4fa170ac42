"""What was measured of a run, and where it is kept for the next start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ckpt_core.errors import PersistError
from ckpt_core.system.threads import Worker

_log = logging.getLogger("ckpt_core")

VERSION = 1
_PATIENCE_S = 2.0
"""For storage, once: training waits no longer for one that hangs."""
_TOLERANCE = 1.5
"""By how much iterations may have become faster or slower for old numbers to serve as a start."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured during the first steps and kept up to date; in brackets CheckFreq's letters.

    Attributes:
        iteration_s: one iteration without checkpoint activity (Ti).
        update_s: from the barrier to the question whether to save, which is the optimizer's update (Tw).
        staging_s: from the begin of a save until it was staged, by mode ("device": Tg, "host": Tc).
        persist_s: from the begin of a save to its commit (Ts, with the staging before it).
        save_s: what a save adds to training.
        state_bytes: of this rank (m).
        headroom_bytes: free memory of the device (Mmax - M); None without one.
        mode: the way of staging that was chosen.
    """

    iteration_s: float
    update_s: float
    staging_s: Mapping[str, float]
    persist_s: float
    save_s: float
    state_bytes: int
    headroom_bytes: int | None
    mode: str

    def fits(self, other: Self) -> bool:
        """Whether numbers of an earlier run may stand for this one."""
        ratio = self.iteration_s / other.iteration_s if other.iteration_s > 0 else 0.0
        return self.state_bytes == other.state_bytes and 1 / _TOLERANCE < ratio < _TOLERANCE


class ProfileCache:
    """One small file beside the root, for one machine and one kind of engine. A cache: never an error.

    Args:
        root: directory of the steps; the file is `<root>.profile.json`.
        machine: what the numbers belong to besides the model; JSON.
    """

    def __init__(self, root: Path, machine: Mapping[str, Any]) -> None:
        self.path = root.with_name(f"{root.name}.profile.json")
        self._machine = dict(machine)
        self._worker: Worker | None = None

    def read(self) -> Profile | None:
        """The profile of this machine; None if there is none, or it cannot be read soon."""
        found: list[Profile | None] = []
        self._behind(lambda: found.append(self._read()))
        return found[0] if found else None

    def write(self, profile: Profile) -> None:
        """Keep a profile; one that cannot be written is logged, and none is while an earlier one hangs."""
        self._behind(lambda: self._write(profile))

    def _behind(self, act: Callable[[], None]) -> None:
        """Called on the training thread; `act` is left behind if storage hangs."""
        if self._worker is not None and not self._worker.join(deadline=time.monotonic()):
            return
        worker = Worker(act, name="ckpt-profile")
        with contextlib.suppress(PersistError):
            worker.start()
            self._worker = worker
            worker.join(deadline=time.monotonic() + _PATIENCE_S)

    def _read(self) -> Profile | None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["version"] != VERSION or found["machine"] != self._machine:
                return None
            return _checked(Profile(**found["profile"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, profile: Profile) -> None:
        found = {
            "version": VERSION,
            "machine": self._machine,
            "profile": dataclasses.asdict(profile),
        }
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        except OSError as exc:
            _log.debug("the profile %s was not kept: %s", self.path, exc)
            with contextlib.suppress(OSError):
                temporary.unlink()

    def forget(self) -> None:
        """The numbers are no good."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def _checked(profile: Profile) -> Profile:
    """ValueError for numbers that cannot be."""
    numbers = (profile.iteration_s, profile.persist_s, profile.save_s, profile.update_s)
    if not all(0 <= number < 1e9 for number in numbers) or profile.iteration_s == 0:
        raise ValueError("no seconds")
    return profile
