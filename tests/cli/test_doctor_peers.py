"""`doctor`: nodes that keep one another's steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ckpt_core.cli.doctor.peers import check_peers
from ckpt_core.levels import Plan, read_plan, write_plan
from ckpt_core.levels.mailbox import Serve
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.trainer.ring import Member, nodes
from tests.levels.parity.serving import served
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import PeerServer

RUN = "ab" * 16


def plan_of(server: PeerServer, *hosts: tuple[str, str | None]) -> Plan:
    """Of nodes at these addresses, of which the first is this one."""
    members = [Member(n, f"{host}:{server.port}", domain) for n, (host, domain) in enumerate(hosts)]
    serve = Serve(str(server.kept), members[0].address, str(server.token))
    return Plan(RUN, 1, "t", (), nodes=nodes(members, RUN), part="node-00000", serve=serve)


def found(root: Path, plan: Plan) -> list[tuple[str, str]]:
    write_plan(root, plan)
    return [(one.level, one.found) for one in check_peers(root)]


@needs_store
def test_where_copies_are_and_whether_all_answer_is_told(
    ckpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.levels.losses._ANSWERS_S", 3.0)
    assert check_peers(ckpts) == [] == check_peers(None)
    with PeerServer() as server, in_environment(server.environ()):
        near = plan_of(server, ("127.0.0.1", "x"), ("127.0.0.1", "x"))
        (domain, host, answers) = found(ckpts, near)
        assert domain[0] == "warning" and "node-00000, node-00001 are in the domains" in domain[1]
        assert host[0] == "warning" and "are on the machines of their nodes" in host[1]
        assert answers[0] == "ok" and "all answer" in answers[1]
        apart = plan_of(server, ("127.0.0.1", "x"), ("127.0.0.2", "y"))
        told = found(ckpts, apart)
        assert told[0][0] == "ok" and "2 nodes in 2 domains: each copy is elsewhere" in told[0][1]
        assert [level for level, _ in told[1:]] == ["warning"], "nobody listens at 127.0.0.2"
        assert "the copy of node-00000 does not answer" in told[1][1]
        monkeypatch.setattr("ckpt_core.cli.doctor.peers.is_there", lambda name: False)
        assert ("note", "copies are summed by SHA-256, most of what a byte costs") in found(
            ckpts, apart
        )
        assert near.serve is not None
        lost = dataclasses.replace(near.serve, token_file=str(server.home / "none"))
        ((level, text),) = found(ckpts, dataclasses.replace(near, serve=lost))
        assert level == "problem" and "cannot be read" in text


@needs_store
def test_groups_that_keep_parity_are_looked_at_and_how_fast_it_is_computed(tmp_path: Path) -> None:
    with served(tmp_path, Shape(2, 1), domains=("x", "x", "y")) as cluster:
        root = cluster.root(0)
        plan = read_plan(root)
        assert plan is not None
        told = found(root, plan)
        assert [level for level, _ in told[:2]] == ["warning", "warning"]
        assert "2 nodes of the group node-00000, node-00001, node-00002 are in one" in told[0][1]
        assert "3 nodes of the group" in told[1][1] and "on one machine" in told[1][1]
        assert "2+1 by " in told[2][1] and "for each second of a core" in told[2][1]
        assert told[3:] == [("ok", "the nodes of this group: all answer")]
        apart = [
            dataclasses.replace(node, domain=None, address=f"127.0.0.{n + 1}:9")
            for n, node in enumerate(plan.nodes)
        ]
        (placed, _, *silent) = found(root, dataclasses.replace(plan, nodes=tuple(apart)))
        assert placed == ("ok", "3 nodes in 1 group of 2+1: any 1 of each may be lost")
        assert [level for level, _ in silent] == ["warning", "warning"]
        assert "node-00001 does not answer" in silent[0][1]
