"""The log that keeps the newest events and passes each on."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from ckpt_core.errors import PersistError
from ckpt_core.observe.event import Event, EventName
from ckpt_core.observe.timeline import timeline
from ckpt_core.system.replacing import replaced
from ckpt_core.system.threads import is_harmless, own_lock

logger = logging.getLogger(__name__)

CAPACITY = 10_000


class EventLog:
    """The newest events of a run. Thread-safe."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Keep `capacity` events; older ones are forgotten, their number is not."""
        self._events: deque[Event] = deque(maxlen=capacity)
        self._subscribers: list[_Subscriber] = []
        self._mutex = own_lock()
        self.emitted = 0

    def emit(self, event: Event) -> None:
        """Keep an event and pass it on, in the calling thread. Never raises.

        A subscriber that fails is called again for later events; its first error is logged.
        """
        with self._mutex:
            self._events.append(event)
            self.emitted += 1
            subscribers = tuple(self._subscribers)
        for subscriber in subscribers:
            if not subscriber.only or event.name in subscriber.only:
                subscriber.call(event)

    def tell(
        self,
        name: EventName,
        step: int | None = None,
        *,
        attempt: str | None = None,
        seconds: float = 0.0,
        nbytes: int = 0,
        detail: str = "",
    ) -> None:
        """Emit an event that has happened now; the arguments are the attributes of `Event`."""
        now = time.monotonic()
        self.emit(Event(name, now, step, attempt, seconds, nbytes, detail))

    def subscribe(
        self, callback: Callable[[Event], object], *, only: Collection[EventName] = ()
    ) -> Callable[[], None]:
        """Pass every later event to `callback`, from whichever thread emits it, until undone.

        Args:
            only: those of these names; all where none is given.

        Returns:
            A function that undoes it; calling it twice does no harm.
        """
        subscriber = _Subscriber(callback, only)
        with self._mutex:
            self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            with self._mutex:
                self._subscribers = [kept for kept in self._subscribers if kept is not subscriber]

        return unsubscribe

    def events(self) -> tuple[Event, ...]:
        """The events that are kept, in the order of emission."""
        with self._mutex:
            return tuple(self._events)

    def write_timeline(self, path: str | Path) -> None:
        """Write the kept events as a Chrome trace, for Perfetto or chrome://tracing.

        Raises:
            PersistError: the file cannot be written.
        """
        try:
            with replaced(Path(path)) as file:
                file.write_text(json.dumps(timeline(self.events())), encoding="utf-8")
        except OSError as exc:
            text = f"could not write the timeline {path}: {exc.strerror}; name another file"
            raise PersistError(text, path=path) from exc


class _Subscriber:
    def __init__(self, callback: Callable[[Event], object], only: Collection[EventName]) -> None:
        self.only = only
        self._callback = callback
        self._failed = False

    def call(self, event: Event) -> None:
        try:
            self._callback(event)
        except BaseException as exc:
            if not is_harmless(exc):
                raise
            if not self._failed:
                self._failed = True
                logger.exception("an event subscriber failed; later errors of it are not logged")
