"""The agent and an object store: what is committed comes there whole, whatever fails or dies on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.levels import LEVELS, read_status
from ckpt_core.options import Level
from tests.levels.agents import Agents, log_of, plan_of, until
from tests.levels.making import CHUNK_BYTES, make_store, save
from tests.levels.servers.faulty import SECRET, FaultServer, always, never
from tests.levels.servers.moto import needs_store
from tests.levels.stores import level_of, look_at, opened

pytestmark = needs_store


@pytest.fixture
def server(agents: Agents) -> Iterator[FaultServer]:
    with FaultServer() as serving:
        agents.environ = serving.environ()
        yield serving


def test_what_is_committed_comes_to_the_store_and_retention_is_kept_there(
    root: Path, tmp_path: Path, agents: Agents, server: FaultServer
) -> None:
    store = make_store(root)
    near = Level(str(tmp_path / "near"), keep_last=1)
    process = agents.start(root, plan_of(near, level_of(server, every=2, keep_last=2)))
    with opened(server) as far:
        for step in range(1, 9):
            save(store, step)
            if step % 2 == 0:
                until(lambda step=step: step in far.steps())
        until(lambda: set(far.steps()) == {6, 8})
        assert set(look_at(far)) == {6, 8}
        save(store, 9)
        store.close()
        status = agents.ended(process, root)
        assert set(look_at(far)) == {8, 9} and status.ended == "up to date"
        lease = far.read_word("lease.json")
        assert lease is not None and json.loads(lease.data)["closed"] is True
    assert [*status.levels[1].reached] == [2, 4, 6, 8, 9]


def test_a_step_that_is_saved_again_is_replaced_in_the_store(
    root: Path, agents: Agents, server: FaultServer
) -> None:
    store = make_store(root)
    save(store, 1, mark=1)
    process = agents.start(root, plan_of(level_of(server)))
    with opened(server) as far:
        until(lambda: far.steps() and look_at(far) == {1: 1})
        first = far.steps()
        save(store, 1, mark=2)
        # Not a look at bytes that are being replaced.
        until(lambda: far.steps() and far.steps() != first)
        assert look_at(far) == {1: 2}
    store.close()
    agents.ended(process, root)


def test_a_step_that_was_removed_there_and_not_here_is_sent_once_and_no_more(
    root: Path, agents: Agents, server: FaultServer
) -> None:
    store = make_store(root)
    for step in (1, 2):
        save(store, step)
    store.close()
    agents.run(root, plan_of(level_of(server)))
    with opened(server) as far:
        far.retire(["step-000000000002"])  # as `rm --after 1` does, which then is killed
        before = len(server.requests)
        status = agents.run(root, plan_of(level_of(server)))
        assert status.ended == "up to date" and set(look_at(far)) == {1}
        assert [*status.levels[0].skipped] == [2]
        puts = [text for text in server.requests[before:] if text.startswith("PUT ")]
        assert len([text for text in puts if "shard-00000-0" in text]) == 1, puts
        store = make_store(root)
        process = agents.start(root, plan_of(level_of(server)))
        until(lambda: (found := read_status(root)) and 2 in found.levels[0].skipped)
        save(store, 3)
        until(lambda: set(far.steps()) == {1, 3})
        store.close()
        agents.ended(process, root)


def test_what_a_kill_has_cut_off_of_an_upload_is_aborted_by_the_next_agent(
    root: Path, agents: Agents, server: FaultServer
) -> None:
    store = make_store(root)
    save(store, 1, nbytes=9 << 20, sums=False)  # two parts
    store.close()
    process = agents.start(root, plan_of(level_of(server)))
    server.fault = lambda request: "hang" if "partNumber" in request.query else None
    until(lambda: len([text for text in server.requests if "uploadId" in text]) == 2)
    process.kill()
    process.wait()
    ((key, _),) = server.uploads.values()
    of_another_node = key.replace("shard-00000", "shard-00001")
    server.uploads["other"] = (of_another_node, {1: b"x"})
    server.began_s["other"] = time.time()
    server.fault = never
    agents.run(root)
    assert [key for key, _ in server.uploads.values()] == [of_another_node]
    with opened(server) as far:
        assert set(far.steps()) == {1}


def test_a_store_that_is_away_holds_up_no_other_level_and_is_caught_up_with(
    root: Path, tmp_path: Path, agents: Agents, server: FaultServer
) -> None:
    near = tmp_path / "near"
    server.fault = always("503")
    store = make_store(root)
    process = agents.start(root, plan_of(level_of(server), Level(str(near), keep_last=None)))
    for step in (1, 2):
        save(store, step)
        until(lambda step=step: (near / f"step-{step:012d}").exists())
    problem = until(lambda: (found := read_status(root)) and found.levels[0].problem)
    assert SECRET not in problem
    server.fault = never
    with opened(server) as far:
        until(lambda: set(look_at(far)) == {1, 2})
    store.close()
    assert agents.ended(process, root).ended == "up to date"
    for path in (root / LEVELS).iterdir():
        assert path.is_dir() or SECRET not in path.read_text()
    assert log_of(root).count("WARNING") == 1


def test_nodes_without_a_word_to_each_other_make_one_step_in_the_store(
    tmp_path: Path, agents: Agents, server: FaultServer
) -> None:
    roots = [tmp_path / name for name in "abc"]
    stores = [make_store(root) for root in roots]
    running = [
        agents.start(root, plan_of(level_of(server, keep_last=2), sweeps=not node))
        for node, root in enumerate(roots)
    ]
    for step in (1, 2):
        attempt = f"{step:012d}-0000abcd"
        for node, store in enumerate(stores):
            save(store, step, ranks=(node,), world=3, attempt=attempt)
    with opened(server) as far:
        until(lambda: 2 in far.steps())
        for store in stores:
            store.close()
        for process, root in zip(running, roots, strict=True):
            assert agents.ended(process, root).ended == "up to date"
        assert 2 in look_at(far)


def test_a_pace_is_kept_to_a_store(root: Path, agents: Agents, server: FaultServer) -> None:
    store = make_store(root)
    save(store, 1, nbytes=600 * CHUNK_BYTES)
    store.close()
    begun = time.monotonic()
    status = agents.run(root, plan_of(level_of(server, bandwidth="1MB")))
    # Never faster; how much slower, this machine decides.
    assert time.monotonic() - begun >= 600 * CHUNK_BYTES / 1e6 * 0.9
    assert status.levels[0].busy_s >= 600 * CHUNK_BYTES / 1e6 * 0.9
