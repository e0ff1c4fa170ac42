"""A level in Google's storage: what the environment and the answers mean. The rest is in test_objects.py."""

from __future__ import annotations

import logging
import time
import traceback

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.levels import Away, open_far
from tests.levels.servers.faulty import SECRET, always, in_environment
from tests.levels.servers.like_google import GoogleServer
from tests.levels.servers.moto import needs_store

pytestmark = needs_store

WRONG: list[tuple[str, str, dict[str, str], str]] = [
    ("gs://no-such-bucket/run", "never", {}, "no such bucket.*create gs://no-such-bucket"),
    ("", "403", {}, "not permitted.*let these credentials"),
    ("", "401", {}, "credentials are refused.*GOOGLE_SERVICE_ACCOUNT"),
    ("", "503", {}, "out of order"),
    ("", "never", {"GOOGLE_BASE_URL": "http://127.0.0.1:1"}, r"cannot be reached.*http://127"),
    (
        "",
        "never",
        {"GOOGLE_SERVICE_ACCOUNT_KEY": f"{{{SECRET}"},
        "no client can be made.*GOOGLE_SERVICE_ACCOUNT",
    ),
]


@pytest.mark.parametrize(("where", "word", "given", "text"), WRONG)
def test_what_is_wrong_is_said_within_seconds_and_holds_no_secret(
    where: str, word: str, given: dict[str, str], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with GoogleServer() as server, in_environment(server.environ() | given):
        server.fault = always(word)
        began = time.monotonic()
        with pytest.raises((ConfigError, Away), match=text) as caught:
            open_far(where or server.url()).check()
        assert time.monotonic() - began < 60
    said = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert SECRET not in said and "<Message>" not in said
