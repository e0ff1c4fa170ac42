"""Where a store of the ranks listens."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from ckpt_core.errors import ConfigError
from ckpt_core.units import plain_int


@dataclass(frozen=True, slots=True)
class Address:
    """Where the store listens, and who keeps it alive.

    Attributes:
        host: name or address, as the ranks reach it.
        port: TCP port.
        kept_by: for messages, such as "rank 0".
    """

    host: str
    port: int
    kept_by: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}, kept by {self.kept_by}"


def checked_port(port: object, field: str) -> int:
    """What may be a port, as a plain int; 0 is none that others know, which callers look at.

    Raises:
        ConfigError: it is none.
    """
    number = plain_int(port)
    if number is None or not 0 <= number < 2**16:
        raise ConfigError(f"{field}={port!r} is no TCP port: give 1 to 65535")
    return number


def listens(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=max(timeout_s, 0.01)) as found:
            # Asking again and again for a port of this machine that nobody listens at, a socket may be
            # given that very port, and connects to itself.
            return bool(found.getsockname() != found.getpeername())
    except OSError:
        return False
