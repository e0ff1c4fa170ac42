"""`Hosting`: what an agent keeps for other nodes, for as long as it is there itself."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.levels.mailbox import Serve
from ckpt_core.levels.serving.binding import parse_address
from ckpt_core.levels.serving.server import PeerServer
from ckpt_core.levels.tokens import TOKEN_VARIABLE, Keys, read_keys
from ckpt_core.system.files import Files

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0


class Hosting:
    """A server of this process, or none. Used by one thread.

    Args:
        root: of the agent, which others may read where the plan says so.

    Attributes:
        address: where it listens; "" while it does not.
        refused: why it does not, though it is to; "".
    """

    def __init__(self, root: Path, *, files: Files) -> None:
        self._root = root
        self.address = self.refused = ""
        self._files = files
        self._serve: Serve | None = None
        self._keys: Keys | None = None
        self._server: PeerServer | None = None
        self._tried_s = self._began_s = float("-inf")

    def follow(self, serve: Serve | None) -> None:
        """Serve this from now on. Never raises."""
        if serve is not None:
            # The token that this process signs with, too; one that it has inherited may be of an earlier job.
            os.environ[TOKEN_VARIABLE] = serve.token_file
        if self._server is None or not self._goes_on(serve):
            self.close()
            self._serve = serve
            self._open()
        self._serve = serve
        self._show()
        self._began_s = time.monotonic()

    def look(self) -> None:
        """Try again what has failed. Called again and again."""
        if self._server is None and time.monotonic() - self._tried_s >= _AGAIN_S:
            self._open()

    def has_token(self, serve: Serve | None) -> bool:
        """Whether the file has the token that is served by, where one is; not to be told: as if it had."""
        if self._server is None or serve is None:
            return True
        with contextlib.suppress(CkptError):
            return read_keys(serve.token_file) == self._keys
        return True

    def quiet_s(self) -> float:
        """For how long nobody has sent anything; without a server, for ever."""
        if self._server is None:
            return float("inf")
        return time.monotonic() - max(self._server.changed_s, self._began_s)

    def close(self) -> None:
        """Serve nothing any more. Takes seconds. Idempotent."""
        server, self._server = self._server, None
        self._serve, self.address, self.refused = None, "", ""
        if server is not None:
            server.close()

    def _goes_on(self, serve: Serve | None) -> bool:
        """Whether what is served now is what is wanted: for port 0 any port will do."""
        if serve is None or self._serve is None:
            return False
        wanted, port = parse_address(serve.bind), parse_address(self.address).port
        bind = str(dataclasses.replace(wanted, port=wanted.port or port))
        return bind == self.address and dataclasses.replace(serve, bind="", shows="") == (
            dataclasses.replace(self._serve, bind="", shows="")
        )

    def _show(self) -> None:
        if self._server is not None and self._serve is not None:
            self._server.show(self._serve.shows, self._root)

    def _open(self) -> None:
        serve, self._tried_s = self._serve, time.monotonic()
        if serve is None:
            return
        try:
            self._keys = read_keys(serve.token_file)
            bind = parse_address(serve.bind)
            self._server = PeerServer(Path(serve.dir), self._keys, bind, files=self._files)
        except CkptError as exc:
            if not self.refused:
                logger.warning("nothing is kept for other nodes: %s", exc)
            self.refused = str(exc)
            return
        self.address, self.refused = str(self._server.address), ""
        self._show()
        logger.info("%s is kept for other nodes at %s", serve.dir, self.address)
