"""What Google's storage does otherwise than S3, as its XML interface is documented: on our own server.

No server of others that speaks this interface comes from PyPI or npm. So this shows that our requests are
the documented ones, and what we make of the documented answers; not that Google does as it says.
"""

from __future__ import annotations

import itertools
import json

from tests.levels.servers.faulty import BUCKET, SECRET, FaultServer, Reply, Request


class GoogleServer(FaultServer):
    """Conditions are of generations, and what is not there cannot be deleted."""

    def __init__(self) -> None:
        self._generations: dict[str, int] = {}
        self._next = itertools.count(1000)
        super().__init__()

    def url(self, prefix: str = "run") -> str:
        return f"gs://{BUCKET}/{prefix}"

    def environ(self) -> dict[str, str]:
        key = {
            "client_email": "",
            "private_key": SECRET,
            "private_key_id": "",
            "disable_oauth": True,
        }
        return {
            "GOOGLE_BASE_URL": f"http://127.0.0.1:{self.port}",
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key),
        }

    def _put(self, request: Request) -> Reply:
        wanted = request.headers.get("x-goog-if-generation-match")
        there = self._generations[request.key] if request.key in self.objects else 0
        if self.conditions and wanted is not None and int(wanted) != there:
            return Reply(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        return super()._put(request)

    def _keep(self, key: str, data: bytes) -> Reply:
        reply = super()._keep(key, data)
        self._generations[key] = next(self._next)
        reply.headers["x-goog-generation"] = str(self._generations[key])
        return reply

    def _get(self, request: Request) -> Reply:
        reply = super()._get(request)
        if request.key in self.objects:
            reply.headers["x-goog-generation"] = str(self._generations[request.key])
        return reply

    def _delete(self, request: Request) -> Reply:
        if "uploadId" not in request.query and request.key not in self.objects:
            return Reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        return super()._delete(request)
