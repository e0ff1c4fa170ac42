"""The suite `levels`: one quick run for all tests of its output, and the store that it brings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store

from ckpt_core.bench.levels.figures import median_within
from ckpt_core.bench.levels.sink import Sink
from tests.bench.quick import ckpt_core_bench, quick_fixtures

pytestmark = pytest.mark.timeout(300)
output, report = quick_fixtures("--suite", "levels")
PEERS, PARITY = "ckpt_core_peers", "ckpt_core_parity"
OURS, ENGINES = "ckpt_core", ("ckpt_core", "ckpt_core_capped", "no_level")


def rows(report: dict[str, Any], figure: str) -> dict[str, Any]:
    found: dict[str, Any] = report["results"][figure]["contenders"]
    return found


def test_what_is_installed_runs_and_the_rest_says_what_is_missing(report: dict[str, Any]) -> None:
    for name, entry in report["contenders"].items():
        assert entry["reason"] is None or entry["reason"].endswith("is not installed"), name
        assert not entry["failed"], entry["reason"]
    for name in (OURS, PEERS, PARITY):
        assert report["contenders"][name]["restored"] is True


def test_each_figure_has_its_ways(report: dict[str, Any]) -> None:
    rounds = report["settings"]["rounds"]
    for figure in ("call", "step"):
        assert list(rows(report, figure)) == list(ENGINES)
    for figure in ("slower", "slower_median"):
        assert list(rows(report, figure)) == [*ENGINES[:2], PEERS]
    for figure in ("slower_clock", "slower_clock_median"):
        assert list(rows(report, figure)) == [PEERS]
    assert {PEERS, PARITY} <= set(rows(report, "kept_rate"))
    assert list(rows(report, "back_rate")) == [PEERS, PARITY]
    assert list(rows(report, "parity_code")) == ["4+1", "4+2"]
    for figure in ("peers_call", "peers_committed", "peers_sent"):
        assert PEERS in rows(report, figure)
    tools = {name for name in ("cp", "rsync") if report["contenders"][name]["reason"] is None}
    assert {PEERS, "cp"} | tools <= set(rows(report, "peers_arrived"))
    assert list(rows(report, "parity_made")) == [PARITY]
    assert list(rows(report, "lost_back")) == [PEERS, PARITY]
    assert list(rows(report, "cap")) == ["ckpt_core_capped"]
    for figure in ("upload", "upload_cpu"):
        assert {OURS, "obstore"} <= set(rows(report, figure))
    assert list(rows(report, "back")) == [OURS, "obstore"]
    for figure in ("memory_save", "memory_restore"):
        assert list(rows(report, figure)) == [OURS, "memcpy"]
    assert {
        len(row["values"])
        for one in report["results"]
        for row in rows(report, one).values()
        if not one.endswith("_median")
    } == {rounds}


def test_a_bound_is_never_passed(report: dict[str, Any]) -> None:
    assert max(rows(report, "cap")["ckpt_core_capped"]["values"]) < 1.1


def test_a_copy_is_all_that_a_node_has_and_is_sent_once(report: dict[str, Any]) -> None:
    node_bytes = report["settings"]["node_bytes"]
    for sent in rows(report, "peers_sent")[PEERS]["values"]:
        assert 0.9 * node_bytes < sent < 1.1 * node_bytes
    for figure in ("call", "committed"):
        parts = rows(report, f"peers_{figure}")[PEERS]["values"]
        whole = rows(report, "peers_arrived")[PEERS]["values"]
        assert all(one < other for one, other in zip(parts, whole, strict=True))


def test_nothing_is_left_and_no_path_is_told(output: Path, report: dict[str, Any]) -> None:
    assert not list((output / "root").iterdir())
    assert str(output) not in str(report)
    assert "Step to the store" in (output / "stdout").read_text()


def test_only_what_is_asked_for_is_started(tmp_path: Path) -> None:
    arguments = ["--suite", "levels", "--quick", "--root", str(tmp_path), "--measure", "memory"]
    done = ckpt_core_bench(arguments)
    assert done.exit_code == 0, done.output
    assert "obstore" not in done.output and "memcpy" in done.output


@pytest.fixture
def store(tmp_path: Path) -> Iterator[S3Store]:
    sink = Sink("sink", tmp_path)
    port = sink.start()["port"]
    sink.pin(sorted(os.sched_getaffinity(0)))
    yield S3Store(
        "bench",
        prefix="run",
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id="bench",
        secret_access_key="bench",
        region="us-east-1",
        client_options={"allow_http": True},
    )
    sink.stop()


def test_the_sink_gives_back_what_it_was_given_in_parts_and_in_ranges(store: S3Store) -> None:
    data = os.urandom(20 << 20)
    obstore.put(store, "large", data, chunk_size=6 << 20, max_concurrency=3)
    assert bytes(obstore.get(store, "large").bytes()) == data
    for start, length in ((0, 1), (6 << 20, 5), ((6 << 20) - 3, 7 << 20), ((20 << 20) - 9, 9)):
        found = bytes(obstore.get_range(store, "large", start=start, length=length))
        assert found == data[start : start + length]
    assert obstore.head(store, "large")["size"] == len(data)


def test_the_sink_holds_conditions_lists_and_deletes(store: S3Store) -> None:
    first = obstore.put(store, "a/one", b"1", mode="create")
    with pytest.raises((AlreadyExistsError, PreconditionError)):
        obstore.put(store, "a/one", b"2", mode="create")
    obstore.put(store, "a/one", b"3", mode={"e_tag": first["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.put(store, "a/one", b"4", mode={"e_tag": first["e_tag"]})
    obstore.put(store, "b&c", b"5")
    listed = obstore.list_with_delimiter(store)
    assert [*listed["common_prefixes"]] == ["a"]
    assert [row["path"] for row in listed["objects"]] == ["b&c"]
    obstore.delete(store, ["a/one", "b&c"])
    assert obstore.list(store).collect() == []
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "a/one")


def test_the_interval_of_a_median_is_that_of_order_statistics() -> None:
    assert median_within(()) == ()
    assert median_within([3.0, 1.0]) == (1.0, 2.0, 3.0)
    # 40 values: the 14th from either side.
    assert median_within(range(1, 41)) == (14, 20.5, 27)
