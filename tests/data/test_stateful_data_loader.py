"""The sampler in torchdata's StatefulDataLoader, which counts for itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from ckpt_core.data import ResumableLoader, ResumableSampler
from tests.data.data_helpers import Noisy, ids, take

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its import uses what torch has deprecated
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

LENGTH, SIZE, PER_EPOCH = 13, 3, 5


def make(workers: int) -> Any:
    sampler = ResumableSampler(Noisy(LENGTH), seed=4)
    return torchdata.StatefulDataLoader(
        Noisy(LENGTH), batch_size=SIZE, sampler=sampler, num_workers=workers
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_goes_on_after_every_batch(workers: int) -> None:
    whole = take(ResumableLoader(Noisy(LENGTH), batch_size=SIZE, shuffle=True, seed=4), 15)
    loader, states, seen = make(workers), [], []
    for _ in range(2):
        for batch in loader:
            seen.append(batch)
            states.append(loader.state_dict())
    assert ids(seen) == ids(whole[:10])
    for done, state in enumerate(states, 1):
        resumed = make(workers)
        resumed.load_state_dict(state)
        assert ids(take(resumed, 3)) == ids(whole[done : done + 3]), f"after {done} batches"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loop_of_the_docs_ends_where_it_would_have_ended_after_every_batch(
    workers: int,
) -> None:
    epochs = 3

    def train(state: Any = None, step: int = 0) -> tuple[list[Any], list[Any]]:
        loader, seen, states = make(workers), [], []
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(step // len(loader), epochs):
            for batch in loader:
                seen.append(batch)
                states.append(loader.state_dict())
        return seen, states

    whole, states = train()
    assert len(whole) == epochs * PER_EPOCH
    for done, state in enumerate(states, 1):
        rest, _ = train(state, done)
        assert ids(rest) == ids(whole[done:]), f"after {done} batches"
