"""The loader: what training has consumed is what counts, and augmentation repeats bit for bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from ckpt_core import ConfigError
from ckpt_core.data import ResumableLoader, ResumableSampler
from ckpt_core.data.fetch import Fetcher, Ticket
from tests.data.data_helpers import (
    Batched,
    Noisy,
    check_each_once,
    ids,
    loaders,
    lockstep,
    same,
    take,
)
from tests.interrupts.scenarios import strike
from tests.interrupts.trap import Trap

LENGTH, SIZE = 13, 3
PER_EPOCH = 5
WORKERS = [
    pytest.param({}, id="no workers"),
    pytest.param({"num_workers": 2}, id="two workers"),
    pytest.param(
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
        id="persistent workers",
    ),
]


def make(**options: Any) -> ResumableLoader:
    settings = {"batch_size": SIZE, "shuffle": True, "seed": 4} | options
    return ResumableLoader(settings.pop("dataset", Noisy(LENGTH)), **settings)


def _subset(dataset: Any) -> Subset[Any]:
    return Subset(Subset(dataset, range(LENGTH)), range(1, LENGTH))


@pytest.fixture(scope="module")
def whole() -> list[torch.Tensor]:
    """Three epochs that nobody interrupts."""
    return take(make(), 3 * PER_EPOCH)


@pytest.mark.parametrize("options", WORKERS)
def test_it_goes_on_bit_for_bit_after_every_batch(
    whole: list[torch.Tensor], options: dict[str, Any]
) -> None:
    states: list[dict[str, Any]] = []
    loader, seen = make(**options), []
    states.append(loader.state_dict())
    for _ in range(2):
        for batch in loader:
            seen.append(batch)
            states.append(loader.state_dict())
    assert same(seen, whole[: 2 * PER_EPOCH])
    for done, state in enumerate(states):
        # Some of these are within an epoch, some at its end: three batches cross the next end.
        resumed = make(seed=77, **options)
        resumed.load_state_dict(state)
        assert resumed.epoch == done // PER_EPOCH
        assert same(take(resumed, 3), whole[done : done + 3]), f"after {done} batches"


@given(
    length=st.integers(1, 40),
    worlds=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    data=st.data(),
)
def test_an_epoch_that_changes_ranks_and_batch_sizes_still_shows_each_sample_once(
    length: int, worlds: list[int], sizes: list[int], data: st.DataObject
) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    batches = 0
    for number, (world_size, size) in enumerate(zip(worlds, sizes, strict=False)):
        crew = loaders(length, world_size, size)
        for loader in crew:
            if state is not None:
                loader.load_state_dict(state)
        left = len(crew[0]) - batches
        assert left >= 1
        count = left if number == len(worlds) - 1 else data.draw(st.integers(0, left - 1))
        rows = lockstep(crew)
        for _ in range(count):
            seen += ids(next(rows))
        states = [loader.state_dict() for loader in crew]
        assert all(other == states[0] for other in states), "the state is the same on every rank"
        state, batches = states[0], batches + count
    assert state is not None
    assert (state["epoch"], state["consumed"]) == (1, 0)
    check_each_once(seen, length, spare=worlds[-1] - 1)


@given(
    length=st.integers(0, 40),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.integers(1, 5),
    data=st.data(),
)
def test_drop_last_repeats_nothing_and_has_whole_batches_only(
    length: int, worlds: tuple[int, int], size: int, data: st.DataObject
) -> None:
    crew = loaders(length, worlds[0], size, drop_last=True)
    assert len(crew[0]) == length // worlds[0] // size
    rows = lockstep(crew)
    seen = [next(rows) for _ in range(data.draw(st.integers(0, max(0, len(crew[0]) - 1))))]
    state = crew[0].state_dict()
    crew = loaders(length, worlds[1], size, drop_last=True)
    for loader in crew:
        loader.load_state_dict(state)
    if crew[0].epoch == 0:
        seen += list(lockstep(crew))
    assert all(len(batch) == size for row in seen for batch in row)
    found = [sample for row in seen for sample in ids(row)]
    assert len(found) == len(set(found))
    assert crew[0].epoch == 1 or length < worlds[0]
    # Never more is left out than one incomplete batch on every rank.
    assert length - len(found) < worlds[1] * size


def test_augmentation_is_the_same_whatever_the_number_of_ranks_and_workers() -> None:
    one = {int(row[0]): row for batch in make() for row in batch}
    crew = loaders(LENGTH, 2, 4, seed=4, num_workers=1)
    for row in lockstep(crew):
        for sample in torch.cat(row):
            assert torch.equal(sample, one[int(sample[0])])


@pytest.mark.parametrize("options", WORKERS[:2])
@pytest.mark.parametrize("wrap", [_subset, StackDataset], ids=["subset", "stack"])
def test_augmentation_of_a_subset_does_not_depend_on_the_batch(
    wrap: Any, options: dict[str, Any]
) -> None:
    def rows(size: int) -> dict[int, torch.Tensor]:
        loader = make(dataset=wrap(Noisy(LENGTH)), batch_size=size, collate_fn=list, **options)
        samples = [row if wrap is _subset else row[0] for batch in loader for row in batch]
        return {int(row[0]): row for row in samples}

    one, other = rows(2), rows(5)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[sample], other[sample]) for sample in one)


@pytest.mark.parametrize("wrap", [_subset, StackDataset], ids=["subset", "stack"])
def test_what_wraps_a_dataset_that_fetches_batches_asks_it_for_batches(wrap: Any) -> None:
    class Asked(Batched):
        asked = 0

        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            self.asked += 1
            return super().__getitems__(indices)

    dataset = Asked(LENGTH)
    assert len(list(make(dataset=wrap(dataset)))) == dataset.asked


def test_augmentation_differs_between_samples_and_epochs() -> None:
    drawn = torch.cat(take(make(), 2 * PER_EPOCH))[:, 1:]
    assert len(drawn.unique()) == drawn.numel()


@pytest.mark.parametrize("options", WORKERS[:2])
def test_a_dataset_that_fetches_batches_is_asked_for_batches(options: dict[str, Any]) -> None:
    dataset = Batched(LENGTH)
    first = take(make(dataset=dataset, **options), 4)
    loader = make(dataset=dataset, **options)
    take(loader, 2)
    resumed = make(dataset=dataset, **options)
    resumed.load_state_dict(loader.state_dict())
    assert same(take(resumed, 2), first[2:])


@pytest.mark.parametrize("options", WORKERS[:2])
def test_single_samples_without_a_batch_dimension(options: dict[str, Any]) -> None:
    loader = make(batch_size=None, **options)
    samples = take(loader, LENGTH)
    assert samples[0].shape == (4,)
    assert len(loader) == LENGTH
    check_each_once([int(sample[0]) for sample in samples], LENGTH, spare=0)


@pytest.mark.parametrize("options", WORKERS[:2])
def test_collating_has_random_numbers_of_its_own_too(options: dict[str, Any]) -> None:
    loader = make(collate_fn=_with_noise, **options)
    first = take(loader, 4)
    assert len(set(first)) == 4
    resumed = make(collate_fn=_with_noise, **options)
    take(resumed, 3)
    assert take(resumed, 1) == first[3:]
    assert first == take(make(collate_fn=_with_noise), 4), "workers change nothing"


@pytest.mark.parametrize("options", WORKERS)
def test_the_generators_of_training_are_neither_read_nor_changed(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    before = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist())
    batches = take(make(**options), PER_EPOCH)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]
    torch.manual_seed(2)
    assert same(take(make(**options), PER_EPOCH), batches)


def test_without_seed_samples_the_order_is_kept_and_augmentation_is_torchs() -> None:
    torch.manual_seed(1)
    plain = take(make(seed_samples=False), PER_EPOCH)
    again = take(make(seed_samples=False), PER_EPOCH)
    assert ids(plain) == ids(again)
    assert not same(plain, again)


# -- where it stands ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", WORKERS)
def test_a_new_iteration_goes_on_where_the_last_one_stopped(
    whole: list[torch.Tensor], options: dict[str, Any]
) -> None:
    loader, seen = make(**options), []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 2:
            break
    seen += list(loader)
    assert same(seen, whole[:PER_EPOCH])
    assert loader.epoch == 1


@pytest.mark.parametrize("options", WORKERS)
def test_set_epoch_abandons_an_epoch_for_another(options: dict[str, Any]) -> None:
    epochs = [ids(take(make(), 3 * PER_EPOCH)[5 * n : 5 * n + 5]) for n in range(3)]
    loader = make(**options)
    take(loader, 2)
    loader.set_epoch(2)
    assert ids(loader) == epochs[2]
    loader.sampler.set_epoch(0)
    assert ids(loader) == epochs[0]


def test_an_iterator_serves_the_epoch_and_the_position_that_are_set_before_its_first_batch(
    whole: list[torch.Tensor],
) -> None:
    loader = make(num_workers=2)
    iterator = iter(loader)
    loader.sampler.set_epoch(1)  # as Lightning does: iter() first, then the epoch
    assert torch.equal(next(iterator), whole[PER_EPOCH])

    donor = make()
    take(donor, PER_EPOCH + 2)
    resumed = make(num_workers=2)
    iterator = iter(resumed)
    resumed.load_state_dict(donor.state_dict())
    resumed.sampler.set_epoch(1)
    assert torch.equal(next(iterator), whole[PER_EPOCH + 2])


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("cut", ["set_epoch", "load_state_dict", "iter"])
def test_an_iteration_that_was_cut_off_says_so_instead_of_miscounting(
    options: dict[str, Any], cut: str
) -> None:
    loader = make(**options)
    iterator = iter(loader)
    next(iterator)
    if cut == "set_epoch":
        loader.set_epoch(3)
    elif cut == "load_state_dict":
        loader.load_state_dict(loader.state_dict())
    else:
        next(iter(loader))
    with pytest.raises(ConfigError, match=r"Call iter\(\) again"):
        next(iterator)


def test_the_last_batch_ends_the_epoch_even_if_nobody_asks_for_more() -> None:
    loader = make()
    iterator = iter(loader)
    for _ in range(PER_EPOCH):
        next(iterator)
    at_end = loader.state_dict()
    assert (at_end["epoch"], at_end["consumed"]) == (1, 0)
    loader.set_epoch(1)
    assert next(iterator, None) is None
    assert loader.state_dict() == at_end


def test_the_length_is_that_of_the_whole_epoch_wherever_it_stands() -> None:
    loader = make()
    for _ in loader:
        assert len(loader) == PER_EPOCH
    take(loader, 2)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == PER_EPOCH


def test_the_length_counts_the_batches_from_before_a_change_of_ranks() -> None:
    crew = loaders(48, 4, 2)
    rows = lockstep(crew)
    for _ in range(3):
        next(rows)
    resumed = loaders(48, 2, 4)[0]
    resumed.load_state_dict(crew[0].state_dict())
    assert len(resumed) == 3 + 3
    assert len(list(resumed)) == 3
    assert len(resumed) == 6


def test_an_epoch_of_which_no_whole_batch_is_left_gives_way_to_the_next() -> None:
    crew = loaders(20, 1, 3, drop_last=True)
    take(crew[0], 4)
    resumed = loaders(20, 4, 3, drop_last=True)[0]
    resumed.load_state_dict(crew[0].state_dict())
    assert (resumed.epoch, resumed.sampler.consumed) == (1, 0)


def test_an_empty_dataset_has_empty_epochs() -> None:
    loader = make(dataset=Noisy(0), drop_last=True)
    assert (list(loader), list(loader), len(loader), loader.epoch) == ([], [], 0, 2)


def test_a_dataset_of_another_length_is_refused_by_both_lengths() -> None:
    with pytest.raises(ConfigError, match="has 13 samples, the one of the saved state had 14"):
        make().load_state_dict(make(dataset=Noisy(14)).state_dict())


# -- as a DataLoader ---------------------------------------------------------------------------


def test_a_dataset_that_grows_within_an_epoch_belongs_to_the_next_one() -> None:
    data = list(range(8))
    loader = ResumableLoader(data, batch_size=2, shuffle=True, seed=3)
    iterator = iter(loader)
    seen = [*next(iterator).tolist(), *next(iterator).tolist()]
    data += range(8, 12)
    assert len(loader) == 4
    with pytest.raises(ConfigError, match="has 12 samples, the one of the saved state had 8"):
        ResumableLoader(data, batch_size=2, shuffle=True).load_state_dict(loader.state_dict())
    seen += [sample for batch in loader for sample in batch.tolist()]
    assert sorted(seen) == list(range(8))
    assert sorted(sample for batch in loader for sample in batch.tolist()) == data


def test_it_gives_what_a_plain_data_loader_gives() -> None:
    dataset = TensorDataset(torch.arange(10.0), torch.arange(10))
    ours = ResumableLoader(dataset, batch_size=4)
    plain = DataLoader(dataset, batch_size=4)
    assert isinstance(ours, DataLoader)
    assert ours.dataset is dataset
    for mine, theirs in zip(ours, plain, strict=True):
        assert same(mine, theirs)
        assert type(mine) is type(theirs)


def test_a_worker_sees_the_dataset_that_was_passed() -> None:
    loader = ResumableLoader(
        _AsksForItself(4), batch_size=2, num_workers=1, worker_init_fn=_mark_dataset
    )
    assert torch.cat(list(loader)).tolist() == [7, 7, 7, 7]


def test_an_error_in_the_dataset_reaches_the_loop_and_restores_the_generators() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        list(ResumableLoader(_Broken(4), batch_size=2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("broken", [2, 7])
def test_a_loop_that_passes_over_an_error_gets_the_next_batch_and_the_position_is_behind_it(
    options: dict[str, Any], broken: int
) -> None:
    loader = ResumableLoader(_BrokenAt(8, broken), batch_size=2, **options)
    source, seen = iter(loader), []
    for _ in range(4):
        try:
            seen.append((ids([next(source)]), loader.epoch, loader.sampler.consumed))
        except ZeroDivisionError:
            seen.append(([], loader.epoch, loader.sampler.consumed))
    assert next(source, None) is None
    ends = ([6, 7], 1, 0) if broken == 2 else ([], 0, 6)
    second = ([], 0, 2) if broken == 2 else ([2, 3], 0, 4)
    assert seen == [([0, 1], 0, 2), second, ([4, 5], 0, 6), ends]
    assert (loader.epoch, loader.sampler.consumed) == (1, 0)
    assert ids([next(iter(loader))]) == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": torch.utils.data.SequentialSampler(range(3))}, "takes a ResumableSampler"),
        ({"sampler": ResumableSampler(range(3)), "shuffle": True}, "shuffle=True beside sampler"),
        ({"shuffle": False, "batch_sampler": [[0]]}, "batch_sampler="),
        ({"generator": torch.Generator()}, "generator="),
        ({"in_order": False}, "in_order=False"),
    ],
)
def test_options_that_would_break_the_order_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ResumableLoader(Noisy(3), **options)


def test_a_stream_without_indices_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives its own order"):
        ResumableLoader(_Stream())


def test_nothing_is_warned_about_in_a_normal_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = make(num_workers=2, persistent_workers=True)
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert len(list(loader)) == PER_EPOCH


def _with_noise(samples: list[torch.Tensor]) -> tuple[float, ...]:
    return (torch.rand(()).item(), random.random(), *(float(sample[0]) for sample in samples))


def _mark_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = 7


class _AsksForItself(Noisy):
    mark = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return torch.tensor(self.mark)


class _Broken(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(1 // 0)


class _BrokenAt(Noisy):
    def __init__(self, length: int, broken: int) -> None:
        super().__init__(length)
        self.broken = broken

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) / (index != self.broken or 1 // 0)


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def test_a_fetch_that_is_interrupted_anywhere_leaves_the_generators_of_training_as_they_were() -> (
    None
):
    def fetch() -> Any:
        return Fetcher(Noisy(LENGTH), torch.stack, batched=True, seeded=True)[Ticket(5, 0, [0, 1])]

    def generators() -> tuple[Any, ...]:
        name, keys, *rest = np.random.get_state()
        return random.getstate(), torch.get_rng_state().tolist(), name, keys.tolist(), rest

    counting, before = Trap(-1, event="opcode"), generators()
    strike(counting, fetch)
    assert counting.lines > 50
    for n in range(counting.lines):
        struck = strike(Trap(n, event="opcode"), fetch)
        assert generators() == before, struck.error
