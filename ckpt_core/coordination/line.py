"""The socket below a client of a store, which torch keeps to itself: cut, it ends a call that waits on it."""

from __future__ import annotations

import contextlib
import os
import socket

_DESCRIPTORS = "/proc/self/fd"


def open_sockets() -> dict[str, int]:
    """The sockets of this process, by the system's name for each; empty where the system does not tell."""
    found = {}
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir(_DESCRIPTORS)):
            name = _name_of(number)
            if name.startswith("socket:"):
                found[name] = number
    return found


def opened_since(before: dict[str, int], port: int) -> socket.socket | None:
    """The one socket to that port that is new; None if there are more, or none is found.

    Returns:
        A descriptor of its own, for the caller to close: the number of torch's may be given out again.
    """
    # Danger: with a default timeout, Python makes a socket that others read from a non-blocking one.
    if socket.getdefaulttimeout() is not None:
        return None
    new = [(name, number) for name, number in open_sockets().items() if name not in before]
    found = [line for name, number in new if (line := _line(name, number, port)) is not None]
    if len(found) == 1:
        return found[0]
    for line in found:
        line.close()
    return None


def cut(line: socket.socket | None) -> None:
    """End it for everyone who uses it; nothing if it has been closed."""
    if line is not None:
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)


def _line(name: str, number: int, port: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        mine = os.dup(number)
        if _name_of(mine) != name:  # closed meanwhile, and the number given out again
            os.close(mine)
            return None
        line = socket.socket(fileno=mine)
        if line.family in (socket.AF_INET, socket.AF_INET6) and _port_behind(line) == port:
            return line
        line.close()
    return None


def _name_of(number: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"{_DESCRIPTORS}/{number}")
    return ""


def _port_behind(line: socket.socket) -> int | None:
    with contextlib.suppress(OSError):
        return int(line.getpeername()[1])
    return None
