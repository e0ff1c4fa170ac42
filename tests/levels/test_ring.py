"""Who keeps whose copies: pure, but for what a directory keeps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.levels.trainer.grouping import before
from ckpt_core.levels.trainer.ring import (
    Known,
    Member,
    are_others,
    check,
    cut,
    everywhere,
    held,
    joined,
    partners,
    places,
    warning,
)
from ckpt_core.types import RankInfo
from tests.levels.making import make_store, save

RUN, OTHER = "ab" * 16, "cd" * 16


def members(*domains: str | None) -> list[Member]:
    return [Member(2 * n, f"10.0.0.{n}:7077", domain) for n, domain in enumerate(domains)]


def near(nodes: list[Member]) -> int:
    """How many copies lie in the domain of their node."""
    domains = {one.rank: one.domain or one.rank for one in nodes}
    return sum(domains[rank] == domains[other.rank] for rank, other in partners(nodes).items())


@pytest.mark.parametrize(
    "domains",
    [
        (None, None),
        (None,) * 7,
        tuple("aabb"),
        tuple("abab"),
        tuple("abbcca"),
        tuple("aaabbc"),
        ("a", None, "a", None),
    ],
)
def test_each_node_keeps_one_copy_and_it_lies_in_another_domain(
    domains: tuple[str | None, ...],
) -> None:
    nodes = members(*domains)
    there = partners(nodes)
    assert Counter(one.rank for one in there.values()) == Counter(one.rank for one in nodes)
    assert near(nodes) == 0 and warning(nodes) == ""


@pytest.mark.parametrize(("domains", "count"), [("aab", 1), ("aaab", 2), ("aaa", 3), ("aaaabb", 2)])
def test_where_a_domain_has_more_than_half_as_few_as_can_be_are_near_and_it_is_said(
    domains: str, count: int
) -> None:
    nodes = members(*domains)
    assert sorted(one.rank for one in partners(nodes).values()) == [one.rank for one in nodes]
    assert all(one.rank != rank for rank, one in partners(nodes).items())
    assert near(nodes) == count and "what fails with a domain" in warning(nodes)


def test_two_nodes_at_one_address_are_refused() -> None:
    nodes = [Member(0, "127.0.1.1:7077"), Member(2, "127.0.1.1:7077")]
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 are both at 127\.0\.1\.1:7077"):
        check(nodes)


def test_a_part_is_looked_for_where_it_goes_and_where_it_was() -> None:
    nodes = members(None, None, None)
    kept = {0: {RUN: {"node-00000": 1}}, 2: {OTHER: {"node-00000": 1}}, 4: {RUN: {"node-00000": 4}}}
    url, urls = places(nodes[0], nodes, RUN, kept)
    assert url == urls[0] == f"peer://10.0.0.1:7077/{RUN}/node-00000"
    assert urls[1:] == [f"peer://10.0.0.{n}:7077/{RUN}/node-00000" for n in (0, 2)]


def test_the_run_is_that_of_the_roots_else_of_the_copies_and_its_session_the_newest() -> None:
    copies = {RUN: {"node-00000": 3, "node-00002": 9}, OTHER: {"node-00000": 99}}
    assert joined({0: Known(), 2: Known(RUN, 5), 4: Known(held=copies)}) == Known(RUN, 9)
    assert joined({0: Known(), 2: Known(held={RUN: {"node-00000": 3}})}) == Known(RUN, 3)
    assert joined({0: Known(), 2: Known()}) == Known()
    with pytest.raises(ConfigError, match=r"steps of several runs: .*\(rank 0\), .*\(rank 2\)"):
        joined({0: Known(RUN, 1), 2: Known(OTHER, 1)})
    with pytest.raises(ConfigError, match="keep copies of several runs"):
        joined({0: Known(), 2: Known(held=copies)})


def test_what_a_directory_keeps_is_what_has_a_word_of_its_run(tmp_path: Path) -> None:
    for name, word in (
        (f"{RUN}/node-00002", json.dumps({"run": RUN, "session": 4})),
        (f"{RUN}/node-00004", "damaged"),
        (f"{RUN}/else", json.dumps({"session": 4})),
        ("run/node-00000", json.dumps({"session": 4})),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(word)
    assert held(tmp_path) == {RUN: {"node-00002": 4}}
    assert held(tmp_path / "none") == {}


def test_nodes_that_are_cut_otherwise_are_known_by_the_steps_in_their_roots(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert cut(root, RankInfo(1, 2, (1,))) == (None, False)
    store = make_store(root)
    save(store, 1, ranks=(1,), world=2)
    store.close()
    assert cut(root, RankInfo(1, 2, (1,))) == ("node-00001", False)
    assert cut(root, RankInfo(1, 3, (1,))) == ("node-00001", True)
    assert cut(root, RankInfo(0, 2, (0, 1))) == ("node-00001", True)


def test_all_places_are_asked_only_where_nodes_are_cut_otherwise() -> None:
    nodes = members(None, None)  # of ranks 0 and 2
    as_now = {RUN: {"node-00000": 1, "node-00002": 1}}
    saved, fresh = Known(RUN, was="node-00000"), Known()
    assert not are_others(nodes, RUN, {0: saved, 2: saved})
    assert not are_others(nodes, RUN, {0: saved, 2: fresh}), "a lost node has its part at a peer"
    assert are_others(nodes, RUN, {0: Known(RUN, was="node-00000", others=True), 2: fresh})
    assert not are_others(nodes, RUN, {0: fresh, 2: fresh}), "the first start"
    assert not are_others(nodes, RUN, {0: Known(held=as_now), 2: fresh})
    three = {RUN: {**as_now[RUN], "node-00004": 1}}
    assert are_others(nodes, RUN, {0: Known(held=three), 2: fresh})
    # Nothing is lost, or what was is cut otherwise now: what a fresh node is to have is nobody's part.
    before = {RUN: {"node-00000": 1, "node-00001": 1}}
    assert are_others(nodes, RUN, {0: Known(RUN, held=before, was="node-00000"), 2: fresh})
    assert are_others(nodes, RUN, {0: saved, 2: fresh}, ["node-00000", "node-00001"])
    assert not are_others(nodes, RUN, {0: saved, 2: fresh}, ["node-00000", "node-00002"])
    assert not are_others(nodes, RUN, {0: Known(RUN, held=as_now, was="node-00000"), 2: fresh})
    assert everywhere(nodes, RUN, {0: as_now, 2: {}}) == [
        f"peer://10.0.0.0:7077/{RUN}/root-of-node-00000",
        f"peer://10.0.0.1:7077/{RUN}/root-of-node-00002",
        f"peer://10.0.0.0:7077/{RUN}/node-00000",
        f"peer://10.0.0.0:7077/{RUN}/node-00002",
    ]


def test_all_places_of_a_part_are_told_also_where_a_machine_had_another_one_before() -> None:
    nodes = members(None, None)  # of ranks 0 and 2, at 10.0.0.0 and 10.0.0.1
    group = ["node-00000", "node-00001", "node-00002"]
    kept = {0: {"node-00001": [group], "node-00002": [group]}, 2: {"node-00001": [group]}}
    known = {0: Known(RUN, was="node-00001", others=True), 2: Known(RUN, was="node-00002")}
    found = before(nodes, RUN, known, kept)
    assert all(one.group == tuple(group) for one in found)
    assert {(one.part, one.root[7:15], one.kept[7:15]) for one in found} == {
        ("node-00001", "10.0.0.0", ""),
        ("node-00001", "", "10.0.0.0"),
        ("node-00001", "", "10.0.0.1"),
        ("node-00002", "10.0.0.1", ""),
        ("node-00002", "", "10.0.0.0"),
        ("node-00000", "", ""),
    }
