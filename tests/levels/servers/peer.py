"""A peer: `ckpt-core serve` over a directory, a process of its own on loopback, with a token of its own."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.levels.servers.spoken import SpokenServer

TOKEN = "tOken+that/no_text_may_hold_0123456789"


class PeerServer(SpokenServer):
    """See `SpokenServer`.

    Args:
        home: where its directory and its token lie; None: a new place, which goes with it.
        program: what serves, before the directory, the address and the token's file.

    Attributes:
        kept: its directory.
        token: the token's file.
    """

    def __init__(self, home: Path | None = None, program: tuple[str, ...] = ()) -> None:
        self._temporary = home is None
        self.home = home or Path(tempfile.mkdtemp(prefix="ckpt-peer-"))
        self.kept, self.token = self.home / "kept", self.home / "token"
        if not self.token.exists():
            self.token.touch(mode=0o600)
            self.token.write_text(TOKEN)
        serve = program or ("-m", "ckpt_core", "serve")
        where = [str(self.kept), "--bind", "127.0.0.1:0", "--token-file", str(self.token)]
        super().__init__([sys.executable, *serve, *where], os.environ, says="at ")

    def url(self, prefix: str = "run") -> str:
        """A level here."""
        return f"peer://127.0.0.1:{self.port}/{prefix}"

    def environ(self) -> dict[str, str]:
        """What a client has to find in its environment."""
        return {"CKPT_PEER_TOKEN_FILE": str(self.token)}

    def close(self) -> None:
        """End it."""
        super().close()
        if self._temporary:
            shutil.rmtree(self.home, ignore_errors=True)
