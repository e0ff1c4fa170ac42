"""Whose levels are they? Over directories, and over an object store."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_core.errors import ConfigError, RestoreError, RootBusy
from ckpt_core.layout import RUN_NAME
from ckpt_core.levels import Away, Far, Word, claiming, open_far
from ckpt_core.levels.claiming import LEASE, check, claim
from ckpt_core.levels.errands import run_errand
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.options import scheme_of
from ckpt_core.store import mount_of
from tests.faults.mounts import fill, mounted
from tests.levels.servers.faulty import FaultServer, always, in_environment
from tests.levels.servers.moto import needs_store

HOST = socket.gethostname()
ELSEWHERE = "another-machine"

Answer = Callable[[int, Word | None], Word | None]


@pytest.fixture(autouse=True)
def _a_short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "WATCH_S", 1.0)
    monkeypatch.setattr(claiming, "_LOOK_EVERY_S", 0.02)


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as server, in_environment(server.environ()):
        yield server


@pytest.fixture(params=["directory", pytest.param("store", marks=needs_store)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "level")
    server: FaultServer = request.getfixturevalue("server")
    return server.url()


def ask(*urls: str, **more: Any) -> dict[str, Any]:
    usual = {"run": None, "fresh": True, "leads": True, "host": HOST, "pid": os.getpid()}
    return {"levels": [{"url": url} for url in urls], **usual, **more}


def claimed(*urls: str, **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = claim(ask(*urls, **more), lambda done, total: None)
    return answer


def word(url: str, name: str = RUN_NAME) -> dict[str, Any]:
    with open_far(url) as far:
        found = far.read_word(name)
    assert found is not None
    obj: dict[str, Any] = json.loads(found.data)
    return obj


def write_lease(far: Far, run: str, **more: Any) -> None:
    there = far.read_word(LEASE)
    usual = {"run": run, "session": 1, "host": ELSEWHERE, "pid": 1, "beat": 0, "closed": False}
    data = json.dumps({**usual, **more}).encode()
    far.write_word(LEASE, data, over=None if there is None else there.tag)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_first_claim_begins_a_run_and_the_next_one_of_it_counts_on(url: str) -> None:
    first = claimed(url)
    assert (first["session"], first["warnings"]) == (1, [])
    assert word(url)["run"] == first["run"] and word(url)["pid"] == os.getpid()
    second = claimed(url, run=first["run"], fresh=False)
    assert (second["run"], second["session"]) == (first["run"], 2)
    assert word(url)["session"] == 2


def test_a_level_that_is_full_to_the_last_byte_is_a_warning_where_the_root_has_a_run(
    tmp_path: Path,
) -> None:
    with mounted("tmpfs", tmp_path) as disk:
        level = str(disk / "far")
        run = claimed(level)["run"]
        fill(disk)
        answer = claimed(level, run=run, fresh=False)
        assert answer["run"] == run
        assert "No space left" in answer["warnings"][0]
        # Whoever has none cannot say at the level that it goes on from there.
        with pytest.raises(RestoreError, match="No space left"):
            claimed(level)


def test_all_levels_get_one_run_and_a_session_above_all_of_theirs(url: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    run = claimed(url)["run"]
    claimed(url, run=run, fresh=False)
    answer = claimed(other, url, run=run, fresh=False)
    assert answer["session"] == 3 == word(url)["session"] == word(other)["session"]
    assert word(other)["run"] == run
    assert claimed(url, run=run, fresh=False, session=7)["session"] == 8


@pytest.mark.parametrize("more", [{"run": "f" * 32}, {"fresh": False}], ids=["another", "none"])
def test_the_level_of_another_run_is_refused_and_stays_as_it_is(
    url: str, more: dict[str, Any]
) -> None:
    claimed(url, host=ELSEWHERE, pid=4711)
    before = word(url)
    with pytest.raises(RootBusy) as caught:
        claimed(url, **more)
    for part in (url, ELSEWHERE, "4711", before["since"], before["run"]):
        assert part in str(caught.value)
    assert word(url) == before


def test_levels_of_two_runs_are_joined_by_nobody(url: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    claimed(url)
    claimed(other)
    with pytest.raises(RootBusy):
        claimed(url, other)


def test_a_fresh_root_joins_at_once_when_the_last_agent_has_said_that_it_ended(url: str) -> None:
    run = claimed(url, host=ELSEWHERE)["run"]
    with open_far(url) as far:
        write_lease(far, run, closed=True)
    claiming.WATCH_S = 3600.0
    answer = claimed(url)
    assert (answer["run"], answer["session"]) == (run, 2)


@contextmanager
def renewed(far: Far, run: str, **more: Any) -> Iterator[None]:
    """Within it somebody renews the lease."""
    over = threading.Event()

    def renew() -> None:
        for beat in itertools.count(1):
            if over.wait(0.05):
                return
            write_lease(far, run, beat=beat, **more)

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join()


def test_the_end_of_an_earlier_session_says_nothing_of_the_present_one(url: str) -> None:
    run = claimed(url, host=ELSEWHERE)["run"]
    with open_far(url) as far:
        write_lease(far, run, closed=True)
        claimed(url, run=run, host=ELSEWHERE, fresh=False)
        claiming.WATCH_S = 3600.0
        with renewed(far, run), pytest.raises(RootBusy):
            claimed(url)


def test_a_fresh_root_joins_at_once_where_trainer_and_agent_of_this_machine_are_dead(
    url: str,
) -> None:
    run = claimed(url, pid=dead_pid())["run"]
    with open_far(url) as far:
        write_lease(far, run, host=HOST, pid=dead_pid(), pids=claiming.pids_here())
    claiming.WATCH_S = 3600.0
    assert claimed(url)["run"] == run


@pytest.mark.parametrize("other", ["boot", "namespace", "release", "unknown"])
def test_a_process_of_another_container_or_another_machine_of_this_name_is_not_taken_for_dead(
    url: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = claimed(url, pid=dead_pid())["run"]
    boot, namespace = claiming.pids_here().split(" ")
    pids = {"boot": f"another {namespace}", "namespace": f"{boot} pid:[1]"}.get(other, "")
    told = {} if other == "release" else {"pids": pids}  # one of before tells nothing of it
    if other == "unknown":
        monkeypatch.setattr(claiming, "_PIDS", "/proc/self/ns/none")
    claiming.WATCH_S = 3600.0
    with open_far(url) as far:
        there = far.read_word(RUN_NAME)
        assert there is not None
        word = {name: value for name, value in json.loads(there.data).items() if name != "pids"}
        far.write_word(RUN_NAME, json.dumps({**word, **told}).encode(), over=there.tag)
        lease = {"host": HOST, "pid": dead_pid(), **told}
        write_lease(far, run, **lease)
        with renewed(far, run, **lease), pytest.raises(RootBusy, match="at work in this run"):
            claimed(url)


@pytest.mark.parametrize("leased", [True, False])
def test_a_fresh_root_joins_when_nobody_was_seen_for_a_while(url: str, leased: bool) -> None:
    run = claimed(url, host=ELSEWHERE)["run"]
    if leased:
        with open_far(url) as far:
            write_lease(far, run)
    said = []
    assert claim(ask(url), lambda done, total: said.append(done))["run"] == run
    assert len(said) > 2, "whoever waits for the errand must hear of it"


def test_a_fresh_root_is_refused_while_somebody_renews_the_lease(url: str) -> None:
    run = claimed(url, host=ELSEWHERE, pid=4711)["run"]
    claiming.WATCH_S = 3600.0
    with (
        open_far(url) as far,
        renewed(far, run),
        pytest.raises(RootBusy, match="at work in this run: process 4711 on another"),
    ):
        claimed(url)
    assert word(url)["session"] == 1


def test_a_copy_of_a_root_looks_on_as_one_that_joins(url: str) -> None:
    run = claimed(url, host=ELSEWHERE)["run"]
    copy = {"run": run, "fresh": False, "copied": True}
    assert claimed(url, **copy)["session"] == 2, "nobody was seen for a while"
    claiming.WATCH_S = 3600.0
    with open_far(url) as far:
        with renewed(far, run), pytest.raises(RootBusy, match="at work in this run"):
            claimed(url, **copy)
        write_lease(far, run, session=2, closed=True)
    assert claimed(url, **copy)["session"] == 3, "all has ended: nothing is looked on at"


@pytest.fixture
def word_of_watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """Has each look of a watch, after the first word and the lease, answered by somebody else."""

    def set_to(answer: Answer) -> None:
        looks = itertools.count(-1)
        real = DirectoryFar.read_word

        def read_word(far: DirectoryFar, name: str) -> Word | None:
            look = next(looks)
            return real(far, name) if look < 1 else answer(look, real(far, name))

        monkeypatch.setattr(DirectoryFar, "read_word", read_word)

    return set_to


@pytest.mark.parametrize("seen", ["away", "empty"])
def test_a_level_that_goes_for_a_moment_while_it_is_watched_stops_nobody(
    seen: str, tmp_path: Path, word_of_watch: Callable[[Answer], None]
) -> None:
    url = str(tmp_path / "level")
    run = claimed(url, host=ELSEWHERE)["run"]

    def gone_at_first(look: int, word: Word | None) -> Word | None:
        if look > 4:
            return word
        if seen == "away":
            raise Away("it cannot be reached")
        return None

    word_of_watch(gone_at_first)
    answer = claimed(url, run=run, fresh=False, copied=True)
    assert (answer["run"], answer["session"], answer["warnings"]) == (run, 2, [])


def test_a_level_that_stays_away_while_it_is_watched_is_no_level_that_was_seen_silent(
    tmp_path: Path, word_of_watch: Callable[[Answer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "level")
    run = claimed(url, host=ELSEWHERE)["run"]

    def gone(look: int, word: Word | None) -> Word | None:
        raise Away("it cannot be reached")

    word_of_watch(gone)
    with pytest.raises(RestoreError, match=r"cannot be reached.*Start again when it answers"):
        claimed(url)
    word_of_watch(gone)
    answer = claimed(url, run=run, fresh=False, copied=True)
    assert answer["warnings"] == ["it cannot be reached"]
    monkeypatch.undo()
    assert word(url)["session"] == 1, "it is not claimed: somebody may be at work there"


def test_where_a_lease_is_and_no_run_the_run_of_the_lease_is_meant(url: str) -> None:
    run = "ab" * 16
    claiming.WATCH_S = 3600.0
    with open_far(url) as far:
        write_lease(far, run)
        with renewed(far, run):
            with pytest.raises(RootBusy, match="at work in this run: process 1 on another"):
                claimed(url)
            with pytest.raises(RootBusy, match="another run"):
                claimed(url, run="f" * 32, fresh=False)
            assert far.read_word(RUN_NAME) is None
        assert claimed(url, run=run, fresh=False)["session"] == 2
    assert word(url)["run"] == run


def test_a_fresh_root_joins_the_run_of_a_lease_that_nobody_renews(url: str) -> None:
    run = "ab" * 16
    with open_far(url) as far:
        write_lease(far, run, session=4)
    answer = claimed(url)
    assert (answer["run"], answer["session"]) == (run, 5)


def test_a_pause_of_the_machine_is_no_silence(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = claimed(url, host=ELSEWHERE)["run"]
    looks, ahead_s = itertools.count(1), 0.0
    with open_far(url) as far:
        write_lease(far, run)

        def pause(seconds: float) -> None:
            nonlocal ahead_s
            look = next(looks)
            if look == 1:
                ahead_s += 3600  # this machine was stopped, and so was that of the one at work
            if look == 4:
                write_lease(far, run, beat=1)

        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s, sleep=pause)
        monkeypatch.setattr(claiming, "time", clock)
        with pytest.raises(RootBusy, match="at work in this run"):
            claimed(url)


def test_claims_at_the_same_time_get_different_sessions_of_one_run(url: str) -> None:
    run = claimed(url)["run"]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: claimed(url, run=run, fresh=False), range(8)))
    assert {answer["run"] for answer in answers} == {run}
    assert sorted(answer["session"] for answer in answers) == list(range(2, 10))


def test_who_does_not_lead_claims_nothing(url: str) -> None:
    claimed(url, leads=False)
    with open_far(url) as far:
        assert far.read_word(RUN_NAME) is None


def test_a_word_that_is_not_ours_is_pointed_out(url: str) -> None:
    claimed(url)
    with open_far(url) as far:
        there = far.read_word(RUN_NAME)
        assert there is not None
        far.write_word(RUN_NAME, b"[1]", over=there.tag)
    with pytest.raises(ConfigError, match="not ours or damaged"):
        claimed(url)


@needs_store
def test_a_store_that_is_away_stops_only_who_has_no_run_yet(
    server: FaultServer, tmp_path: Path
) -> None:
    near = str(tmp_path / "near")
    run = claimed(near, server.url())["run"]
    server.fault = always("reset")
    with pytest.raises(RestoreError, match=r"the connection was cut.*Start again when it answers"):
        claimed(str(tmp_path / "new"), server.url())
    answer = claimed(near, server.url(), run=run, fresh=False)
    assert answer["session"] == 2 and len(answer["warnings"]) >= 1
    assert server.url() in answer["warnings"][0]
    server.fault = always("403")
    with pytest.raises(ConfigError, match="not permitted"):
        claimed(near, server.url(), run=run, fresh=False)


@needs_store
def test_every_level_that_is_wrong_is_named_at_once(server: FaultServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        check(ask(str(tmp_path / "file"), "s3://nobody-has-it/run"), lambda done, total: None)
    assert str(tmp_path / "file") in str(caught.value)
    assert "s3://nobody-has-it" in str(caught.value)


def test_a_claim_is_an_errand_of_a_process_of_its_own(url: str) -> None:
    answer = run_errand("claim", ask(url), timeout_s=60)
    assert word(url)["run"] == answer["run"]
    with pytest.raises(RootBusy, match="another run"):
        run_errand("claim", ask(url, run="f" * 32), timeout_s=60)
    mounts = {url: mount_of(Path(url))} if scheme_of(url) is None else {}
    assert run_errand("check", ask(url), timeout_s=60) == {"warnings": [], "mounts": mounts}
