"""`serve`: a directory of this node, as a level of other nodes."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt_core.cli.agent import spoken
from ckpt_core.cli.places import directory_of
from ckpt_core.cli.text import say
from ckpt_core.errors import ConfigError
from ckpt_core.levels import ALL, TOKEN_VARIABLE, Address, PeerServer, parse_address, read_keys
from ckpt_core.system.interrupts import stopped_by_signals

if TYPE_CHECKING:
    from ckpt_core.cli.requests import ServeRequest

_NICE = 10
"""As an agent: whoever trains on this node comes first."""


def serve_directory(request: ServeRequest) -> bool:
    """Serve until SIGTERM or Ctrl-C; say first what the other nodes are to be told.

    Raises:
        ConfigError: the address, the token's file or the directory cannot be used.
        RootBusy: another server, or a job, has the directory.
    """
    if not request.bind:
        raise ConfigError("say where to listen: --bind 10.0.0.5:7070, an address of this machine")
    if not request.token_file:
        raise ConfigError("say which file has the token that the nodes share: --token-file FILE")
    folder = directory_of(request.folder, command="ckpt-core serve")
    keys, address = read_keys(request.token_file), parse_address(request.bind)
    with suppress(OSError):
        os.nice(_NICE)
    stop = stopped_by_signals()
    with spoken(), PeerServer(folder, keys, address) as server:
        for line in _told(folder, server.address, request.token_file):
            say(line)
        sys.stdout.flush()
        stop.wait()
    say(f"{os.fspath(folder)} is not served any more")
    return True


def _told(folder: os.PathLike[str], address: Address, token_file: str) -> list[str]:
    name = shlex.quote(os.path.abspath(token_file))
    if address.host == ALL:
        address = Address(socket.gethostname(), address.port)
    return [
        f"serving {os.fspath(folder)} at http://{address}, until Ctrl-C or SIGTERM",
        "on the other nodes, with a copy of the token's file there:",
        f"  export {TOKEN_VARIABLE}={name}",
        f'  Checkpointer(root, levels=[Level("peer://{address}/run")])',
    ]
