"""Which ranks differ from the others, and in what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_core.coordination.agreement import Json, Parts, Reference
from ckpt_core.coordination.outcome import Cause, Outcome
from ckpt_core.errors import ConfigError

_EXPLAINED = 8
"""So many ranks that differ are asked for what they have."""

_PLAN = "saves something else than rank {}: the structure of its state, or its directory, differs"
_MARK = "does not hold the same values as rank {} in leaves that all ranks store together"


def odd_ones(values: Mapping[int, str]) -> dict[int, int]:
    """Ranks whose value is not that of most, each with the first rank of those; of two halves, the first
    rank's counts as right.
    """
    holders: dict[str, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(values[rank], []).append(rank)
    if len(holders) < 2:
        return {}
    right = max(holders.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return {rank: right[0] for rank in values if rank not in right}


def compared(votes: Sequence[Json], parts: Parts | None = None) -> tuple[Outcome, dict[int, int]]:
    """Whether the votes are for the same, all of it; and who differs from whom. Called on rank 0.

    Args:
        parts: of rank 0's own vote.
    """
    text, odd = _PLAN, odd_ones({rank: vote["plan"] for rank, vote in enumerate(votes)})
    if not odd:
        text = _MARK
        marks: dict[str, dict[int, str]] = {}
        for rank, vote in enumerate(votes):
            for name, mark in (vote["marks"] or {}).items():
                marks.setdefault(name, {})[rank] = mark
        for given in marks.values():
            odd |= odd_ones(given)
    failures = {
        rank: Cause(ConfigError.__name__, text.format(right)) for rank, right in odd.items()
    }
    if not odd and parts is not None:
        lack = _lack(parts, [vote["parts"] for vote in votes])
        failures = {} if lack is None else {0: Cause(ConfigError.__name__, lack)}
    asked = {one for rank in sorted(odd)[:_EXPLAINED] for one in (rank, odd[rank])}
    can_tell = all(votes[rank]["marks"] is not None for rank in (0, *asked))
    return Outcome(failures, asks=tuple(sorted(asked)) if can_tell else ()), odd


def _lack(parts: Parts, said: Sequence[Json]) -> str | None:
    try:
        return parts.lack(said)
    except Exception as exc:
        # Nobody must wait for it, and nobody may publish what is not known to be whole.
        return f"whether the ranks' parts make up all leaves was not found out ({type(exc).__name__}: {exc})"


def explained(
    outcome: Outcome, odd: Mapping[int, int], given: Mapping[int, bytes], reference: Reference
) -> Outcome:
    """The same outcome, saying what differs as far as the ranks have shown what they have."""
    failures = dict(outcome.failures)
    for rank, right in odd.items():
        if rank in given and right in given:
            text = _difference(reference, given[rank], given[right], right)
            if text is not None:
                failures[rank] = Cause(ConfigError.__name__, f"differs from rank {right}: {text}")
    return Outcome(failures)


def _difference(reference: Reference, one: bytes, other: bytes, right: int) -> str | None:
    try:
        return reference.difference(one, other, right)
    except Exception as exc:
        # Ranks may save different kinds of things. They do differ, and nobody must wait for the words.
        return f"what it saves could not be compared ({type(exc).__name__}: {exc})"
