"""Nodes that keep one another's steps: do copies or parity outlive what they are for, and do all answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt_core.cli.doctor.finding import Finding, note, ok, problem, warning
from ckpt_core.cli.doctor.parity import check_parity
from ckpt_core.cli.doctor.versions import is_there
from ckpt_core.errors import CkptError
from ckpt_core.levels import Plan, ask, parse_address, read_keys, read_plan
from ckpt_core.store import device_of
from ckpt_core.system.files import Files
from ckpt_core.units import count_text

_CHECK = "peers"


def check_peers(root: Path | None) -> list[Finding]:
    """The ring of a root's plan, as its last Checkpointer has found it. Changes nothing."""
    plan = None if root is None else read_plan(root)
    if root is None or plan is None or plan.serve is None or not plan.nodes:
        return []
    try:
        read_keys(plan.serve.token_file)
    except CkptError as exc:
        return [problem(_CHECK, str(exc), "without it nothing is sent to peers, nor kept for them")]
    disks = _disks(root, Path(plan.serve.dir))
    if plan.parity:
        return [*check_parity(plan), *disks]
    return [*_placement(plan), *disks, *_sums(), *_answers(plan)]


def _placement(plan: Plan) -> Iterator[Finding]:
    """Nodes whose copy fails together with them."""
    of = {node.part: node for node in plan.nodes}
    near = [
        node.part
        for node in plan.nodes
        if node.domain is not None and node.domain == of[node.keeper].domain
    ]
    if near:
        text = f"the copies of {', '.join(near)} are in the domains of their nodes"
        yield warning(
            _CHECK, text, "spread the nodes, so that no domain has more than half of them"
        )
    hosts = {node.part: parse_address(node.address).host for node in plan.nodes}
    same = [node.part for node in plan.nodes if hosts[node.part] == hosts[node.keeper]]
    if same:
        text = f"the copies of {', '.join(same)} are on the machines of their nodes"
        yield warning(_CHECK, text, "what loses the machine loses both: one node for each machine")
    if not near and not same:
        domains = {node.domain for node in plan.nodes} - {None}
        known = f" in {count_text(len(domains), 'domain')}" if domains else ", without domains"
        yield ok(_CHECK, f"{count_text(len(plan.nodes), 'node')}{known}: each copy is elsewhere")


def _disks(root: Path, folder: Path) -> Iterator[Finding]:
    """A filesystem that nodes share holds their roots and all copies."""
    place = next(one for one in (folder, *folder.parents) if one.is_dir())
    if not Files().is_local(place) and device_of(place) == device_of(root):
        text = f"{root} and what is kept for other nodes in {folder} are on one network filesystem"
        yield warning(
            _CHECK, text, "what loses it loses both: name a disk of this node, or its memory"
        )


def _sums() -> Iterator[Finding]:
    """By what the bytes on their way to a peer are known to be those that were sent."""
    if not is_there("cryptography"):
        advice = "AES-GMAC takes a tenth of that: pip install 'ckpt-core[remote]'"
        yield note(_CHECK, "copies are summed by SHA-256, most of what a byte costs", advice)


def _answers(plan: Plan) -> Iterator[Finding]:
    """Whether every copy can be asked, as each node would after a loss."""
    _, silent = ask(plan)
    lacking = {node.part: silent[node.copy] for node in plan.nodes if node.copy in silent}
    for part, why in lacking.items():
        text = f"the copy of {part} does not answer: {why}"
        yield warning(_CHECK, text, "a node serves while its job runs, and a short while after it")
    if not lacking:
        yield ok(_CHECK, f"the copies of {len(plan.nodes)} nodes: all answer")
