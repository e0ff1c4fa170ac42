"""An object store on loopback that costs little: S3's subset that clients of checkpoints speak.

Nothing is signed, checked or durable. What is given is kept in memory, in buffers that are used again, since
fresh memory would cost more than the transfer.
"""

from __future__ import annotations

import html
import os
import re
import socket
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from email.utils import formatdate
from itertools import count
from pathlib import Path
from types import MappingProxyType
from xml.sax.saxutils import escape

from ckpt_core.bench.serving import Answer

_LEAST_KEPT = 1 << 20

Pieces = list[memoryview]


class Sink:
    """The process of the server; see `ckpt_core.bench.serving`."""

    def __init__(self, name: str, root: Path) -> None:
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Connection)
        self._server.daemon_threads = True
        self._server.store = _Store()  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def start(self) -> Answer:
        """The port that it listens on."""
        return {"port": self._server.server_address[1]}

    def pin(self, cpus: Sequence[int]) -> Answer:
        """Keep to these processors."""
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), cpus)
        return {}

    def stop(self) -> Answer:
        """No more connections."""
        self._server.shutdown()
        self._server.server_close()
        return {}


class _Store:
    """Objects and uploads. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers = count(1)
        self.objects: dict[str, tuple[Pieces, str]] = {}
        self.uploads: dict[str, dict[int, Pieces]] = {}
        self._spare: dict[int, list[bytearray]] = {}

    def buffer(self, size: int) -> memoryview:
        """Memory for a body."""
        with self.lock:
            spare = self._spare.get(size)
            return memoryview(spare.pop() if spare else bytearray(size))

    def keep(self, key: str, pieces: Pieces) -> str:
        """Replace an object; its tag. With the lock held, as what follows."""
        self.drop(key)
        tag = f'"{next(self.numbers)}"'
        self.objects[key] = (pieces, tag)
        return tag

    def drop(self, key: str) -> None:
        """Forget an object."""
        for piece in self.objects.pop(key, ([], ""))[0]:
            if len(piece) >= _LEAST_KEPT and isinstance(piece.obj, bytearray):
                self._spare.setdefault(len(piece), []).append(piece.obj)


class _Connection(socketserver.BaseRequestHandler):
    """Requests of one client, one after the other."""

    def handle(self) -> None:
        self._store: _Store = self.server.store  # type: ignore[attr-defined]
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self.request.makefile("rb", buffering=1 << 16)
        try:
            while line := self._stream.readline():
                method, target, _ = line.decode().split()
                self._serve(method, target, dict(self._headers()))
        except OSError:
            pass  # the client has gone

    def _headers(self) -> Iterator[tuple[str, str]]:
        while (line := self._stream.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            yield name.lower(), value.strip()

    def _serve(self, method: str, target: str, headers: dict[str, str]) -> None:
        path, _, text = target.partition("?")
        query = dict(urllib.parse.parse_qsl(text, keep_blank_values=True))
        key = urllib.parse.unquote(path).lstrip("/").partition("/")[2]
        if headers.get("expect") == "100-continue":
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._store.buffer(int(headers.get("content-length", 0)))
        done = 0
        while done < len(body):
            more = self._stream.readinto(body[done:])
            if not more:
                raise ConnectionResetError
            done += more
        if method == "PUT":
            self._put(key, query, headers, body)
        elif method == "POST":
            self._post(key, query, body)
        elif method == "DELETE":
            with self._store.lock:
                self._store.uploads.pop(query.get("uploadId", ""), None)
                self._store.drop(key if "uploadId" not in query else "")
            self._say(204)
        elif not key:
            self._list(query)
        else:
            self._get(method, key, headers)

    def _put(
        self, key: str, query: dict[str, str], headers: dict[str, str], body: memoryview
    ) -> None:
        with self._store.lock:
            if "partNumber" in query:
                self._store.uploads[query["uploadId"]][int(query["partNumber"])] = [body]
                return self._say(200, {"ETag": f'"{query["partNumber"]}"'})
            tag = self._store.objects.get(key, ([], None))[1]
            wanted = headers.get("if-match", tag)
            if wanted != tag or (tag is not None and headers.get("if-none-match") == "*"):
                return self._say(412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
            self._say(200, {"ETag": self._store.keep(key, [body])})

    def _post(self, key: str, query: dict[str, str], body: memoryview) -> None:
        with self._store.lock:
            if "uploads" in query:
                upload = f"u{next(self._store.numbers)}"
                self._store.uploads[upload] = {}
                text = f"<UploadId>{upload}</UploadId>"
                return self._xml("InitiateMultipartUploadResult", text)
            if "delete" in query:
                keys = re.findall(r"<Key>(.*?)</Key>", bytes(body).decode())
                for name in keys:
                    self._store.drop(html.unescape(name))
                rows = [f"<Deleted><Key>{name}</Key></Deleted>" for name in keys]
                return self._xml("DeleteResult", "".join(rows))
            parts = self._store.uploads.pop(query["uploadId"])
            pieces = [piece for number in sorted(parts) for piece in parts[number]]
            tag = escape(self._store.keep(key, pieces))
            self._xml("CompleteMultipartUploadResult", f"<ETag>{tag}</ETag>")

    def _get(self, method: str, key: str, headers: dict[str, str]) -> None:
        with self._store.lock:
            pieces, tag = self._store.objects.get(key, ([], ""))
        if not tag:
            return self._say(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        if headers.get("if-none-match") == tag:
            return self._say(304, {"ETag": tag})
        size = sum(map(len, pieces))
        begin, end, more = 0, size, {"ETag": tag, "Last-Modified": formatdate(usegmt=True)}
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if ranged:
            begin, end = int(ranged[1]), min(int(ranged[2] or size) + 1, size)
            more["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._say(206 if ranged else 200, more, length=end - begin)
        at = 0
        for piece in pieces if method == "GET" else ():
            self.request.sendall(piece[max(begin - at, 0) : max(end - at, 0)])
            at += len(piece)

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        folders, rows = set(), []
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        with self._store.lock:
            for key, (pieces, tag) in sorted(self._store.objects.items()):
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                if key.startswith(prefix) and cut >= 0:
                    folders.add(key[: cut + 1])
                elif key.startswith(prefix):
                    rows.append(
                        f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                        f"<ETag>{escape(tag)}</ETag><Size>{sum(map(len, pieces))}</Size></Contents>"
                    )
        common = [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders
        ]
        self._xml(
            "ListBucketResult", "<IsTruncated>false</IsTruncated>" + "".join([*rows, *common])
        )

    def _xml(self, name: str, inside: str) -> None:
        self._say(200, body=f'<?xml version="1.0"?><{name}>{inside}</{name}>'.encode())

    def _say(
        self,
        status: int,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        body: bytes = b"",
        length: int | None = None,
    ) -> None:
        size = len(body) if length is None else length
        lines = [f"HTTP/1.1 {status} -", f"Content-Length: {size}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.request.sendall("\r\n".join([*lines, "", ""]).encode() + body)
