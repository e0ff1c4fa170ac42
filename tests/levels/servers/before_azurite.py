"""Azurite behind a server of our own, which fails on demand and hands on what it does not refuse."""

from __future__ import annotations

import http.client

from tests.levels.servers.azurite import ACCOUNT, AzuriteServer
from tests.levels.servers.faulty import FaultServer, Reply, Request


class BeforeAzurite(FaultServer):
    """See `FaultServer`; its objects are kept by an Azurite that others use, too, below another prefix."""

    def __init__(self, azurite: AzuriteServer, place: str) -> None:
        self._azurite, self._place = azurite, place
        super().__init__()

    def url(self, prefix: str = "run") -> str:
        return self._azurite.url(f"{self._place}/{prefix}")

    def environ(self) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        return {**self._azurite.environ(), "AZURE_STORAGE_ENDPOINT": endpoint}

    def _do(self, request: Request) -> Reply:
        return handed_on(request, self._azurite.port)


def handed_on(request: Request, port: int) -> Reply:
    """What the server on another port answers."""
    there = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        there.request(request.method, request.target, request.body, request.headers)
        answer = there.getresponse()
        body = answer.read()
    finally:
        there.close()
    hops = ("connection", "keep-alive", "transfer-encoding", "date")
    headers = {name: text for name, text in answer.getheaders() if name.lower() not in hops}
    return Reply(answer.status, body, headers)
