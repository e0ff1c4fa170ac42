"""Which attempts a rank has begun: ranks that save different steps would wait for each other for ever."""

from __future__ import annotations

from collections import OrderedDict

from ckpt_core.coordination.heartbeat import Liveness
from ckpt_core.system.threads import own_lock

_REMEMBERED = 1024


class Begun:
    """Attempts that this rank has begun, ended or not. For any number of threads."""

    def __init__(self) -> None:
        self._lock = own_lock()
        self._ended: OrderedDict[str, bool] = OrderedDict()

    def add(self, attempt_id: str) -> None:
        """It begins."""
        with self._lock:
            self._ended[attempt_id] = False
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def ended(self, attempt_id: str) -> None:
        """This rank is through with it."""
        with self._lock:
            if attempt_id in self._ended:
                self._ended[attempt_id] = True

    def under_way(self) -> list[str]:
        """Those that have not ended, all of them: one that is not told counts as not begun."""
        with self._lock:
            return [name for name, ended in self._ended.items() if not ended]

    def unknown(self, attempts: tuple[str, ...]) -> list[str]:
        """Those of another rank that this one has not begun."""
        with self._lock:
            return [name for name in attempts if name not in self._ended]


class Elsewhere:
    """Looks whether another rank is at another step than this attempt's, while this one waits for it.

    Seen in two beats, since ranks reach a step at different times, and one may have begun both.
    """

    def __init__(self, attempt_id: str) -> None:
        self._attempt_id = attempt_id
        self._seen: dict[int, set[str]] = {}

    def attempts_of(self, rank: int, liveness: Liveness, begun: Begun) -> list[str]:
        """What `rank` has under way instead of this one; nothing while this one may still come."""
        beat, attempts = liveness.seen(rank)
        strange = begun.unknown(attempts)
        if not strange or self._attempt_id in attempts:
            self._seen.pop(rank, None)
            return []
        beats = self._seen.setdefault(rank, set())
        beats.add(beat)
        return strange if len(beats) > 1 else []


def step_of(attempt_id: str) -> int:
    """The step that an attempt is at."""
    return int(attempt_id.rpartition("-")[0])
