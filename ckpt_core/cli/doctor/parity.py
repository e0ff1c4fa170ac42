"""Groups of nodes that keep parity: how they are made, what computes it how fast, and do all answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ckpt_core.cli.doctor.finding import Finding, note, ok, problem, warning
from ckpt_core.levels import Plan, parity_speed, parse_address, silent_nodes
from ckpt_core.units import count_text, size_text

_CHECK = "parity"
_INSTALL = "pip install 'ckpt-core[parity]'"


def check_parity(plan: Plan) -> Iterator[Finding]:
    """The groups of a root's plan, as its last Checkpointer has found them. Changes nothing."""
    yield from _placement(plan)
    yield from _speed(plan.parity)
    yield from _answers(plan)


def _placement(plan: Plan) -> Iterator[Finding]:
    """Groups of which more nodes fail together than may be lost."""
    most = int(plan.parity.partition("+")[2])
    groups = sorted({node.group for node in plan.nodes if node.group is not None})
    found: list[Finding] = []
    for group in groups:
        mine = [node for node in plan.nodes if node.group == group]
        parts = ", ".join(node.part for node in mine)
        domains = Counter(node.domain for node in mine if node.domain is not None)
        if max(domains.values(), default=0) > most:
            text = f"{max(domains.values())} nodes of the group {parts} are in one domain"
            advice = f"spread the nodes over more domains: {most} of a group may be lost"
            found.append(warning(_CHECK, text, advice))
        hosts = Counter(parse_address(node.address).host for node in mine)
        if max(hosts.values()) > most:
            text = f"{max(hosts.values())} nodes of the group {parts} are on one machine"
            advice = "what loses the machine loses them together: one node for each machine"
            found.append(warning(_CHECK, text, advice))
    yield from found
    if not found:
        nodes, count = count_text(len(plan.nodes), "node"), count_text(len(groups), "group")
        yield ok(_CHECK, f"{nodes} in {count} of {plan.parity}: any {most} of each may be lost")


def _speed(shape: str) -> Iterator[Finding]:
    """What counts, and how fast: one core, in memory that is there."""
    try:
        by, speed = parity_speed(shape)
    except ImportError:
        yield problem(_CHECK, "NumPy is missing, without which there is no parity", _INSTALL)
        return
    text = f"{shape} by {by}: {size_text(int(speed))} of data for each second of a core"
    yield ok(_CHECK, text) if by == "ISA-L" else note(_CHECK, text, f"ISA-L is faster: {_INSTALL}")


def _answers(plan: Plan) -> Iterator[Finding]:
    """Whether the roots and the parity of this group can be read, as after a loss."""
    silent = silent_nodes(plan)
    for part, why in silent.items():
        text = f"{part} does not answer: {why}"
        yield warning(_CHECK, text, "a node serves while its job runs, and a short while after it")
    if not silent:
        yield ok(_CHECK, "the nodes of this group: all answer")
