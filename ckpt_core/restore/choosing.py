"""Which step to restore: the newest that every rank has or can have, and what to say when there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ckpt_core.coordination import Json
from ckpt_core.errors import CkptError, NotCommitted, UnknownFormat
from ckpt_core.restore.failures import NoMeans
from ckpt_core.restore.manifests import read_manifest
from ckpt_core.restore.watch import undisturbed
from ckpt_core.store import committed_steps, resolve, step_path
from ckpt_core.system.files import Files

_SHOWN = 12
SEEN_WITHIN_S = 10.0
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Listing:
    """The steps that one rank sees in its root, and those that can be brought there.

    Attributes:
        node: first rank of those that share its root.
        steps: step -> attempt that saved it; "" when nobody needs to know.
        lost: step -> why its manifest cannot be read.
        further: what further levels hold, step -> attempts, the one that counts first; known to the rank that
            leads the root.
        away: which of these could not be asked, and why.
    """

    node: int
    steps: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    further: dict[int, tuple[str, ...]] = field(default_factory=dict)
    away: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """For the other ranks."""
        tables = [list(table.items()) for table in (self.steps, self.lost, self.further)]
        return [self.node, *tables, self.away]

    @classmethod
    def from_json(cls, obj: Json) -> Listing:
        """What `to_json` gave on another rank."""
        node, steps, lost, further, away = obj
        saves = {step: tuple(attempts) for step, attempts in further}
        return cls(node, dict(steps), dict(lost), saves, tuple(away))

    def holds(self, step: int, attempt: str) -> bool:
        """Whether its root has that save of the step."""
        return self.steps.get(step) == attempt

    def can_have(self, step: int, attempt: str) -> bool:
        """Whether some further level has that save of the step."""
        return attempt in self.further.get(step, ())

    def saves(self) -> set[tuple[int, str]]:
        """All saves that its root or a further level holds."""
        return {*self.steps.items()}.union(
            (step, attempt) for step, attempts in self.further.items() for attempt in attempts
        )


def levels_shared(listings: Sequence[Listing]) -> list[Listing]:
    """The listings of all ranks, each with what the rank that leads its root knows of further levels."""
    leaders = [listings[listing.node] for listing in listings]
    return [
        replace(listing, further=leader.further, away=leader.away)
        for listing, leader in zip(listings, leaders, strict=True)
    ]


def list_alone(root: Path, asked: int | None) -> Listing:
    """What one process alone may restore; names are all that is looked at.

    Raises:
        NotCommitted: the step that was asked for is not there; names steps that are.
        RestoreError: the root cannot be listed.
    """
    if asked is None:
        return Listing(0, dict.fromkeys(committed_steps(root), ""))
    resolve(step_path(root, asked))
    return Listing(0, {asked: ""})


def alone_beside_levels(found: Listing) -> Listing:
    """What one process alone may restore, where levels hold steps too.

    A step whose manifest cannot be read stands for itself, so that reading it says what is wrong; unless a
    level has it.
    """
    own = {step: "" for step in found.lost if step not in found.further}
    return replace(found, steps={**found.steps, **own}, lost={})


def list_attempts(root: Path, node: int, *, files: Files, timeout_s: float) -> Listing:
    """All steps of a root with the attempts that saved them.

    Raises:
        RestoreError: the root cannot be listed, or there are no means to read with.
    """
    found = Listing(node)
    for step in committed_steps(root):
        try:
            path = step_path(root, step)
            read = partial(read_manifest, path, files=files)
            found.steps[step] = undisturbed(path, read, timeout_s=timeout_s).attempt
        except UnknownFormat as exc:
            # Stands for itself: all ranks must learn of it when they read that step.
            found.steps[step] = f"format version {exc.version}"
        except NotCommitted:
            continue  # Retired a moment ago.
        except NoMeans:
            raise  # It says nothing of the step.
        except CkptError as exc:
            found.lost[step] = str(exc)
    return found


def unseen(listings: Sequence[Listing]) -> dict[int, dict[int, str]]:
    """What ranks see of a root that not all do which share it, by the rank that leads them; it knows best."""
    seen: dict[int, dict[int, str]] = {}
    for listing in (*listings, *(listings[one.node] for one in listings)):
        seen.setdefault(listing.node, {}).update(listing.steps)
    behind = {listing.node for listing in listings if listing.steps != seen[listing.node]}
    return {node: seen[node] for node in behind}


def list_until(look: Callable[[], Listing], wanted: dict[int, str]) -> Listing:
    """Give a network filesystem a moment to show steps that other ranks see; what is seen then."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        found = look()
        if wanted.items() <= found.steps.items() or time.monotonic() >= deadline:
            return found
        time.sleep(_LOOK_AGAIN_S)


def wait_for_save(path: Path, attempt: str, *, files: Files) -> None:
    """Give a network filesystem a moment to show a step that the rank that leads has put there."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(CkptError):
            if read_manifest(path, files=files).attempt == attempt:
                return
        time.sleep(_LOOK_AGAIN_S)


def common_step(
    listings: Sequence[Listing], *, asked: int | None, tried: Collection[int]
) -> tuple[int, str] | None:
    """The newest step that every rank holds or can have, from the same attempt; and that attempt.

    Of two saves of that step the one that more ranks hold: the less is brought. Of others the one that comes
    first among those of rank 0's levels: it is the same on all ranks, as they have the same listings.
    """

    def worth(save: tuple[int, str]) -> tuple[int, int, int, str]:
        step, attempt = save
        places = listings[0].further.get(step, ())
        place = places.index(attempt) if attempt in places else len(places)
        held = sum(listing.holds(step, attempt) for listing in listings)
        return step, held, -place, attempt

    common = set.intersection(*[listing.saves() for listing in listings])
    fitting = [save for save in common if asked in (None, save[0]) and save[0] not in tried]
    return max(fitting, key=worth, default=None)


def nodes_without(listings: Sequence[Listing], step: int, attempt: str) -> set[int]:
    """The nodes whose roots lack that save of a step, each named by the rank that leads it."""
    return {listing.node for listing in listings if not listings[listing.node].holds(step, attempt)}


def known_steps(listings: Sequence[Listing]) -> set[int]:
    """Every step that some rank holds, has lost or can have."""
    return {
        step for listing in listings for step in (*listing.steps, *listing.lost, *listing.further)
    }


def reason(listings: Sequence[Listing], step: int) -> str:
    """Why a step that some rank knows is not one that all ranks hold."""
    for rank, listing in enumerate(listings):
        if step in listing.lost and step not in listing.further:
            return f"rank {rank} cannot read it: {listing.lost[step]}"
    absent = [
        rank
        for rank, listing in enumerate(listings)
        if step not in listing.steps and step not in listing.further
    ]
    if absent:
        has = "does not have" if len(absent) == 1 else "do not have"
        return f"{_ranks(absent)} {has} it"
    return "ranks hold it from different saves"


def table(listings: Sequence[Listing]) -> str:
    """Which node holds which steps and has lost which, one line for each."""
    nodes: dict[int, list[int]] = {}
    for rank, listing in enumerate(listings):
        nodes.setdefault(listing.node, []).append(rank)
    everything = known_steps(listings)
    return "\n".join(_node_line(listings, nodes[node], everything) for node in sorted(nodes))


def _node_line(listings: Sequence[Listing], ranks: Sequence[int], everything: set[int]) -> str:
    mine = [listings[rank] for rank in ranks]
    held = sorted(set.intersection(*[set(listing.steps) for listing in mine]), reverse=True)
    lost = sorted(everything - set(held), reverse=True)
    line = f"  node of rank {ranks[0]} ({_ranks(ranks)}): "
    line += f"holds {_shown([_save(mine[0], step, listings) for step in held]) or 'no step'}"
    if lost:
        line += f"; lost {_shown([_loss(mine, step) for step in lost])}"
    if mine[0].further:
        line += (
            f"; further levels hold {_shown(list(map(str, sorted(mine[0].further, reverse=True))))}"
        )
    return line


def _save(listing: Listing, step: int, listings: Sequence[Listing]) -> str:
    attempts = {other.steps[step] for other in listings if step in other.steps}
    return str(step) if len(attempts) == 1 else f"{step} (saved as {listing.steps[step]})"


def _loss(mine: Sequence[Listing], step: int) -> str:
    text = next((listing.lost[step] for listing in mine if step in listing.lost), "")
    return f"{step} ({text})" if text else str(step)


def _shown(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return ", ".join([*texts[:_SHOWN], *more])


def _ranks(ranks: Sequence[int]) -> str:
    runs = list(_runs(ranks))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = ranks[0]
    for rank in ranks[1:]:
        if rank != last + 1:
            yield first, last
            first = rank
        last = rank
    yield first, last
