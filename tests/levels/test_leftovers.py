"""Parts of uploads that were cut off are deleted, and nothing else."""

from __future__ import annotations

import importlib
import importlib.util
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ckpt_core.levels import Copy, open_far, signing
from ckpt_core.levels.far import leftovers
from tests.levels.servers.faulty import FaultServer, Request, always, in_environment, never
from tests.levels.servers.like_google import GoogleServer
from tests.levels.servers.moto import MotoServer, needs_store

pytestmark = needs_store

KEEP = Copy(300, "000000000300-cccccccc")
URL = "run one"
CUT_OFF = f"{URL}/step-000000000100/aaaaaaaa/shard-00000-0.safetensors"
KEPT = f"{URL}/step-000000000300/cccccccc/shard-00000-0.safetensors"
FOREIGN = f"{URL}/notes/report.pdf"
BESIDE = f"{URL} b/step-000000000100/aaaaaaaa/shard-00000-0.safetensors"


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as server, in_environment(server.environ()):
        for number, key in enumerate((CUT_OFF, KEPT, FOREIGN, BESIDE)):
            server.uploads[f"u{number}"] = (key, {1: b"x"})
            server.began_s[f"u{number}"] = datetime.now(UTC).timestamp()
        yield server


def left(server: FaultServer) -> list[str]:
    return [key for key, _ in server.uploads.values()]


@pytest.mark.parametrize("skew_s", [0.0, -1e6, 1e6])
def test_uploads_that_were_cut_off_long_ago_are_aborted(server: FaultServer, skew_s: float) -> None:
    server.skew_s = skew_s
    for hours, there in ((23, [CUT_OFF, KEPT, FOREIGN, BESIDE]), (25, [KEPT, FOREIGN, BESIDE])):
        for name in server.uploads:
            server.began_s[name] = datetime.now(UTC).timestamp() + skew_s - hours * 3600
        with open_far(server.url(URL)) as far:
            far.sweep([KEEP])
        assert left(server) == there


@pytest.mark.parametrize("word", ["403", "503", "reset", "torn"])
def test_a_store_that_does_not_tell_of_them_is_left_alone(server: FaultServer, word: str) -> None:
    server.fault = always(word, like="uploads")
    with open_far(server.url(URL)) as far:
        far.sweep([])
    server.fault = never
    assert len(left(server)) == 4


def test_the_signature_is_what_the_stores_own_tools_make() -> None:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    settings = {
        "access_key_id": "AKID",
        "secret_access_key": "se/cr+et",
        "session_token": "to/k+en",
        "region": "eu-west-1",
    }
    url = "http://127.0.0.1:9000/bucket/run%20one/a?prefix=run%20one%2F&uploads="
    request = AWSRequest(method="GET", url=url)
    keys = Credentials("AKID", "se/cr+et", "to/k+en")
    S3SigV4Auth(keys, "s3", "eu-west-1").add_auth(request)
    when = datetime.strptime(request.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ")
    ours = signing.signed("GET", url, settings, when=when)
    assert ours["Authorization"] == request.headers["Authorization"]


@contextmanager
def a_role(keys: dict[str, str]) -> Iterator[dict[str, str]]:
    """The place where a container gets the keys of its role; what names it in the environment."""

    class Place(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(keys).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Place) as place:
        thread = threading.Thread(target=place.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{place.server_port}/keys"
            yield {"AWS_CONTAINER_CREDENTIALS_FULL_URI": url}
        finally:
            place.shutdown()
            thread.join()


def test_with_a_role_they_are_aborted_where_botocore_knows_its_keys(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = server.environ()
    keys = {
        "AccessKeyId": environ.pop("AWS_ACCESS_KEY_ID"),
        "SecretAccessKey": environ.pop("AWS_SECRET_ACCESS_KEY"),
        "Token": "a token",
        "Expiration": (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in server.uploads:
        server.began_s[name] = datetime.now(UTC).timestamp() - 25 * 3600
    with a_role(keys) as named, in_environment({**environ, **named}):
        with monkeypatch.context() as without:
            without.setattr(importlib.util, "find_spec", lambda name: None)
            assert leftovers.abort_leftovers(server.url(URL), [KEEP]) == 0
        assert leftovers.abort_leftovers(server.url(URL), [KEEP]) == 1
    assert left(server) == [KEPT, FOREIGN, BESIDE]


def test_with_a_service_account_of_google_they_are_aborted_where_google_auth_knows_how_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "google.auth", reason="missing: google-auth (pip install google-auth requests)"
    )
    asked: list[str] = []
    with a_role({"access_token": "a token", "expires_in": "3600", "token_type": "Bearer"}) as named:
        (place,) = named.values()
        account = {
            "type": "service_account",
            "client_email": "team@example",
            "private_key": _private_key(),
            "private_key_id": "1",
            "token_uri": place,
        }
        file = tmp_path / "account.json"
        file.write_text(json.dumps(account))
        with GoogleServer() as server:
            server.uploads["u"] = CUT_OFF, {1: b"x"}
            server.began_s["u"] = datetime.now(UTC).timestamp() - 25 * 3600

            def noted(request: Request) -> str | None:
                asked.append(request.headers.get("authorization", ""))
                return None

            server.fault = noted
            home = {"GOOGLE_BASE_URL": f"http://127.0.0.1:{server.port}"}
            with in_environment({**home, "GOOGLE_SERVICE_ACCOUNT": str(file)}):
                with monkeypatch.context() as without:
                    without.setattr(importlib.util, "find_spec", lambda name: None)
                    assert leftovers.abort_leftovers(server.url(URL)) == 0
                assert leftovers.abort_leftovers(server.url(URL)) == 1
            assert not server.uploads
    assert asked == ["Bearer a token"] * 2


def _private_key() -> str:
    rsa = pytest.importorskip(
        "cryptography.hazmat.primitives.asymmetric.rsa", reason="missing: cryptography"
    )
    coded = importlib.import_module("cryptography.hazmat.primitives.serialization")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    how = coded.Encoding.PEM, coded.PrivateFormat.PKCS8, coded.NoEncryption()
    return str(key.private_bytes(*how).decode())


def test_another_server_tells_of_them_in_the_same_way(moto: MotoServer) -> None:
    with in_environment(moto.environ()):
        for key in (CUT_OFF, FOREIGN):
            url = f"http://127.0.0.1:{moto.port}/bucket/{key.replace(' ', '%20')}?uploads"
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            direct.open(urllib.request.Request(url, method="POST"), timeout=30).close()
        assert leftovers.abort_leftovers(moto.url(URL)) == 1, "all of its uploads began in 2010"
