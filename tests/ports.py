"""A port for servers that are given their port and cannot be asked for it."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of this machine that the system gives to nobody else for a minute.

    It stays behind in TIME_WAIT: a server, which asks for SO_REUSEADDR, may listen there, and nobody who
    takes any port gets it meanwhile, as could happen with one that was only free a moment ago.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # first, so that the one who waits is on the server's side
    return port
