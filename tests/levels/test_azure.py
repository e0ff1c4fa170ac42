"""A level in Azure's blob storage, against Azurite: what differs from S3, and the agent's promises once more.

What a level promises on every store is tested in test_objects.py, on this server too.
"""

from __future__ import annotations

import base64
import itertools
import logging
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_core import Checkpointer, ConfigError, Level
from ckpt_core.levels import Away, open_far
from tests.crash.promises import QuickFiles
from tests.levels.agents import Agents
from tests.levels.object_copies import SHARD, A, B, manifest_of, put, send, step
from tests.levels.servers.azurite import ACCOUNT, KEY, AzuriteServer, needs_azurite
from tests.levels.servers.faulty import SECRET, in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.test_agent_store import (
    test_a_step_that_is_saved_again_is_replaced_in_the_store,
    test_nodes_without_a_word_to_each_other_make_one_step_in_the_store,
    test_what_is_committed_comes_to_the_store_and_retention_is_kept_there,
)
from tests.levels.trainers import SOON_S, end_agent, options, processes, until
from tests.levels.training_jobs import is_of_step, make_state

pytestmark = [needs_store, needs_azurite]

__all__ = [  # the agent's promises, on the server of this module
    "test_a_step_that_is_saved_again_is_replaced_in_the_store",
    "test_nodes_without_a_word_to_each_other_make_one_step_in_the_store",
    "test_what_is_committed_comes_to_the_store_and_retention_is_kept_there",
]

_prefixes = itertools.count()


@pytest.fixture(autouse=True)
def nothing_of_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZUR")]:
        monkeypatch.delenv(name)
    # Where machines of the cloud are told their role; here nobody answers.
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1")


@pytest.fixture
def server(agents: Agents, azurite: AzuriteServer) -> AzuriteServer:
    """With nothing below its URL yet."""
    azurite.prefix = f"run {next(_prefixes)}"
    agents.environ = azurite.environ()
    return azurite


# -- who is let in ----------------------------------------------------------------------------------


def the_names_of_the_command_line(server: AzuriteServer) -> dict[str, str]:
    return {
        "AZURE_STORAGE_ACCOUNT": ACCOUNT,
        "AZURE_STORAGE_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": server.endpoint,
    }


def a_connection_string(server: AzuriteServer) -> dict[str, str]:
    return {"AZURE_STORAGE_CONNECTION_STRING": server.connection_string()}


def a_connection_string_beside_another_account(server: AzuriteServer) -> dict[str, str]:
    other = {"AZURE_STORAGE_ACCOUNT_NAME": "other", "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1"}
    return other | a_connection_string(server)


def a_shared_access_signature(server: AzuriteServer) -> dict[str, str]:
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_SAS_TOKEN": server.sas("rwdlc"),
        "AZURE_STORAGE_ENDPOINT": server.endpoint,
    }


def a_connection_string_with_a_signature(server: AzuriteServer) -> dict[str, str]:
    text = f"BlobEndpoint={server.endpoint}/;AccountName={ACCOUNT};SharedAccessSignature="
    return {"AZURE_STORAGE_CONNECTION_STRING": text + server.sas("rwdlc")}


@pytest.mark.parametrize(
    "given",
    [
        AzuriteServer.environ,
        the_names_of_the_command_line,
        a_connection_string,
        a_connection_string_beside_another_account,
        a_shared_access_signature,
        a_connection_string_with_a_signature,
    ],
    ids=lambda given: given.__name__,
)
def test_credentials_are_taken_from_the_environment_as_azures_tools_take_them(
    server: AzuriteServer, given: Callable[[AzuriteServer], dict[str, str]]
) -> None:
    with in_environment(given(server)), open_far(server.url()) as far:
        far.check()
        assert send(far, A) and far.steps() == {100: A.attempt}
        far.retire([A.target])
        assert far.steps() == {} == far.files(A)


CONNECTION_STRINGS = {
    "AccountName=a;AccountKey=aw==;EndpointSuffix=core.chinacloudapi.cn": (
        "https://a.blob.core.chinacloudapi.cn"
    ),
    "BlobEndpoint=https://a.blob.core.windows.net/;SharedAccessSignature=sv=1&sig=x": (
        "https://a.blob.core.windows.net"
    ),
    "UseDevelopmentStorage=true": "http://127.0.0.1:10000",
    "AccountName=a;AccountKey=aw==": "",
}


@pytest.mark.parametrize("text", CONNECTION_STRINGS)
def test_a_connection_string_says_where_the_store_is(text: str) -> None:
    from ckpt_core.levels.far.clients import endpoint, open_store

    with in_environment({"AZURE_STORAGE_CONNECTION_STRING": text}):
        assert endpoint("az://container/run") == CONNECTION_STRINGS[text]
        open_store("az://bucket/run", request_s=1.0, retries=0)


# -- what is wrong ----------------------------------------------------------------------------------


def refused_key(server: AzuriteServer) -> dict[str, str]:
    other = base64.b64encode(b"another").decode()
    return server.environ() | {"AZURE_STORAGE_ACCOUNT_KEY": other}


def broken_key(server: AzuriteServer) -> dict[str, str]:
    return server.environ() | {"AZURE_STORAGE_ACCOUNT_KEY": f"{SECRET} !"}


def no_key(server: AzuriteServer) -> dict[str, str]:
    return {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ENDPOINT": server.endpoint}


def read_only(server: AzuriteServer) -> dict[str, str]:
    return no_key(server) | {"AZURE_STORAGE_SAS_TOKEN": server.sas("rl")}


def run_out(server: AzuriteServer) -> dict[str, str]:
    return no_key(server) | {"AZURE_STORAGE_SAS_TOKEN": server.sas("rwdlc", hours=-1.0)}


def no_such_account(server: AzuriteServer) -> dict[str, str]:
    where = f"http://127.0.0.1:{server.port}/nobody"
    return server.environ() | {"AZURE_STORAGE_ENDPOINT": where}


def nobody_there(server: AzuriteServer) -> dict[str, str]:
    return server.environ() | {"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/account"}


NO_CONTAINER, NO_NAME = "az://no-such-container/run", "az://Bad_Name/run"
WRONG: list[tuple[Callable[[AzuriteServer], dict[str, str]], str, str]] = [
    (AzuriteServer.environ, NO_CONTAINER, "no such bucket.*create az://no-such-container"),
    (AzuriteServer.environ, NO_NAME, "no bucket can have this name.*correct the URL"),
    (read_only, "", "not permitted.*let these credentials"),
    (refused_key, "", "credentials are refused.*AZURE_STORAGE_ACCOUNT_KEY"),
    (run_out, "", "credentials are refused.*AZURE_STORAGE_ACCOUNT_KEY"),
    (no_key, "", "no credentials.*AZURE_STORAGE_CONNECTION_STRING"),
    (broken_key, "", "no client can be made.*AZURE_STORAGE_ACCOUNT_KEY"),
    (no_such_account, "", "no such bucket.*the endpoint"),
    (nobody_there, "", r"cannot be reached.*endpoint \(http://127"),
]


@pytest.mark.parametrize(("given", "where", "text"), WRONG)
def test_what_is_wrong_is_said_within_seconds_and_holds_no_secret(
    server: AzuriteServer,
    given: Callable[[AzuriteServer], dict[str, str]],
    where: str,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, environ = where or server.url(), given(server)
    caplog.set_level(logging.DEBUG)
    began = time.monotonic()
    with in_environment(environ), pytest.raises((ConfigError, Away), match=text) as caught:
        open_far(url).check()
    assert time.monotonic() - began < 60
    assert url in str(caught.value)
    assert isinstance(caught.value, ConfigError) or given is nobody_there
    said = "".join(traceback.format_exception(caught.value)) + caplog.text
    for secret in (SECRET, KEY, "YW5vdGhlcg", "sig=", "<Message>"):
        assert secret not in said


def test_a_permission_that_is_taken_back_is_said_and_what_is_there_stays(
    server: AzuriteServer,
) -> None:
    with in_environment(server.environ()), open_far(server.url()) as far:
        assert send(far, A)
    calls: list[Callable[..., object]] = [
        lambda far: put(far, B),
        lambda far: far.publish(step(200), manifest_of(step(200))),
        lambda far: far.retire([A.target]),
        lambda far: far.write_word("run.json", b"{}", over=None),
    ]
    with in_environment(read_only(server)), open_far(server.url()) as far:
        assert far.steps() == {100: A.attempt}
        for call in calls:
            with pytest.raises(Away, match="not permitted") as caught:
                call(far)
            assert caught.value.hopeless and server.url() in str(caught.value)
        assert far.steps() == {100: A.attempt} and len(far.files(A)) == 2


# -- a step -----------------------------------------------------------------------------------------


def test_of_agents_that_race_one_publishes_and_no_one_fails(server: AzuriteServer) -> None:
    with in_environment(server.environ()):
        views = [open_far(server.url()) for _ in range(8)]
        for number in (100, 200, 300):
            copies = [step(number, digit) for digit in "abcdabcd"]
            with ThreadPoolExecutor(len(views)) as threads:
                published = list(threads.map(send, views, copies))
            (attempt,) = {view.steps()[number] for view in views}
            assert published == [copy.attempt == attempt for copy in copies]
        for view in views:
            view.close()


def test_names_that_azure_would_change_are_other_ones_there(server: AzuriteServer) -> None:
    names = ["a\\b", "a/b", "a%5Cb", "end.", "end", "folder./x", "folder/x", "a.b", "\x01", "%"]
    with in_environment(server.environ()), open_far(server.url()) as far:
        for name in names:
            put(far, A, name, name.encode())
        assert far.files(A) == {name: len(name) for name in names}
        for name in names:
            found = bytearray(len(name))
            far.read_into(A, name, memoryview(found), 0)
            assert found == name.encode()
        assert far.publish(A, manifest_of(A))
        far.sweep([])
        assert len(far.files(A)) == len(names)
        far.retire([A.target])
        assert far.files(A) == {}


def test_an_upload_that_was_cut_off_is_not_seen_and_stands_in_no_ones_way(
    server: AzuriteServer,
) -> None:
    part = memoryview(os.urandom(8 << 20))

    def cut_off() -> Iterator[memoryview]:
        yield from [part] * 3
        raise KeyError

    with in_environment(server.environ()), open_far(server.url()) as far:
        with pytest.raises(KeyError):
            far.put(A, SHARD, cut_off(), 4 * len(part))
        assert far.files(A) == {}
        far.put(A, SHARD, iter([part] * 2), 2 * len(part))
        assert far.files(A) == {SHARD: 2 * len(part)}
        found = memoryview(bytearray(2 * len(part)))
        far.read_into(A, SHARD, found, 0)
        assert found == bytes(part) * 2


def test_a_run_whose_root_is_lost_goes_on_from_azure(
    root: Path, server: AzuriteServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    levels = [Level(server.url(), keep_last=2)]
    with in_environment(server.environ()):
        with Checkpointer(root, options(), levels=levels, files=QuickFiles()) as ck:
            for number in range(1, 5):
                ck.save(number, make_state(number)).reached(1).result(SOON_S)
            ck.wait(level=1)
            events = [*map(str, ck.events.events())]
        until(lambda: not processes(root), "the end of the agent")
        texts = [path.read_text() for path in (root / ".levels").iterdir() if path.is_file()]
        shutil.rmtree(root)
        with Checkpointer(root, options(), levels=levels, files=QuickFiles()) as ck:
            found = ck.restore(make_state(0))
            assert found is not None and found.step == 4 and is_of_step(found.state)
        end_agent(root)
        with open_far(server.url()) as far:
            assert set(far.steps()) == {3, 4}
            words = [far.read_word(name) for name in ("run.json", "lease.json")]
    held = "".join([*texts, *events, caplog.text, *(str(word and word.data) for word in words)])
    assert not re.search("|".join(map(re.escape, (KEY, SECRET, "sig="))), held)
