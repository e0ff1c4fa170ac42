"""What can be set about a TorchStore."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from ckpt_core.units import parse_timeout

_BEATS = 5
_LONGEST_BEAT_S = 5.0


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Settings of a `TorchStore`; the same on every rank.

    Attributes:
        dead_after: a rank that has shown no sign of life for so long is dead (timedelta or seconds).
            Longer than Python's lock is ever held by one call, such as a compilation.
        timeout: how long to wait for the other ranks when connecting.
        hosted: whether rank 0 keeps the store in its own process. None: unless one listens already.
        kept_by: who keeps the store otherwise, for messages.
        name: tells apart several jobs in one store.
        address: how other machines reach this one, where this process opens a store on a free port;
            None: found out.
    """

    dead_after: timedelta | float = 30.0
    timeout: timedelta | float = timedelta(minutes=5)
    hosted: bool | None = None
    kept_by: str = "rank 0"
    name: str = ""
    address: str | None = None

    def __post_init__(self) -> None:
        for field in ("dead_after", "timeout"):
            object.__setattr__(self, field, parse_timeout(getattr(self, field), field=field))

    @property
    def dead_after_s(self) -> float:
        """`dead_after` in seconds."""
        return parse_timeout(self.dead_after, field="dead_after").total_seconds()

    @property
    def timeout_s(self) -> float:
        """`timeout` in seconds."""
        return parse_timeout(self.timeout, field="timeout").total_seconds()

    @property
    def beat_s(self) -> float:
        """Seconds from one sign of life to the next."""
        return min(self.dead_after_s / _BEATS, _LONGEST_BEAT_S)


def own_address() -> str:
    """An address of this machine that others can be expected to reach."""
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        found = "127.0.0.1"
    if not found.startswith("127."):
        return found
    # Many systems map their own name to loopback. Connecting a datagram socket sends nothing, but
    # chooses the interface that leads outside.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
            return str(sock.getsockname()[0])
        except OSError:
            return found
