"""What can be lost without losing a step: worked out from what is known of its levels, and from nothing else.

    seen = known(root, plan, status)     what this node knows: its agent's last word, and the copies it keeps
    seen |= ask(plan)                    what the levels and the other nodes' copies say now
    can_lose(root, plan, seen)           a function of a step and its attempt

Invariant: what is not known is never counted as there. That a step is whole in the roots of the other nodes
is what its commit says: it is published in all of them, or in none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.levels.bring.bringing import steps
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.mailbox import Plan, Status
from ckpt_core.levels.tokens import TOKEN_VARIABLE
from ckpt_core.options import PARITY, PEER, scheme_of
from ckpt_core.store import device_of
from ckpt_core.system.files import Files

Seen = dict[str, dict[int, str]]
"""URL -> the steps that are whole there, with their attempts; a URL of which nothing is known is missing."""

_ANSWERS_S = 20.0


class Loss(IntEnum):
    """What may be lost, the least first."""

    NOTHING = 0
    MEMORY = 1
    DISK = 2
    THIS_NODE = 3
    ANY_NODE = 4
    ALL_NODES = 5


_TEXTS = {
    Loss.NOTHING: "nothing",
    Loss.MEMORY: "the memory",
    Loss.DISK: "the disk",
    Loss.THIS_NODE: "this node",
    Loss.ANY_NODE: "any 1 node",
    Loss.ALL_NODES: "all nodes",
}


@dataclass(frozen=True)
class CanLose:
    """What can be lost without losing a step of a root.

    Attributes:
        what: in plain words.
        nodes: how many keep one another's steps; 0: none do.
        domains: of so many any one can be lost with all of its nodes; 0: not known of any.
        lacking: parts whose copy is known not to be whole where it belongs.
        unknown: parts of whose copy nothing is known.
    """

    what: str
    nodes: int = 0
    domains: int = 0
    lacking: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def known(plan: Plan, status: Status | None) -> Seen:
    """What this node knows, without a connection. What cannot be read is not known."""
    ours = {level.url for level in plan.levels}
    seen = {one.url: one.steps for one in (status.levels if status else ()) if one.url in ours}
    if plan.serve is None:
        return seen
    for node in plan.nodes:
        if node.keeper == plan.part:
            kept = DirectoryFar(Path(plan.serve.dir, plan.run, node.part), files=Files())
            with suppress(CkptError):
                seen[node.copy] = kept.steps()
    return seen


def ask(plan: Plan) -> tuple[Seen, dict[str, str]]:
    """What all levels and all copies of all nodes say now; and of those that do not answer, why.

    Takes half a minute at most. With the token that the plan names, unless the environment names one.
    """
    if plan.serve is not None:
        os.environ.setdefault(TOKEN_VARIABLE, plan.serve.token_file)
    urls = [one.url for one in plan.levels if one.parity is None]
    urls = list(dict.fromkeys([*urls, *(one.copy for one in plan.nodes if one.copy)]))
    answers = steps({"levels": urls, "timeout_s": _ANSWERS_S}, lambda done, total: None)
    seen: Seen = {}
    silent: dict[str, str] = {}
    for url, answer in zip(urls, answers, strict=True):
        if "problem" in answer:
            silent[url] = answer["problem"]
        else:
            seen[url] = dict(answer["steps"])
    return seen, silent


def can_lose(root: Path, plan: Plan, seen: Seen) -> Callable[[int, str], CanLose | None]:
    """What tells of a step of a root, by its number and attempt; None: too little is known to tell."""
    copies = {node.copy for node in plan.nodes if node.copy}
    kinds = {one.url: _kind(root, one.url) for one in plan.levels if one.url not in copies}

    def tell(step: int, attempt: str) -> CanLose | None:
        there = [kinds[url] for url in kinds if seen.get(url, {}).get(step) == attempt]
        ring = _in_ring(plan, seen, step, attempt)
        best = max([Loss.NOTHING, *there, _loss(ring, plan)])
        is_told = kinds.keys() <= seen.keys() and plan.part not in ring.unknown
        if best is Loss.NOTHING and not is_told:
            return None
        domains = _domains(plan) if best is Loss.ANY_NODE and plan.nodes else 0
        return CanLose(
            _text(best, len(plan.nodes), domains) if not plan.parity else _parity_text(best, plan),
            len(plan.nodes),
            domains,
            ring.lacking,
            ring.unknown,
        )

    return tell


# -- inside ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ring:
    """Parts, by what is known of their copies of one step."""

    whole: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def _in_ring(plan: Plan, seen: Mapping[str, dict[int, str]], step: int, attempt: str) -> _Ring:
    found: dict[str, list[str]] = {"whole": [], "lacking": [], "unknown": []}
    for node in plan.nodes:
        if not node.copy:
            continue  # they keep parity
        there = seen.get(node.copy)
        is_there = there is not None and there.get(step) == attempt
        found["whole" if is_there else "unknown" if there is None else "lacking"].append(node.part)
    return _Ring(**{name: tuple(parts) for name, parts in found.items()})


def _loss(ring: _Ring, plan: Plan) -> Loss:
    if plan.part not in ring.whole:
        return Loss.NOTHING
    return Loss.THIS_NODE if ring.lacking or ring.unknown else Loss.ANY_NODE


def _domains(plan: Plan) -> int:
    """How many there are, if every node is in one and every copy in another than its node."""
    of = {node.part: node.domain for node in plan.nodes}
    if (
        plan.parity
        or None in of.values()
        or any(of[node.part] == of.get(node.keeper) for node in plan.nodes)
    ):
        return 0
    return len(set(of.values()))


def _kind(root: Path, url: str) -> Loss:
    """What the steps of a root survive at a level where they are whole."""
    scheme = scheme_of(url)
    if scheme is not None:
        # Named by hand, it has the steps of all nodes: the loss of this one, or of that one.
        # Of parity the agent says that it is there when all nodes of the group keep it.
        return Loss.ANY_NODE if scheme in (PEER, PARITY) else Loss.ALL_NODES
    path, files = Path(url), Files()
    try:
        if device_of(path) == device_of(root):
            return Loss.NOTHING
    except OSError:
        return Loss.NOTHING
    if not files.is_local(path):
        return Loss.THIS_NODE
    return Loss.MEMORY if files.in_memory(root) else Loss.DISK


def _parity_text(loss: Loss, plan: Plan) -> str:
    if loss is not Loss.ANY_NODE:
        return _TEXTS[loss]
    k, m = map(int, plan.parity.split("+"))
    nodes = f"{k + m} nodes" if len(plan.nodes) == k + m else f"the {k + m} nodes of its group"
    return f"any {m} of {nodes}"


def _text(loss: Loss, nodes: int, domains: int) -> str:
    if loss is not Loss.ANY_NODE or not nodes:
        return _TEXTS[loss]
    text = f"any 1 of {nodes} nodes"
    return f"{text}, any 1 of {domains} domains" if domains else text
