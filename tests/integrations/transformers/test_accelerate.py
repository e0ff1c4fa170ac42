"""A loop of one's own with Accelerate goes on bit for bit."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch.utils.data import DataLoader, RandomSampler

from ckpt_core import ConfigError
from ckpt_transformers import AcceleratorCheckpoint, CheckpointWarning
from tests.integrations.transformers.accelerate_program import loop
from tests.integrations.transformers.jobs import SMALL


def _dies_at_9(step: int) -> None:
    if step == 9:
        raise KeyboardInterrupt


def test_a_loop_that_is_cut_short_ends_like_one_that_is_not(tmp_path: Path) -> None:
    expected = loop(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path / "cut", on_step=_dies_at_9)
    assert loop(tmp_path / "cut") == expected


def test_an_epoch_that_ranks_drew_together_begins_again_in_its_own_order(tmp_path: Path) -> None:
    def shuffled() -> Any:
        """As it is on several ranks, prepared by hand on one."""
        generator = torch.Generator().manual_seed(4)
        sampler: Any = RandomSampler(range(20), generator=generator)
        return DataLoaderShard(
            range(20), sampler=sampler, batch_size=5, synchronized_generator=generator
        )

    def order(loader: Any) -> list[int]:
        return [int(item) for batch in loader for item in batch]

    accelerator, loader = Accelerator(cpu=True), shuffled()
    accelerator._dataloaders = [loader]
    with AcceleratorCheckpoint(accelerator, tmp_path / "ckpts") as checkpoint:
        order(loader)
        checkpoint.save(1)  # between two epochs
        second = []
        for number, batch in enumerate(loader):
            second += batch.tolist()
            if number == 1:
                checkpoint.save(2)  # in the middle of one
        third = order(loader)
    assert second != third
    for step in (1, 2):
        accelerator._dataloaders = [loader := shuffled()]
        with AcceleratorCheckpoint(accelerator, tmp_path / "ckpts") as checkpoint:
            checkpoint.restore(step)
            assert [order(loader), order(loader)] == [second, third]


DRAWN: dict[str, dict[str, Any]] = {
    "from a seed": {"seedable": True},
    "from torch's generator": {},
    "from the loader's": {"own": True},
    "from a seed, by one rank for all": {"seedable": True, "dispatch": True},
    "from torch's generator, by one rank for all": {"dispatch": True},
    "from the loader's, by one rank for all": {"own": True, "dispatch": True},
}


def _skipping(
    root: Path, die: int, *, seedable: bool = False, own: bool = False, dispatch: bool = False
) -> Any:
    """Three epochs of six batches, saved after each second one: each batch, and a number drawn at it."""
    torch.manual_seed(5)
    config = DataLoaderConfiguration(use_seedable_sampler=seedable, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    generator = torch.Generator().manual_seed(4) if own else None
    loader: Any = DataLoader(range(12), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    judge: Any = DataLoader(range(4), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    loader, judge = accelerator.prepare(loader, judge)
    seen = {}
    with AcceleratorCheckpoint(accelerator, root, options=SMALL) as checkpoint:
        step = checkpoint.restore() or 0
        while step < 18:
            skip = step % 6
            rest = accelerator.skip_first_batches(loader, skip) if skip else loader
            for batch in rest:
                step += 1
                seen[step] = batch.tolist(), torch.rand(()).item()
                if step % 6 == 3:
                    next(iter(judge))  # broken off
                if step % 2 == 0:
                    checkpoint.save(step)
                if step == die:
                    return seen
    return seen


@pytest.mark.parametrize("drawn", DRAWN)
def test_a_loop_that_skips_what_is_done_sees_each_epoch_in_its_own_order(
    drawn: str, tmp_path: Path
) -> None:
    expected = _skipping(tmp_path / "whole", 0, **DRAWN[drawn])
    found: dict[int, Any] = {}
    for die in (8, 12, 16, 0):  # within epochs, and at the last batch of one that was gone on with
        found |= _skipping(tmp_path / "cut", die, **DRAWN[drawn])
    assert found == expected


def _stateful(root: Path, die: int, *, seedable: bool = False, own: bool = False) -> Any:
    """As `_skipping`, with a loader that goes on by itself."""
    torch.manual_seed(5)
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    generator = torch.Generator().manual_seed(4) if own else None
    loader: Any = DataLoader(range(12), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    loader, step, seen = accelerator.prepare(loader), 0, {}
    with AcceleratorCheckpoint(accelerator, root, options=SMALL) as checkpoint:
        step = checkpoint.restore() or 0
        while step < 18:
            for batch in loader:
                step += 1
                seen[step] = batch.tolist(), torch.rand(()).item()
                if step % 2 == 0:
                    checkpoint.save(step)
                if step == die:
                    return seen
    return seen


@pytest.mark.parametrize("drawn", [name for name in DRAWN if "dispatch" not in DRAWN[name]])
def test_a_stateful_loader_goes_on_in_its_own_order(drawn: str, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    expected = _stateful(tmp_path / "whole", 0, **DRAWN[drawn])
    found: dict[int, Any] = {}
    for die in (2, 4, 8, 12, 16, 0):  # twice in the first epoch, and at the end of one
        found |= _stateful(tmp_path / "cut", die, **DRAWN[drawn])
    assert found == expected


def _prepared(*, stateful: bool = False, dispatch: bool = False) -> tuple[Any, Any, Any]:
    """An Accelerator, a loader of three batches, and one to judge by with a generator of its own."""
    if stateful:
        pytest.importorskip("torchdata")
    torch.manual_seed(5)
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    own = torch.Generator().manual_seed(4)
    loader: Any = DataLoader(range(6), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    judge: Any = DataLoader(range(6), batch_size=2, shuffle=True, generator=own)  # type: ignore[arg-type]
    return accelerator, *accelerator.prepare(loader, judge)


def _rest(accelerator: Any, loader: Any, skip: int) -> Any:
    stateful = loader.use_stateful_dataloader
    return accelerator.skip_first_batches(loader, skip) if skip and not stateful else loader


def _judging(root: Path, die: int, judged: int, **how: bool) -> Any:
    """Two epochs, at each second step so many batches of `judge`; saved at each, epochs behind their loop."""
    accelerator, loader, judge = _prepared(**how)
    seen = {}
    with AcceleratorCheckpoint(accelerator, root, options=SMALL) as checkpoint:
        step = checkpoint.restore() or 0
        while step < 6:
            for batch in _rest(accelerator, loader, step % 3):
                step += 1
                found = [] if step % 2 else [it.tolist() for it in islice(judge, judged)]
                seen[step] = batch.tolist(), found, torch.rand(()).item()
                if step % 3 or judged < 3:
                    checkpoint.save(step)
                    if step == die:
                        return seen
            if judged > 3:
                checkpoint.save(step)
            if step == die:
                return seen
    return seen


@pytest.mark.parametrize("judged", [1, 4], ids=["in part", "whole"])
@pytest.mark.parametrize("how", [{"stateful": True}, {}, {"dispatch": True}], ids=str)
def test_evaluations_and_later_epochs_are_what_they_would_have_been(
    how: dict[str, bool], judged: int, tmp_path: Path
) -> None:
    expected = _judging(tmp_path / "whole", 0, judged, **how)
    found: dict[int, Any] = {}
    for die in (2, 3, 4, 0):  # behind an evaluation, and behind the loop of an epoch
        found |= _judging(tmp_path / "cut", die, judged, **how)
    assert found == expected


@pytest.mark.parametrize("how", [{"stateful": True}, {}, {"dispatch": True}], ids=str)
@pytest.mark.parametrize("trained", [False, True])
def test_what_is_saved_between_a_restore_and_the_next_batch_is_the_same_place(
    trained: bool, how: dict[str, bool], tmp_path: Path
) -> None:
    accelerator, loader, _ = _prepared(**how)
    with AcceleratorCheckpoint(accelerator, tmp_path, options=SMALL) as checkpoint:
        expected = []
        for number, batch in enumerate(loader, 1):
            expected.append(batch.tolist())
            if number == 1:
                checkpoint.save(1)
        expected += [batch.tolist() for batch in loader]
        if trained:
            checkpoint.restore(1)
            checkpoint.save(2)
    if not trained:
        accelerator, loader, _ = _prepared(**how)
        with AcceleratorCheckpoint(accelerator, tmp_path, options=SMALL) as checkpoint:
            checkpoint.restore()
            checkpoint.save(2)
    accelerator, loader, _ = _prepared(**how)
    with AcceleratorCheckpoint(accelerator, tmp_path, options=SMALL) as checkpoint:
        assert checkpoint.restore() == 2
        found = [batch.tolist() for batch in _rest(accelerator, loader, 1)]
        assert found + [batch.tolist() for batch in loader] == expected[1:]


@pytest.mark.parametrize("how", [{"stateful": True}, {}, {"dispatch": True}], ids=str)
def test_an_epoch_that_was_left_to_save_is_gone_on_with(
    how: dict[str, bool], tmp_path: Path
) -> None:
    accelerator, _, loader = _prepared(**how)
    expected = [batch.tolist() for batch in loader]
    accelerator, _, loader = _prepared(**how)
    with AcceleratorCheckpoint(accelerator, tmp_path, options=SMALL) as checkpoint:
        for _ in loader:
            break
        checkpoint.save(1)
    accelerator, _, loader = _prepared(**how)
    with AcceleratorCheckpoint(accelerator, tmp_path, options=SMALL) as checkpoint:
        checkpoint.restore()
        assert [batch.tolist() for batch in _rest(accelerator, loader, 1)] == expected[1:]


def test_a_stateful_loader_that_was_left_saved_and_begins_anew_is_told_of(tmp_path: Path) -> None:
    accelerator, loader, judge = _prepared(stateful=True)
    with AcceleratorCheckpoint(accelerator, tmp_path, options=SMALL) as checkpoint:
        for number, _ in enumerate(loader, 1):
            next(iter(judge))
            checkpoint.save(number)
        next(iter(judge))
        checkpoint.save(4)  # nothing tells that it was no training
        with pytest.warns(CheckpointWarning, match="begins anew"):
            next(iter(judge))


def test_skipping_batches_of_a_stateful_loader_is_told_of(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader: Any = accelerator.prepare(DataLoader(range(12), batch_size=2))  # type: ignore[arg-type]
    told = pytest.warns(CheckpointWarning, match="goes on by itself")
    with AcceleratorCheckpoint(accelerator, tmp_path / "ckpts"), told:
        accelerator.skip_first_batches(loader, 2)


def test_what_keeps_its_states_to_itself_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    try:
        with pytest.raises(ConfigError, match="checkpoint_engine"):
            AcceleratorCheckpoint(accelerator, tmp_path / "ckpts")
    finally:
        accelerator.state.distributed_type = DistributedType.NO
