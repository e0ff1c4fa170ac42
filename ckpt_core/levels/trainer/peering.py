"""The nodes of a job find out who keeps whose copies: all of them, or none goes on.

know      which run it is, wherever some node knows of it
meet      where each node listens, and so where the copies of this one go, and may be already
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from ckpt_core.coordination import Coordination
from ckpt_core.errors import ConfigError, PersistError
from ckpt_core.levels.agreed import Agreed, opened, read_agreed, write_agreed
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.far.opening import check_extra
from ckpt_core.levels.mailbox import (
    AGENT_LOG,
    LEVELS,
    Node,
    Plan,
    Serve,
    Source,
    read_plan,
    read_status,
)
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.objects import root_key
from ckpt_core.levels.parity.opening import url_of
from ckpt_core.levels.serving.binding import ALL, of_interface, parse_address
from ckpt_core.levels.tokens import TOKEN_VARIABLE, read_keys
from ckpt_core.levels.trainer import grouping, ring
from ckpt_core.levels.trainer.agreeing import Agreeing, Vote
from ckpt_core.levels.trainer.awaiting import Attempts
from ckpt_core.levels.trainer.joining import Claim, of_nodes, read_run
from ckpt_core.levels.trainer.places import overlap
from ckpt_core.levels.trainer.ring import Held, Known, Member
from ckpt_core.levels.wants import meets
from ckpt_core.options import PARITY, PEERS, Level
from ckpt_core.store import committed_steps
from ckpt_core.system.files import Files, advice

_log = logging.getLogger("ckpt_core")

_SERVES_WITHIN_S = 30.0
_LOOK_S = 0.02
_LEAST_BACKLOG = 2
"""As many steps as a root keeps: after a loss any of them may be the newest that all nodes have."""


class Peers:
    """`Level(peers=1)`, or `Level(parity=...)`, of one Checkpointer, as one rank has it.

    Attributes:
        url: where the copies of this node go; "peers" (or "parity") until all have met.
        name: what people call it: "peers" or "parity".
        parity: whether it is parity that nodes keep.
        apart, restored: see `Plan`.

    Args:
        root: of this node.
        level: as it was given.
        others: URLs of the other levels.

    Raises:
        ConfigError: there are no other nodes with roots of their own, or the client is missing.
    """

    def __init__(
        self,
        root: Path,
        level: Level,
        coordination: Coordination,
        *,
        others: Sequence[str],
        files: Files,
        timeout_s: float,
    ) -> None:
        self._root, self._level, self._others = root, level, others
        self._coordination, self._timeout_s = coordination, timeout_s
        self.parity = level.parity is not None
        self.name = PARITY if self.parity else PEERS
        self._what = f"parity={level.parity!r}" if self.parity else "peers=1"
        self.url = self.name
        self._asks: tuple[str, ...] = ()
        self._before: tuple[Source, ...] = ()
        self.restored = ""
        self.apart: frozenset[str] = frozenset()
        self._sources: list[str] = []
        self._known_of: dict[int, Known] = {}
        self._held: dict[int, Held] = {}
        self._found: list[Any] = []
        self._files = files
        self.agreeing: Agreeing | None = None
        self._serve: Serve | None = None
        self._nodes: tuple[Node, ...] = ()
        self._part = ""
        if len(coordination.info.members) == coordination.info.world_size:
            raise ConfigError(
                f"levels: {self._what} needs at least {self._least} nodes, each with a root of its own: give "
                'coordination=TorchStore.from_env(roots="node"), or name another node\'s disk: peer://...'
            )
        check_extra(self._what)
        if self.parity and importlib.util.find_spec("numpy") is None:
            raise ConfigError(f"{self._what} needs NumPy: pip install 'ckpt-core[parity]'")

    @classmethod
    def among(
        cls,
        levels: Sequence[Level],
        root: Path,
        coordination: Coordination,
        *,
        files: Files,
        timeout_s: float,
    ) -> Self | None:
        """That of a Checkpointer with these levels; None: it has none."""
        found = [level for level in levels if level.of_nodes]
        if len(found) > 1:
            raise ConfigError("levels: peers and parity are both given: give one of them")
        if not found:
            return None
        others = [level.url for level in levels if not level.of_nodes]
        return cls(root, found[0], coordination, others=others, files=files, timeout_s=timeout_s)

    def know(self) -> Known:
        """The run that the job goes on with. Called on every rank, with the root locked.

        Raises:
            ConfigError: this node cannot keep copies, or nobody can tell which run it is.
            CommitError, CoordinationTimeout: another rank's error.
        """
        told = of_nodes(
            lambda: self._known().to_json(),
            self._coordination,
            "peers",
            timeout_s=self._timeout_s,
        )
        known = {rank: Known.from_json(one) for rank, one in told.items()}
        self._check_count(len(known))
        self._known_of = known
        self._held = {rank: one.held for rank, one in known.items()}
        self._found = [one.agreed for one in known.values() if one.agreed is not None]
        return ring.joined(known)

    def planned(self, plan: Plan) -> Plan:
        """What the agent of this root is to do; until all have met: listen, and go on as before."""
        if self._serve is not None:
            # The others read it: to make parity, and to repair what they keep of it.
            self._serve = dataclasses.replace(self._serve, shows=root_key(plan.run, self._mine))
        if self._sources:
            return dataclasses.replace(
                plan,
                serve=self._serve,
                nodes=self._nodes,
                part=self._part,
                parity=self._level.parity or "",
                asks=self._asks,
                before=self._before,
                apart=tuple(sorted(self.apart)),
                restored=self.restored,
            )
        last = read_plan(self._root)
        levels = [level for level in plan.levels if not level.of_nodes]
        if last is None or last.run != plan.run:
            return dataclasses.replace(plan, levels=tuple(levels), serve=self._serve)
        urls = {level.url for level in levels}
        levels += [one for one in last.levels if one.url in last.own and one.url not in urls]
        own = (*plan.own, *(url for url in last.own if url not in plan.own))
        return dataclasses.replace(plan, levels=tuple(levels), own=own, serve=self._serve)

    def go_on_from(self, save: Copy, attempts: Attempts) -> bool:
        """All ranks do; whether the plan is another one with that."""
        if not self._sources:
            return False
        self.restored = save.attempt
        if self.agreeing is not None:
            self.agreeing.goes_on_from((save.step, save.attempt))
        if self.parity:
            beyond = [one for one in committed_steps(self._root) if one > save.step]
            self.apart = frozenset(attempts.of(beyond).values())
        return True

    def and_others(self, urls: Sequence[str]) -> list[str]:
        """The same, and where else copies of this node may be: with whom they went to in an earlier ring."""
        found: list[str] = []
        for url in urls:
            found += self._sources if url == self.url else [url]
        return found

    def meet(self, claim: Claim) -> Level:
        """Where the copies of this node go. Called on every rank, once the agents are at work.

        Args:
            claim: with the token of the plan that the agent goes by.

        Raises:
            ConfigError: this node cannot listen where it is to, or two are at one address.
            PersistError: its agent does not say where it listens, or its root cannot be written to.
            CommitError, CoordinationTimeout: another rank's error.
        """
        agreed = self._agreed(claim)
        told = of_nodes(
            lambda: [
                self._ready(claim.token, agreed),
                self._level.domain,
                self._kept_here(claim.run),
            ],
            self._coordination,
            "ring",
            timeout_s=self._timeout_s,
        )
        members = [Member(rank, *one[:2]) for rank, one in told.items()]
        ring.check(members)
        if self.parity:
            level = self._grouped(claim.run, members, {rank: one[2] for rank, one in told.items()})
        else:
            level = self._placed(claim.run, members)
        if self._coordination.info.leads:
            self.agreeing = Agreeing(self._root, agreed, self.url, files=self._files)
        return level

    def keeps(self, committed: Sequence[int]) -> Collection[int]:
        """Steps of the root that no node gives away; until all have met, all of them."""
        return committed if self.agreeing is None else self.agreeing.keeps(committed)

    def vote(self, step: int, attempt: str) -> Vote | None:
        """What is said with the vote for a step; None: this rank does not lead."""
        if self.agreeing is None:
            return None
        return Vote(self.agreeing, (step, attempt) if meets(step, self._level) else None)

    # -- inside ----------------------------------------------------------------------------------

    def _known(self) -> Known:
        """What this node knows, once it is sure that it can keep copies."""
        level = self._level
        assert level.bind is not None and level.dir is not None
        address = parse_address(level.bind, name="bind")
        if address.host == ALL:
            raise ConfigError(
                f"bind={level.bind!r}: the other nodes reach this one at one address: name it, or the "
                f"interface that has it"
            )
        token_file = os.environ.get(TOKEN_VARIABLE, "")
        if not token_file:
            raise ConfigError(
                f"{self._what}: the nodes need a token that they share: let {TOKEN_VARIABLE} name its file "
                f"on each"
            )
        read_keys(token_file)
        folder = os.path.realpath(level.dir)
        for place in (str(self._root), *self._others):
            if overlap(folder, place):
                what = "the level" if place in self._others else "the root"
                raise ConfigError(
                    f"dir={level.dir!r} is {what} {place}, or lies inside it or above it: each has a place "
                    f"of its own"
                )
        self._serve = Serve(str(level.dir), str(of_interface(address)), os.path.abspath(token_file))
        run, before = read_run(self._root), read_plan(self._root)
        session = before.session if before is not None and before.run == run else 0
        agreed = None if run is None else read_agreed(self._root, run)
        told = None if agreed is None else agreed.to_json()
        was, others = ring.cut(self._root, self._coordination.info)
        return Known(run, session, ring.held(Path(folder)), told, was=was, others=others)

    def _agreed(self, claim: Claim) -> Agreed:
        found = [one for one in map(Agreed.from_json, self._found) if one.run == claim.run]
        return opened(found, claim.run, claim.session)

    def _ready(self, token: str, agreed: Agreed) -> str:
        """Where the agent of this root listens, once this node keeps what all keep."""
        try:
            write_agreed(self._root, agreed, files=self._files)
        except OSError as exc:
            raise PersistError(
                f"what the nodes keep could not be noted in {self._root / LEVELS}: {exc.strerror}. Committed "
                f"steps are safe. {advice(exc)}",
                path=self._root,
            ) from exc
        return self._address(token)

    def _address(self, token: str) -> str:
        """Where the agent of this root listens."""
        deadline = time.monotonic() + _SERVES_WITHIN_S
        while time.monotonic() < deadline:
            status = read_status(self._root)
            if status is not None and status.token == token:
                if status.serving:
                    return status.serving
                if status.refused:
                    raise ConfigError(
                        f"{self._what}: {status.refused}. (A job that has just ended keeps copies for "
                        f"others for a minute and a half more.)"
                    )
            time.sleep(_LOOK_S)
        raise PersistError(
            f"the agent of {self._root} does not say where it listens for other nodes: see "
            f"{self._root / LEVELS / AGENT_LOG}. Committed steps are safe",
            path=self._root,
        )

    @property
    def _mine(self) -> str:
        """The part of this node."""
        return Member(self._coordination.info.members[0], "").part

    @property
    def _least(self) -> int:
        """Nodes that there have to be."""
        return Shape.parse(self._level.parity).nodes if self._level.parity else 2

    def _check_count(self, nodes: int) -> None:
        if self.parity and nodes % self._least:
            raise ConfigError(
                f"levels: {self._what} makes groups of {self._least} nodes, and of {nodes} some are left "
                f"over: start a multiple of {self._least} nodes, or name another shape"
            )

    def _kept_here(self, run: str) -> dict[str, list[list[str]]]:
        """Whose parity this node keeps, from earlier starts too."""
        if not self.parity or self._serve is None:
            return {}
        return grouping.kept_here(Path(self._serve.dir), run)

    def _grouped(
        self, run: str, members: Sequence[Member], kept: dict[int, grouping.Kept]
    ) -> Level:
        assert self._level.parity is not None
        shape = Shape.parse(self._level.parity)
        if self._coordination.info.rank == 0 and (text := grouping.warning(members, shape)):
            _log.warning("%s", text)
        self._nodes, self._part = grouping.nodes(members, shape), self._mine
        self._asks = grouping.asked(self._part, self._nodes, [*kept.values()])
        self.url = url_of(self._root)
        self._sources = [self.url]
        if ring.are_others(members, run, self._known_of, grouping.parts(kept)):
            # Alone: what is called as this part may be another one.
            self._before = grouping.before(members, run, self._known_of, kept)
            self._sources = [f"{PEERS}://{self._root}"]
        return self._settled(next(one for one in members if one.part == self._part))

    def _placed(self, run: str, members: Sequence[Member]) -> Level:
        if self._coordination.info.rank == 0 and (text := ring.warning(members)):
            _log.warning("%s", text)
        first = self._coordination.info.members[0]
        mine = next(one for one in members if one.rank == first)
        self.url, self._sources = ring.places(mine, members, run, self._held)
        if ring.are_others(members, run, self._known_of):
            self._asks = tuple(ring.everywhere(members, run, self._held))
            self._sources.append(f"{PEERS}://{self._root}")
        self._nodes, self._part = ring.nodes(members, run), mine.part
        return self._settled(mine)

    def _settled(self, mine: Member) -> Level:
        if self._serve is not None:
            # With the port that it has: an agent that is started anew is found where this one was.
            self._serve = dataclasses.replace(self._serve, bind=mine.address)
        level = self._level
        backlog = max(level.backlog, _LEAST_BACKLOG)
        if self.parity:
            return dataclasses.replace(level, url=self.url, backlog=backlog)
        return Level(
            self.url,
            every=level.every,
            keep_last=level.keep_last,
            keep_every=level.keep_every,
            bandwidth=level.bandwidth,
            backlog=backlog,
        )


def number_of(level: int | str, levels: Sequence[Level], peers: Peers | None) -> int:
    """Which level is meant, counted from 0.

    Raises:
        ConfigError: none is; says which there are.
    """
    urls = [one.url for one in levels]
    if isinstance(level, int) and not isinstance(level, bool) and 1 <= level <= len(urls):
        return level - 1
    if isinstance(level, str):
        named = peers is not None and level == peers.name
        url = peers.url if peers is not None and named else level
        if url in urls or (not named and (url := Level(level).url) in urls):
            return urls.index(url)
    known = ", ".join(f"{number} ({url})" for number, url in enumerate(urls, 1))
    raise ConfigError(f"level={level!r} is no level of this Checkpointer: its levels are {known}")
