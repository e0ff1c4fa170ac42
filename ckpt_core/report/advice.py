"""What the facts of a run come to, in words. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_core.policy import Costs, Limits, choose_interval
from ckpt_core.report.facts import Facts, saves_of
from ckpt_core.report.ranks import RankFacts, Save
from ckpt_core.units import count_text, size_text, time_text

_ALLOWED = (0.01, 0.05)
_PHASES = {
    "staging": "Staging is the longest part: copying the state is {} of a save. It is written as it is "
    "copied, so a slow disk shows here too.",
    "persist": "The disk is the limit: of a save, {} is writing and syncing what has been copied already.",
    "commit": "Publishing a step is the limit (the other ranks, the manifest, renaming, retention): "
    "{} of a save.",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One save of a step by all ranks. `seconds` from the first begin to the last commit; None: not saved."""

    step: int
    saves: tuple[tuple[int, Save], ...]
    begin_s: float
    staged_s: float | None
    seconds: float | None
    nbytes: int
    waited_s: float | None

    @property
    def failures(self) -> list[str]:
        """Texts, with the rank where there are several."""
        several = len(self.saves) > 1
        return [
            f"rank {rank}: {save.failure}" if several else save.failure
            for rank, save in self.saves
            if save.failure is not None
        ]


def steps_of(facts: Facts) -> list[Step]:
    """All saves, in order; a step that was tried again (by a later run) is there twice."""
    found = []
    for step, pairs in saves_of(facts.ranks).items():
        found += [_step(step, turn) for turn in _turns(pairs)]
    return sorted(found, key=lambda step: step.begin_s)


def _turns(pairs: Sequence[tuple[int, Save]]) -> list[list[tuple[int, Save]]]:
    """The saves of a step, each try apart; where files do not name it, by rank and run."""
    named: dict[str, list[tuple[int, Save]]] = {}
    turns: list[list[tuple[int, Save]]] = []
    for rank, save in sorted(pairs, key=lambda pair: pair[1].begin_s):
        if save.attempt is not None:
            named.setdefault(save.attempt, []).append((rank, save))
            continue
        last = turns[-1] if turns else []
        # Ranks of one run are opened together: none of them behind the end of another one's save.
        later = all(save.opened_s > one.until_s for _, one in last)
        if later or any(rank == other for other, _ in last):
            turns.append([])
        turns[-1].append((rank, save))
    return [*named.values(), *turns]


def _step(step: int, saves: list[tuple[int, Save]]) -> Step:
    own = [save for _, save in saves]
    begin_s = min(save.begin_s for save in own)
    ends = [save.committed_s for save in own if save.committed_s is not None]
    staged = [save.staged_s for save in own if save.staged_s is not None]
    waits = [save.waited_s for save in own if save.waited_s is not None]
    whole = len(ends) == len(own)
    return Step(
        step,
        tuple(saves),
        begin_s,
        max(staged) - begin_s if len(staged) == len(own) else None,
        max(ends) - begin_s if whole else None,
        sum(save.nbytes for save in own) if whole else 0,
        max(waits, default=None),
    )


def headline(facts: Facts, steps: Sequence[Step]) -> list[tuple[str, str]]:
    """The figures of the run: each a value and what it is."""
    saved = [step for step in steps if step.seconds is not None]
    rates = [step.nbytes / step.seconds for step in saved if step.seconds]
    failed = sum(bool(step.failures) for step in steps) + len(lone_failures(facts))
    tiles = [
        (f"{len(saved):,}", f"{'step' if len(saved) == 1 else 'steps'} saved"),
        (size_text(sum(step.nbytes for step in saved)), "stored in all"),
        (rate_text(statistics.median(rates)) if rates else "–", "until durable, median"),
        *_waits(facts, steps),
        (f"{failed:,}", f"{'save' if failed == 1 else 'saves'} failed"),
    ]
    unfinished = sum(not step.failures and step.seconds is None for step in steps)
    if unfinished:
        tiles.append((f"{unfinished:,}", "without an end in the file"))
    return tiles


def _waits(facts: Facts, steps: Sequence[Step]) -> list[tuple[str, str]]:
    slowest = max(facts.ranks, key=lambda rank: rank.waited_s)
    share = slowest.waited_s / slowest.lasted_s if slowest.lasted_s else 0.0
    what = "training waited" if slowest.knows_calls else "training waited at barriers"
    tiles = [(time_text(slowest.waited_s), f"{what}, {share:.2%} of the run")]
    known = [step.waited_s for step in steps if step.waited_s is not None]
    if known:
        tiles.append((time_text(statistics.median(known)), "waited for each save, median"))
    return tiles


def lone_failures(facts: Facts) -> list[str]:
    """Texts of failures that belong to no save that was seen to begin."""
    marks = [mark for rank in facts.ranks for mark in rank.marks if mark.name == "failed"]
    return [mark.detail or "no reason given" for mark in marks]


def rate_text(rate: float) -> str:
    """Bytes in a second, for people: in the GB that disks are sold by."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"


def advice(facts: Facts) -> list[str]:
    """What follows from the figures; only what they bear out."""
    said = [_limit(facts), _places(facts), _interval(facts)]
    if any(not rank.knows_calls for rank in facts.ranks):
        said.append(
            "This file does not say how long the calls of save() took: only waits at barriers are counted."
        )
    if facts.unreadable or facts.cut:
        cut = "; the last line is not whole" if facts.cut else ""
        said.append(f"{count_text(facts.unreadable, 'line')} could not be read{cut}.")
    return [text for text in said if text]


def _limit(facts: Facts) -> str:
    parts: dict[str, list[float]] = {phase: [] for phase in _PHASES}
    for save in (save for rank in facts.ranks for save in rank.saves):
        if save.staged_s is None or save.persisted_s is None or save.committed_s is None:
            continue
        persisted_s = max(save.persisted_s, save.staged_s)
        parts["staging"].append(save.staged_s - save.begin_s)
        parts["persist"].append(persisted_s - save.staged_s)
        parts["commit"].append(max(save.committed_s - persisted_s, 0.0))
    sums = {phase: sum(seconds) for phase, seconds in parts.items()}
    whole = sum(sums.values())
    if not whole:
        return ""
    longest = max(sums, key=lambda phase: sums[phase])
    return _PHASES[longest].format(f"{sums[longest] / whole:.0%}")


def _places(facts: Facts) -> str:
    saves = [save for rank in facts.ranks for save in rank.saves]
    if not facts.in_flight or len(saves) < 2:
        return ""
    full = sum(save.place + 1 >= facts.in_flight for save in saves)
    share = full / len(saves)
    if share < 0.5 or facts.in_flight < 2:
        return ""
    return (
        f"{share:.0%} of the saves took the last of {facts.in_flight} places in flight: "
        "save more rarely, or give a larger in_flight, before training waits for storage."
    )


def _interval(facts: Facts) -> str:
    rank = max(facts.ranks, key=cost_s)
    durations = [s.committed_s - s.begin_s for s in rank.saves if s.committed_s is not None]
    if not rank.clean_s or not durations:
        return "Too few iterations had no save under way to say what another interval would cost."
    one_s = cost_s(rank)
    costs = Costs(rank.clean_s, one_s, statistics.median(durations))
    said = []
    for allowed in _ALLOWED:
        steps = choose_interval(costs, Limits(allowed, in_flight=facts.in_flight or 1)).steps
        said.append(
            f"every {count_text(steps, 'step')} would cost {one_s / (steps * rank.clean_s):.1%}"
        )
    return (
        f"A save adds {time_text(one_s)} to training in this run; an iteration without one takes "
        f"{time_text(rank.clean_s)}. So saving {', '.join(dict.fromkeys(said))}."
    )


def cost_s(rank: RankFacts) -> float:
    """What one save adds to training: what iterations beside saves took longer; at least what was waited."""
    if not rank.saves:
        return 0.0
    slower_s = sum(rank.beside_s) - len(rank.beside_s) * rank.clean_s if rank.clean_s else 0.0
    return max(slower_s, rank.waited_s) / len(rank.saves)
