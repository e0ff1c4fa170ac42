"""`blocking`, `pipelined=False` and presets under Horovod: all ranks hear the same, at the same place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest

import ckpt_horovod
from ckpt_core import Checkpointer, CkptError, CommitError, Options, committed_steps, verify
from ckpt_core.coordination import NoCoordination
from ckpt_horovod.elastic import TorchState
from tests.integrations.horovod import elastic_model as parts
from tests.integrations.horovod.cases import BLOCKING, STRATEGIES
from tests.integrations.horovod.launch import Outcome
from tests.integrations.horovod.test_consistency import check


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_step_is_exact_under_random_delays(pair: Outcome, name: str) -> None:
    check(pair, name, 1)
    for found in pair.of(name):
        assert found["warnings"] == []
        assert found["in_layers"] > 5 or name.endswith("lazy")


@pytest.mark.parametrize("mode", BLOCKING)
def test_a_disk_that_fails_on_one_rank_is_told_on_both_by_that_very_iteration(
    pair: Outcome, mode: str
) -> None:
    where = BLOCKING[mode]["ends"].replace("call", "end")
    first, second = pair.of(f"failing-blocking-{mode}")
    for found, kind in ((first, "CommitError"), (second, "PersistError")):
        assert found["found"] == found["stock"]
        assert found["raised"] == [[number, where, kind] for number in (2, 3, 4)]
    root = pair.folder / f"failing-blocking-{mode}.root"
    assert verify(root).ok
    # `zero_grad` ends the iteration before.
    lost = {2, 3, 4} if where == "zero_grad" else {3, 4, 5}
    assert set(committed_steps(root)) == set(range(1, 9)) - lost


def test_a_rank_that_is_short_of_memory_is_told_and_ranks_stay_together(pair: Outcome) -> None:
    first, second = pair.of("short_of_memory")
    assert first["raised"] == [[1, "end", "CommitError"], [3, "end", "CommitError"]]
    assert second["raised"] == [[1, "end", "ConfigError"], [3, "end", "ConfigError"]]
    for found in (first, second):
        assert (found["steps"], found["ended"]) == ([9], 4)


# -- elastic jobs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Horovod in this process, on one rank."""
    hvd.init()
    yield
    hvd.shutdown()


class Losing(NoCoordination):
    """From some moment on, a commit finds that `blamed` is dead."""

    def __init__(self, blamed: int) -> None:
        super().__init__()
        self.blamed = blamed
        self.lost = False

    def agree(self, attempt_id: str, step: int, *args: Any) -> Any:
        if self.lost:
            text = f"step {step} is not committed: rank {self.blamed} is taken for dead"
            raise CommitError(text, failures={self.blamed: CkptError("silent")})
        return super().agree(attempt_id, step, *args)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("every", [None, 1])
def test_a_worker_that_dies_in_a_blocking_save_does_not_end_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int | None
) -> None:
    """Horovod goes on after its own error alone, which the next all-reduce raises."""
    for blamed, raises in ((1, False), (0, True)):
        ranks = Losing(blamed)
        model = parts.make_model()
        optimizer = ckpt_horovod.DistributedOptimizer(
            parts.make_optimizer(model),
            named_parameters=list(model.named_parameters()),
            checkpointer=None,
            every_n_steps=every,
        )
        root = tmp_path / str(blamed)
        state = TorchState(model, optimizer, root=root)
        state._checkpointer = Checkpointer(root, Options(blocking=True), coordination=ranks)
        state._iterations.use(state._checkpointer)

        def iterate(state: TorchState = state) -> None:
            state.optimizer.zero_grad()
            parts.loss_of(state.model, [1, 2]).backward()
            state.optimizer.step()
            if every is None:
                state.commit()
            else:
                state.optimizer.end_iteration()

        with caplog.at_level(logging.WARNING, logger="ckpt_horovod"):
            iterate()
            ranks.lost = True
            if raises:
                with pytest.raises(CommitError, match="rank 0 is taken for dead"):
                    iterate()
            else:
                iterate()
        assert committed_steps(root) == (1,) and optimizer.iterations == 2
        ranks.lost = False
        state.close()
    said = [row.getMessage() for row in caplog.records if row.name == "ckpt_horovod"]
    assert len(said) == 1 and "iteration 2 was not saved, since a rank was lost" in said[0]
