"""The sampler: each sample of an epoch once, over ranks, restarts and changes of the world size."""

from __future__ import annotations

import time
import tracemalloc
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from ckpt_core import ConfigError
from ckpt_core.data import ResumableSampler
from tests.data.data_helpers import check_each_once, ranks

LENGTHS = st.integers(1, 60)
WORLDS = st.integers(1, 7)


@given(length=LENGTHS, world_size=WORLDS, shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_all_ranks_together_draw_each_sample_of_an_epoch_once(
    length: int, world_size: int, shuffle: bool, epoch: int
) -> None:
    samplers = ranks(length, world_size, shuffle=shuffle)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in samplers]
    assert {len(part) for part in drawn} == {-(-length // world_size)}
    check_each_once([sample for part in drawn for sample in part], length, spare=world_size - 1)


@given(length=LENGTHS, world_size=WORLDS)
def test_drop_last_leaves_out_what_cannot_be_shared_and_repeats_nothing(
    length: int, world_size: int
) -> None:
    drawn = [list(sampler) for sampler in ranks(length, world_size, drop_last=True)]
    assert {len(part) for part in drawn} == {length // world_size}
    assert max(Counter([sample for part in drawn for sample in part]).values(), default=1) == 1


@given(
    length=LENGTHS,
    worlds=st.lists(WORLDS, min_size=2, max_size=4),
    data=st.data(),
)
def test_an_epoch_that_changes_hands_still_shows_each_sample_once(
    length: int, worlds: list[int], data: st.DataObject
) -> None:
    state, seen = None, []
    for number, world_size in enumerate(worlds):
        samplers = ranks(length, world_size, seed=3)
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
        left = samplers[0].remaining()
        last = number == len(worlds) - 1
        # Less than all of it, so that the epoch is still the same one after the restart.
        count = left if last else data.draw(st.integers(0, left - 1))
        for sampler in samplers:
            iterator = iter(sampler)
            seen += [next(iterator) for _ in range(count)]
        states = [sampler.state_dict() for sampler in samplers]
        assert all(other == states[0] for other in states), "the state is the same on every rank"
        state = states[0]
    assert state is not None
    assert (state["epoch"], state["consumed"]) == (1, 0)
    check_each_once(seen, length, spare=worlds[-1] - 1)


@given(length=LENGTHS, shuffle=st.booleans(), data=st.data())
def test_a_resumed_sampler_draws_what_the_first_one_would_have_drawn(
    length: int, shuffle: bool, data: st.DataObject
) -> None:
    first = ResumableSampler(range(length), shuffle=shuffle, seed=9)
    list(first)
    whole = list(first) + list(first)
    stop = data.draw(st.integers(0, length))
    first.set_epoch(1)
    iterator = iter(first)
    for _ in range(stop):
        next(iterator)
    second = ResumableSampler(range(length), shuffle=shuffle)
    second.load_state_dict(first.state_dict())
    rest = list(second) + (list(second) if stop < length else [])
    assert rest == whole[stop:]


def test_epochs_differ_and_seeds_differ_and_the_same_pair_repeats() -> None:
    orders = {}
    for seed in (0, 1):
        sampler = ResumableSampler(range(100), seed=seed)
        for epoch in (0, 1, 2):
            orders[seed, epoch] = list(sampler)
        sampler.set_epoch(1)
        assert list(sampler) == orders[seed, 1]
    assert len({tuple(order) for order in orders.values()}) == 6


def test_the_next_epoch_follows_a_complete_iteration_and_not_an_abandoned_one() -> None:
    sampler = ResumableSampler(range(10))
    whole = list(sampler)
    assert sampler.epoch == 1
    sampler.set_epoch(0)
    next(iter(sampler))
    assert list(sampler) == whole
    assert sampler.epoch == 1


def test_set_epoch_keeps_a_position_inside_that_epoch() -> None:
    sampler = ResumableSampler(range(10))
    whole = list(sampler)
    sampler.load_state_dict(_state(10, epoch=0, drawn=4))
    sampler.set_epoch(0)
    assert list(sampler) == whole[4:]


def test_set_epoch_after_iter_takes_effect() -> None:
    sampler, other = ResumableSampler(range(10)), ResumableSampler(range(10))
    iterator = iter(sampler)
    sampler.set_epoch(3)
    other.set_epoch(3)
    assert list(iterator) == list(other)


def test_giving_up_a_restored_position_is_said_aloud() -> None:
    sampler = ResumableSampler(range(10))
    sampler.load_state_dict(_state(10, epoch=2, drawn=4))
    with pytest.warns(UserWarning, match=r"set_epoch\(0\) gives up .* epoch 2 after 4 samples"):
        sampler.set_epoch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.set_epoch(1)


def test_the_caller_may_say_what_training_has_consumed() -> None:
    sampler = ResumableSampler(range(20), rank=1, world_size=2)
    list(sampler)  # fetched ahead, to the end of the epoch
    state = sampler.state_dict(consumed=3)
    assert (state["epoch"], state["consumed"]) == (0, 6)
    assert sampler.state_dict(consumed=10)["epoch"] == 1
    with pytest.raises(ConfigError, match="it has 10"):
        sampler.state_dict(consumed=11)
    with pytest.raises(ConfigError, match="none was begun"):
        ResumableSampler(range(20)).state_dict(consumed=0)


def test_a_wrong_count_moves_no_position() -> None:
    sampler = ResumableSampler(range(20))
    with pytest.raises(ConfigError, match="unit=0 must be an int of at least 1"):
        sampler.begin(unit=0)
    share = sampler.begin(unit=4)
    for counts in ({"samples": -4, "batches": 1}, {"samples": 4, "batches": -1}):
        with pytest.raises(ConfigError, match="must be an int of at least 0"):
            sampler.consume(share, **counts)
    assert (sampler.epoch, sampler.consumed, sampler.batches_taken) == (0, 0, 0)


def test_a_plain_data_loader_without_workers_needs_no_more() -> None:
    first, second = ResumableSampler(range(20)), ResumableSampler(range(20))
    whole = [batch.tolist() for batch in DataLoader(range(20), batch_size=4, sampler=second)]
    iterator = iter(DataLoader(range(20), batch_size=4, sampler=first))
    next(iterator)
    next(iterator)
    resumed = ResumableSampler(range(20))
    resumed.load_state_dict(first.state_dict())
    rest = [batch.tolist() for batch in DataLoader(range(20), batch_size=4, sampler=resumed)]
    assert rest == whole[2:]


def test_a_dataset_of_another_length_is_refused_by_both_lengths() -> None:
    sampler = ResumableSampler(range(12))
    with pytest.raises(ConfigError, match="has 12 samples, the one of the saved state had 10"):
        sampler.load_state_dict(_state(10, epoch=1, drawn=4))
    assert (sampler.epoch, sampler.consumed) == (0, 0)


@pytest.mark.parametrize("change", [4, -4])
def test_an_epoch_keeps_its_order_whatever_becomes_of_the_dataset_within_it(change: int) -> None:
    data = list(range(10))
    sampler = ResumableSampler(data, seed=3)
    whole = list(ResumableSampler(range(10), seed=3))
    iterator = iter(sampler)
    taken = [next(iterator) for _ in range(7)]
    data[:] = range(10 + change)
    assert sampler.state_dict(consumed=0)["length"] == 10 + change, "the epoch may begin anew"
    state = sampler.state_dict()
    assert taken + list(iterator) == whole
    assert sampler.remaining() == 10 + change, "the next epoch has the new length"
    then, now = ResumableSampler(range(10)), ResumableSampler(data)
    with pytest.raises(ConfigError, match="the one of the saved state had 10"):
        now.load_state_dict(state)
    then.load_state_dict(state)
    assert list(then) == whole[7:]


def test_a_restored_position_is_one_in_the_order_that_was_saved() -> None:
    data = list(range(10))
    sampler = ResumableSampler(data)
    whole = list(ResumableSampler(data))
    sampler.load_state_dict(_state(10, epoch=0, drawn=4))
    data += range(10, 14)
    assert sampler.remaining() == 6
    assert list(sampler) == whole[4:]
    assert sorted(sampler) == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"epoch": -1}, "epoch=-1"),
        ({"consumed": 11}, "contradicts itself"),
        ({"consumed": True}, "consumed=True"),
        ({"shuffle": False}, "shuffle=True here, False in the saved state"),
        ({"order": 1}, "another order from the same seed"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    sampler = ResumableSampler(range(10))
    with pytest.raises(ConfigError, match=message):
        sampler.load_state_dict(_state(10, epoch=1, drawn=4) | change)
    assert (sampler.epoch, sampler.consumed) == (0, 0)


def test_what_is_no_state_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no state of a ResumableSampler"):
        ResumableSampler(range(10)).load_state_dict([1, 2])  # type: ignore[arg-type]


def test_the_seed_comes_with_the_state() -> None:
    saved, resumed = ResumableSampler(range(10), seed=5), ResumableSampler(range(10), seed=6)
    resumed.load_state_dict(saved.state_dict())
    assert list(resumed) == list(saved)


@pytest.mark.parametrize(
    "options",
    [{"rank": 1}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}],
)
def test_ranks_that_contradict_each_other_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="rank"):
        ResumableSampler(range(10), **options)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"shuffle": np.bool_(True), "seed": np.int64(-3)}, {"shuffle": True, "seed": -3}),
        ({"shuffle": 1, "seed": torch.tensor(3)}, {"shuffle": True, "seed": 3}),
        ({"shuffle": None}, {"shuffle": False}),
        ({"rank": np.int64(1), "world_size": np.int64(2)}, {"rank": 1, "world_size": 2}),
    ],
)
def test_numbers_and_flags_of_other_kinds_are_the_plain_ones_in_its_order_and_its_state(
    options: dict[str, Any], plain: dict[str, Any]
) -> None:
    given, other = (ResumableSampler(range(9), **values) for values in (options, plain))
    states = []
    for sampler, number in ((given, np.int64), (other, int)):
        sampler.set_epoch(number(2))
        drawn = [index for index, _ in zip(sampler, range(4), strict=False)]
        states.append((drawn, sampler.state_dict(consumed=number(3))))
    assert repr(states[0]) == repr(states[1])
    ResumableSampler(range(9), **plain).load_state_dict(states[0][1])


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": "no"},
        {"shuffle": np.array([1, 2])},
        {"shuffle": torch.tensor([True, False])},
        {"seed": True},
        {"seed": None},
        {"seed": 1.0},
        {"rank": 0.0, "world_size": 2},
        {"rank": 0, "world_size": True},
    ],
)
def test_what_is_no_number_or_flag_is_refused_where_it_is_given(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="|".join(options)):
        ResumableSampler(range(9), **options)


def test_counts_of_numpy_are_taken_as_plain_ones() -> None:
    sampler = ResumableSampler(range(20))
    share = sampler.begin(unit=np.int64(4))  # type: ignore[arg-type]
    sampler.consume(share, samples=np.int64(4), batches=np.int64(1))  # type: ignore[arg-type]
    state = sampler.state_dict()
    assert type(state["consumed"]) is int and (state["consumed"], state["batches"]) == (4, 1)


@pytest.mark.parametrize("epoch", [True, 1.0, "1", None])
def test_an_epoch_and_a_count_that_are_no_int_are_refused(epoch: Any) -> None:
    sampler = ResumableSampler(range(9))
    with pytest.raises(ConfigError, match="epoch="):
        sampler.set_epoch(epoch)
    with pytest.raises(ConfigError, match="consumed="):
        sampler.state_dict(consumed=[epoch])  # type: ignore[arg-type]
    assert sampler.epoch == 0


@pytest.mark.parametrize(
    "change",
    [
        {"shuffle": np.bool_(True)},
        {"shuffle": 1},
        {"seed": np.int64(0), "world_size": np.int64(1)},
        {"epoch": True, "consumed": np.int64(4), "taken": np.int64(4)},
    ],
)
def test_a_state_that_was_saved_with_numbers_of_other_kinds_is_loaded(
    change: dict[str, Any],
) -> None:
    state = _state(10, epoch=1, drawn=4)
    sampler, other = ResumableSampler(range(10)), ResumableSampler(range(10))
    sampler.load_state_dict(state | change)
    other.load_state_dict(state)
    assert repr(sampler.state_dict()) == repr(other.state_dict())
    assert list(sampler) == list(other)


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match="count from 0"):
        ResumableSampler(range(10)).set_epoch(-1)


def test_a_dataset_without_a_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="no len"):
        ResumableSampler(iter(range(3)))  # type: ignore[arg-type]


def test_frameworks_take_it_for_a_sampler_for_ranks() -> None:
    assert isinstance(ResumableSampler(range(3)), DistributedSampler)
    assert list(BatchSampler(ResumableSampler(range(3), shuffle=False), 2, False)) == [[0, 1], [2]]


def test_the_length_counts_what_was_taken_before_the_restart() -> None:
    samplers = ranks(24, 4)
    for sampler in samplers:
        iterator = iter(sampler)
        for _ in range(2):
            next(iterator)
    resumed = ranks(24, 2)[0]
    resumed.load_state_dict(samplers[0].state_dict())
    assert resumed.remaining() == 8
    assert len(resumed) == 2 + 8


def test_a_million_samples_cost_one_tensor_and_no_list() -> None:
    sampler = ResumableSampler(range(1_000_000))
    tracemalloc.start()
    try:
        iterator = iter(sampler)
        for _ in range(10_000):
            next(iterator)
        state = sampler.state_dict()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000, "Python objects for a few thousand samples at a time"
    resumed = ResumableSampler(range(1_000_000))
    begun = time.process_time()
    resumed.load_state_dict(state | {"consumed": 999_990, "taken": 999_990})
    assert len(list(resumed)) == 10
    assert time.process_time() - begun < 5, "resuming walks over nothing"


def test_drawing_leaves_the_generators_of_training_alone() -> None:
    before = torch.get_rng_state()
    list(ResumableSampler(range(100)))
    assert torch.equal(torch.get_rng_state(), before)


def _state(length: int, *, epoch: int, drawn: int) -> dict[str, object]:
    sampler = ResumableSampler(range(length))
    sampler.set_epoch(epoch)
    iterator = iter(sampler)
    for _ in range(drawn):
        next(iterator)
    return sampler.state_dict()
