"""A cluster whose nodes are served: what a command finds that is started beside the agents of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ckpt_core.levels import Plan, read_keys, write_plan
from ckpt_core.levels.mailbox import Node, Serve
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.holds import hold
from ckpt_core.levels.parity.objects import parity_key, root_key
from ckpt_core.levels.parity.opening import url_of
from ckpt_core.levels.serving.binding import Address
from ckpt_core.levels.serving.server import PeerServer
from ckpt_core.options import Level
from tests.levels.parity.clusters import STEP, Cluster
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.peer import TOKEN
from tests.store.harness import QuickFiles

RUN = "ab" * 16


class ServedCluster(Cluster):
    """Each node keeps its parity where an agent of it would."""

    def __init__(self, folder: Path, shape: Shape, *, sizes: Sequence[int] = ()) -> None:
        super().__init__(folder, shape, sizes=sizes)
        self.servers: list[PeerServer] = []

    def dir(self, n: int) -> Path:
        return self.folder / f"dir-{n}"

    def kept(self, n: int) -> Path:
        return self.dir(n) / parity_key(RUN, self.group.parts[n])

    def end(self, n: int) -> None:
        """It does not answer any more."""
        self.servers[n].close()

    def parity(self, n: int) -> Path:
        return self.kept(n) / f"parity-{STEP:012d}"


@contextmanager
def served(
    folder: Path, shape: Shape, *, domains: tuple[str | None, ...] = ()
) -> Iterator[ServedCluster]:
    """A group with one step and its parity, all nodes of which answer; each root has its plan."""
    cluster = ServedCluster(folder, shape)
    cluster.encode()
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    with ExitStack() as stack:
        stack.enter_context(in_environment({"CKPT_PEER_TOKEN_FILE": str(token)}))
        nodes = []
        for n, part in enumerate(cluster.group.parts):
            keys, where = read_keys(str(token)), Address("127.0.0.1", 0)
            server = stack.enter_context(PeerServer(cluster.dir(n), keys, where))
            cluster.servers.append(server)
            server.show(root_key(RUN, part), cluster.root(n))
            domain = domains[n] if domains else None
            nodes.append(Node(part, str(server.address), domain, group=0))
        for n, node in enumerate(nodes):
            text = f"{shape.k}+{shape.m}"
            level = replace(
                Level(parity=text, bind="lo:0", dir=cluster.dir(n)), url=url_of(cluster.root(n))
            )
            serve = Serve(str(cluster.dir(n)), node.address, str(token), root_key(RUN, node.part))
            asks = cluster.group.parts
            plan = Plan(RUN, 1, "t", (level,), serve=serve, nodes=tuple(nodes), part=node.part)
            write_plan(cluster.root(n), replace(plan, parity=text, asks=asks))
            assert hold(cluster.root(n), STEP, files=QuickFiles())
        yield cluster
