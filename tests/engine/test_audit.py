"""Which bytes of replicas are looked at: all of them in a round, few at each save, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.share.audit import Audit, Auditor
from ckpt_core.share.audit_plan import LEAST_BYTES, SAVES, AuditPlan, Runs, Turns
from ckpt_core.share.sharing import Scope, Sharer
from ckpt_core.snapshot import CopyStreams, EagerCopies
from ckpt_core.state import FlatState, flatten
from ckpt_core.system.devices import Devices
from ckpt_core.types import RankInfo


def _plan(flat: FlatState, world: int) -> AuditPlan:
    return Sharer(RankInfo(0, world)).share(flat, Scope()).audit


def _looked_at(plan: AuditPlan, turn: int, *, eager: bool) -> list[tuple[str, int, int]]:
    rota = plan.eager if eager else plan.lazy
    return [
        (plan.rows[look.row].name, begin, end)
        for looks, its_turn in rota.due(turn, first=False)
        for look in looks
        for begin, end in look.runs.at(its_turn)
    ]


@given(nbytes=st.integers(1, 300_000), budget=st.integers(1, 400_000), start=st.integers(0, 10**12))
def test_a_round_of_turns_looks_at_every_byte_once(nbytes: int, budget: int, start: int) -> None:
    runs = Runs.of(nbytes, budget)
    found = sorted(run for turn in range(runs.places) for run in runs.at(start + turn))
    assert found[0][0] == 0 and found[-1][1] == nbytes
    assert all(one[1] == other[0] for one, other in pairwise(found))
    assert runs.places <= -(-nbytes // min(budget, nbytes)) + 1
    most = max(sum(end - begin for begin, end in runs.at(turn)) for turn in range(runs.places))
    assert most <= budget + 8 * 64


def test_what_is_looked_at_is_at_most_one_percent_of_what_a_rank_stores() -> None:
    for world in (2, 3, 8):
        state = {str(i): torch.empty(1 << 20) for i in range(100)}
        state |= {f"small{i}": torch.empty(64) for i in range(3000)}
        flat = flatten(state, eager_leaf_bytes=16384)
        total = sum(leaf.nbytes for leaf in flat.leaves)
        plan = _plan(flat, world)
        for turn in range(5):
            runs = [*_looked_at(plan, turn, eager=False), *_looked_at(plan, turn, eager=True)]
            assert sum(end - begin for _, begin, end in runs) <= total / world / 100
            assert len(_looked_at(plan, turn, eager=True)) <= 3000 / SAVES + 1


@pytest.mark.parametrize("world", [2, 8])
def test_every_byte_of_every_leaf_is_looked_at_within_the_round_that_is_promised(
    world: int,
) -> None:
    state = {str(i): torch.empty(n) for i, n in enumerate((3_000_000, 70_001, 5_000, 17))}
    state |= {f"small{i}": torch.empty(100) for i in range(300)}
    flat = flatten(state, eager_leaf_bytes=16384)
    plan = _plan(flat, world)
    seen: dict[str, set[int]] = {leaf.spec.name: set() for leaf in flat.leaves}
    total = sum(leaf.nbytes for leaf in flat.leaves)
    promised = max(min(SAVES * world, total // LEAST_BYTES * world + world), SAVES)
    for turn in range(promised + 2):
        for eager in (True, False):
            for name, begin, end in _looked_at(plan, 1000 + turn, eager=eager):
                seen[name].update(range(begin // 4, -(-end // 4)))
    for leaf in flat.leaves:
        assert len(seen[leaf.spec.name]) == leaf.tensor.numel(), leaf.spec.name


def test_a_small_state_is_looked_at_as_a_whole_at_every_save() -> None:
    flat = flatten({str(i): torch.empty(100) for i in range(16)}, eager_leaf_bytes=16384)
    plan = _plan(flat, 2)
    for turn in range(3):
        runs = _looked_at(plan, turn, eager=True)
        assert sum(end - begin for _, begin, end in runs) == 16 * 400


@given(
    start=st.integers(0, 10**9),
    interval=st.integers(1, 10**6),
    turn=st.integers(2, 50),
)
def test_evenly_spaced_steps_count_one_by_one(start: int, interval: int, turn: int) -> None:
    turns = Turns()
    found = [turns.next(start + number * interval) for number in range(turn)]
    assert found[1:] == list(range(found[1], found[1] + turn - 1))


def test_a_rank_that_missed_saves_is_in_turn_again_behind_the_next() -> None:
    steps = [100, 200, 300, 400, 500, 600]
    all_there, absent = Turns(), Turns()
    there = [all_there.next(step) for step in steps]
    missed = [absent.next(step) for step in steps if step not in (200, 300)]
    assert missed[2:] == there[4:]


def _marks(tensors: Sequence[torch.Tensor], *, turn: int, first: bool = False) -> dict[str, str]:
    flat = flatten({str(i): tensor for i, tensor in enumerate(tensors)}, eager_leaf_bytes=1024)
    share = Sharer(RankInfo(0, 2)).share(flat, Scope())
    auditor = Auditor()
    if not first:
        auditor.agreed([share.plan])
    audit = auditor.audit(share, flat.leaves, turn)
    _read(audit)
    return audit.marks()


def _read(audit: Audit) -> None:
    streams = CopyStreams(Devices())
    audit.read_eager(streams, EagerCopies(streams.devices, timeout_s=60))
    audit.read_lazy(streams)
    audit.done()


def test_bytes_count_and_not_how_they_lie_in_memory() -> None:
    whole = torch.randn(700, 500)
    strided = whole.t().contiguous().t()
    assert not strided.is_contiguous()
    for turn in range(3):
        assert _marks([whole], turn=turn) == _marks([strided], turn=turn)
    assert _marks([whole], turn=1) != _marks([whole + 1], turn=1)
    assert _marks([torch.tensor(0.0)], turn=1) != _marks([torch.tensor(-0.0)], turn=1)


def test_marks_of_other_turns_structures_and_first_saves_have_other_names() -> None:
    names = [
        set(_marks([torch.zeros(5)], turn=1)),
        set(_marks([torch.zeros(5)], turn=2)),
        set(_marks([torch.zeros(5)], turn=1, first=True)),
        set(_marks([torch.zeros(5), torch.zeros(50_000)], turn=1)),
    ]
    assert len(set().union(*names)) == 4
