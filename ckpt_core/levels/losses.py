"""What can be lost without losing a step: worked out from what is known of its levels, and from nothing else.

    seen = known(plan, status)           what this node knows: its agent's last word, and what it keeps
    seen, silent = ask(plan)             what the levels, and the other nodes of what they keep, say now
    can_lose(root, plan, seen)           a function of a step and its attempt

Invariant: what is not known is never counted as there. That a step is whole in the roots of the other nodes
is what its commit says: it is published in all of them, or in none. That all nodes of a group keep their
parity is what the agent found when it was made: without asking them it is told as something that was.
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
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.mailbox import Plan, Status
from ckpt_core.levels.parity.objects import Group
from ckpt_core.levels.parity.opening import group_of, kept_url, place_of, root_url
from ckpt_core.levels.tokens import TOKEN_VARIABLE
from ckpt_core.options import PEER, scheme_of
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
        lacking: parts whose copy is known not to be whole where it belongs; with parity, those of nodes that
            have not the step, or not their parity of it.
        unknown: parts of whose copy, or parity, nothing is known.
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
    return seen | _own_parity(plan)


def ask(plan: Plan) -> tuple[Seen, dict[str, str]]:
    """What all levels, all copies of all nodes, and all nodes of the group of this one say now; and of those
    that do not answer, why.

    Takes half a minute at most. With the token that the plan names, unless the environment names one.
    """
    if plan.serve is not None:
        os.environ.setdefault(TOKEN_VARIABLE, plan.serve.token_file)
    urls = [one.url for one in plan.levels if one.parity is None]
    group = group_of(plan)
    others = [part for part in group.parts if part != plan.part] if group is not None else []
    parity = [kept_url(plan, part) for part in others]
    roots = [root_url(plan, part) for part in others]
    copies = [one.copy for one in plan.nodes if one.copy]
    urls = list(dict.fromkeys([*urls, *copies, *roots, *parity]))
    request = {"levels": urls, "parity": parity, "timeout_s": _ANSWERS_S}
    answers = steps(request, lambda done, total: None)
    seen = _own_parity(plan)
    silent: dict[str, str] = {}
    for url, answer in zip(urls, answers, strict=True):
        if "problem" in answer:
            silent[url] = answer["problem"]
        else:
            seen[url] = dict(answer["steps"])
    if group is not None and not silent.keys() & {*roots, *parity}:
        there = seen[roots[0]].items()
        whole = [
            one
            for one in there
            if len(_in_group(group, plan, seen, *one).whole) == len(group.parts)
        ]
        seen |= {one.url: dict(whole) for one in plan.levels if one.parity}
    return seen, silent


def can_lose(root: Path, plan: Plan, seen: Seen) -> Callable[[int, str], CanLose | None]:
    """What tells of a step of a root, by its number and attempt; None: too little is known to tell."""
    copies = {node.copy for node in plan.nodes if node.copy}
    kinds = {
        one.url: _kind(root, one.url)
        for one in plan.levels
        if one.url not in copies and one.parity is None
    }
    group = group_of(plan)

    def tell(step: int, attempt: str) -> CanLose | None:
        there = [kinds[url] for url in kinds if seen.get(url, {}).get(step) == attempt]
        if group is None:
            kept = _by_copies(plan, seen, step, attempt)
        else:
            kept = _by_parity(group, plan, seen, step, attempt)
        best = max([Loss.NOTHING, *there, kept.loss])
        if best is Loss.NOTHING and not (kept.is_told and kinds.keys() <= seen.keys()):
            return None
        nodes, ring = len(plan.nodes), kept.ring
        domains = _domains(plan) if best is Loss.ANY_NODE and nodes else 0
        text = kept.text if best is Loss.ANY_NODE and kept.text else _text(best, nodes, domains)
        return CanLose(text, nodes, domains, ring.lacking, ring.unknown)

    return tell


# -- inside ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kept:
    """What the other nodes mean for one step.

    Attributes:
        is_told: enough is known to say that nothing may be lost, where that is so.
        text: what is said where any node may be lost; "": as of copies.
    """

    ring: _Ring
    loss: Loss
    is_told: bool
    text: str = ""


@dataclass(frozen=True)
class _Ring:
    """Parts, by what is known of their copies of one step, or of the step and its parity at their nodes."""

    whole: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def _by_copies(plan: Plan, seen: Mapping[str, dict[int, str]], step: int, attempt: str) -> _Kept:
    ring = _in_ring(plan, seen, step, attempt)
    waits = any(one.parity and one.url not in seen for one in plan.levels)
    return _Kept(ring, _loss(ring, plan), plan.part not in ring.unknown and not waits)


def _in_ring(plan: Plan, seen: Mapping[str, dict[int, str]], step: int, attempt: str) -> _Ring:
    found: dict[str, list[str]] = {"whole": [], "lacking": [], "unknown": []}
    for node in plan.nodes:
        if not node.copy:
            continue  # they keep parity
        there = seen.get(node.copy)
        is_there = there is not None and there.get(step) == attempt
        found["whole" if is_there else "unknown" if there is None else "lacking"].append(node.part)
    return _Ring(**{name: tuple(parts) for name, parts in found.items()})


def _own_parity(plan: Plan) -> Seen:
    """What this node keeps of parity."""
    if plan.serve is None or group_of(plan) is None:
        return {}
    with suppress(CkptError):
        kept = DirectoryFar(place_of(plan), files=Files()).directories()
        return {kept_url(plan, plan.part): {one.step: one.attempt for one in kept.values()}}
    return {}


def _in_group(
    group: Group, plan: Plan, seen: Mapping[str, dict[int, str]], step: int, attempt: str
) -> _Ring:
    """Of the nodes of a group; that this one has the step is why it is asked about."""
    parity = group.copy(Copy(step, attempt)).attempt
    found: dict[str, list[str]] = {"whole": [], "lacking": [], "unknown": []}
    for part in group.parts:
        asked = [(seen.get(kept_url(plan, part)), parity)]
        if part != plan.part:
            asked.append((seen.get(root_url(plan, part)), attempt))
        if any(there is not None and there.get(step) != one for there, one in asked):
            found["lacking"].append(part)
        else:
            is_known = all(there is not None for there, _ in asked)
            found["whole" if is_known else "unknown"].append(part)
    return _Ring(**{name: tuple(parts) for name, parts in found.items()})


def _by_parity(
    group: Group, plan: Plan, seen: Mapping[str, dict[int, str]], step: int, attempt: str
) -> _Kept:
    ring = _in_group(group, plan, seen, step, attempt)
    words = [seen[one.url] for one in plan.levels if one.parity and one.url in seen]
    was_whole = any(word.get(step) == attempt for word in words)
    # Whoever lacks anything counts as gone, and so does one of which nothing is known now, unless all had
    # theirs when the agent looked.
    spare = group.shape.m - len(ring.lacking) - (0 if was_whole else len(ring.unknown))
    loss = Loss.NOTHING
    if spare >= 0 and plan.part in ring.lacking:
        loss = Loss.THIS_NODE  # what it lacks goes with it
    if spare > 0:
        loss = Loss.ANY_NODE
    text = _parity_text(group, plan, spare, was=was_whole and bool(ring.unknown))
    return _Kept(ring, loss, bool(words) or not ring.unknown, text if spare > 0 else "")


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
        return Loss.ANY_NODE if scheme == PEER else Loss.ALL_NODES
    path, files = Path(url), Files()
    try:
        if device_of(path) == device_of(root):
            return Loss.NOTHING
    except OSError:
        return Loss.NOTHING
    if not files.is_local(path):
        return Loss.THIS_NODE
    return Loss.MEMORY if files.in_memory(root) else Loss.DISK


def _parity_text(group: Group, plan: Plan, spare: int, *, was: bool) -> str:
    count = group.shape.nodes
    nodes = f"{count} nodes" if len(plan.nodes) == count else f"the {count} nodes of its group"
    return f"any {spare} of {nodes}{', when made' if was else ''}"


def _text(loss: Loss, nodes: int, domains: int) -> str:
    if loss is not Loss.ANY_NODE or not nodes:
        return _TEXTS[loss]
    text = f"any 1 of {nodes} nodes"
    return f"{text}, any 1 of {domains} domains" if domains else text
