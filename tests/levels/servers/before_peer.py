"""A peer behind a server of our own, which fails on demand and hands on what it does not refuse."""

from __future__ import annotations

from tests.levels.servers.before_azurite import handed_on
from tests.levels.servers.faulty import FaultServer, Reply, Request
from tests.levels.servers.peer import PeerServer


class BeforePeer(FaultServer):
    """See `FaultServer`; its objects are kept by a peer that others use, too, below another prefix.

    Attributes:
        peer: may be another one from some moment on.
    """

    def __init__(self, peer: PeerServer, place: str) -> None:
        self.peer, self._place = peer, place
        super().__init__()

    def url(self, prefix: str = "run") -> str:
        return f"peer://127.0.0.1:{self.port}/{self._place}/{prefix}"

    def environ(self) -> dict[str, str]:
        return self.peer.environ()

    def _do(self, request: Request) -> Reply:
        return handed_on(request, self.peer.port)
