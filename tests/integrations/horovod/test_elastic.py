"""Elastic jobs of real workers: some die, all die, a step breaks off, hosts come and go."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.runner.elastic.worker import HostUpdateResult

import ckpt_horovod
from ckpt_core import (
    Checkpointer,
    ConfigError,
    EverySeconds,
    Options,
    RngState,
    StoreOptions,
    committed_steps,
)
from ckpt_core.restore import RestoreWarning
from ckpt_horovod.elastic import TorchState
from tests import places
from tests.integrations.horovod import elastic_model as parts
from tests.integrations.horovod.elastic_jobs import GROWS, SHRINKS, ElasticJob, differences

LAST = 2 * parts.ITEMS // (2 * parts.SHARE)
"""Batches of two epochs on two ranks."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ElasticJob:
    """A job to which nothing happened."""
    job = ElasticJob(tmp_path_factory.mktemp("undisturbed"))
    assert job.run() == 0, job.output()
    assert job.syncs() == [(0, 2)]
    return job


def _same_ends(job: ElasticJob, other: ElasticJob, *, resets: int) -> None:
    """All bits of both ranks are equal, but for the number of resets, which is as told."""
    for rank in range(2):
        mine, its = job.end(rank), other.end(rank)
        assert mine["values"].pop() == resets
        its["values"].pop()
        assert differences(mine, its) == []


# -- all workers die -------------------------------------------------------------------------------


def test_a_job_whose_workers_all_died_resumes_from_disk_and_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: ElasticJob
) -> None:
    job = ElasticJob(tmp_path)
    assert job.run(crash={"kind": "kill_all", "batch": 5}) != 0
    assert committed_steps(job.root) == (2, 4)
    assert job.run() == 0, job.output()
    assert job.syncs() == [(0, 2), (4, 2)]
    _same_ends(job, undisturbed, resets=0)


def test_a_commit_that_is_cut_short_leaves_the_one_before_even_with_keep_last_1(
    tmp_path: Path, undisturbed: ElasticJob
) -> None:
    job = ElasticJob(tmp_path)
    options = {"keep_last": 1}
    assert job.run(options=options, crash={"kind": "stuck", "batch": 7}) != 0
    assert committed_steps(job.root) == (6,)
    assert any((job.root / ".inflight").glob("*-*/*")), "step 8 was not under way"
    assert job.run(options=options) == 0, job.output()
    assert job.syncs() == [(0, 2), (6, 2)]
    _same_ends(job, undisturbed, resets=0)


def test_every_n_steps_saves_layer_by_layer_without_commits(
    tmp_path: Path, undisturbed: ElasticJob
) -> None:
    job = ElasticJob(tmp_path)
    told = {"every_n_steps": 3, "commit_every": 100}
    assert job.run(**told, crash={"kind": "kill_all", "batch": 8}) != 0
    assert committed_steps(job.root) == (3, 6)
    assert job.run(**told) == 0, job.output()
    assert job.syncs() == [(0, 2), (6, 2)]
    _same_ends(job, undisturbed, resets=0)


def test_a_job_of_another_size_resumes_and_runs_its_reset_callbacks(
    tmp_path: Path, undisturbed: ElasticJob
) -> None:
    job = ElasticJob(tmp_path, hosts="echo localhost:1", ranks=1)
    shutil.copytree(undisturbed.root, job.root)
    assert job.run(epochs=3) == 0, job.output()
    assert job.syncs() == [(LAST, 1)]
    end = job.end(0)
    assert end["values"][:2] == [3, LAST + parts.ITEMS // parts.SHARE]
    assert end["values"][-1] == 1


# -- some workers die ------------------------------------------------------------------------------


@pytest.fixture(params=range(1 if places.run_number() != "all" else 2))
def victim(request: pytest.FixtureRequest) -> int:
    """One of both ranks, in each run another one."""
    return places.some([0, 1], 1, of=request.function.__name__)[request.param]


def test_a_worker_that_is_left_alone_goes_on_from_the_last_durable_commit(
    tmp_path: Path, victim: int
) -> None:
    job = ElasticJob(tmp_path)
    crash = {"kind": "kill_one", "batch": 5, "victim": victim}
    assert job.run(options={"keep_last": None}, crash=crash) == 0, job.output()
    assert job.syncs() == [(0, 2), (4, 1)]
    found = job.end(0)
    assert found["values"].pop() == 1, "the reset callback ran once"
    assert differences(found, _continued_alone(job.root, 4)) == []


def test_a_commit_that_a_dead_worker_cannot_finish_is_given_up(tmp_path: Path, victim: int) -> None:
    job = ElasticJob(tmp_path)
    crash = {"kind": "stuck", "batch": 3, "victim": victim}
    assert job.run(store={"dead_after": 5}, crash=crash) == 0, job.output()
    assert job.syncs() == [(0, 2), (2, 1)]
    end = job.end(0)
    assert end["values"][:2] == [2, end["iterations"]]


def test_with_a_root_for_each_node_the_node_that_is_left_has_all_it_needs(tmp_path: Path) -> None:
    job = ElasticJob(tmp_path)
    crash = {"kind": "kill_one", "batch": 5, "victim": 0}
    assert job.run(options={"keep_last": None}, roots="node", crash=crash) == 0, job.output()
    assert job.syncs() == [(0, 2), (4, 1)]
    host = next(row["host"] for row in job.told("began") if row["rank"] == 1)
    found = job.end(0)
    del found["values"][-1]
    assert differences(found, _continued_alone(job.node_root(host), 4)) == []


def test_a_worker_that_dies_while_ranks_meet_is_left_behind(tmp_path: Path) -> None:
    job = ElasticJob(tmp_path)
    crash = {"kind": "open", "victim": 1, "batch": -1}
    assert job.run(store={"timeout": 5}, crash=crash) == 0, job.output()
    assert job.syncs() == [(0, 1)]
    assert len(job.told("ended")) == 1


def test_a_worker_that_dies_before_anything_is_durable_leaves_the_other_at_the_beginning(
    tmp_path: Path,
) -> None:
    job = ElasticJob(tmp_path)
    crash = {"kind": "kill_one", "batch": 1, "victim": 1}
    assert job.run(crash=crash) == 0, job.output()
    assert job.syncs() == [(0, 2), (0, 1)]
    assert job.end(0)["values"][:2] == [2, 2 * parts.ITEMS // parts.SHARE]
    assert [row["initial"] for row in job.told("ended")] == [False]


def _continued_alone(root: Path, step: int) -> dict[str, Any]:
    """What a single rank makes of a checkpoint, without Horovod; as `end_of` of the script."""
    model = parts.make_model()
    optimizer = parts.make_optimizer(model)
    scheduler = parts.make_scheduler(optimizer)
    sampler, values = _Held(), _Held()
    tree = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RngState()}
    tree |= {"sampler": sampler, "attributes": values}
    before = RngState().state_dict()
    try:
        with (
            Checkpointer(root) as checkpointer,
            pytest.warns(RestoreWarning, match="saved by 2 ranks"),
        ):
            assert checkpointer.restore(tree, step=step) is not None
        first, batch, losses = (values.found[name] for name in ("epoch", "batch", "losses"))
        done = sampler.found["processed_num"]
        for epoch in range(first, 2):
            for items in parts.chunks(parts.order(epoch)[done:]):
                optimizer.zero_grad()
                loss = parts.loss_of(model, items)
                loss.backward()
                optimizer.step()
                scheduler.step()
                batch += 1
                losses.append(loss.item())
            done = 0
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "sampler": {"epoch": 2, "processed_num": 0},
            "values": [2, batch, losses],
            "iterations": batch,
            "torch": torch.get_rng_state(),
        }
    finally:
        RngState().load_state_dict(before)


class _Held:
    """Keeps what was saved of an object that is not here."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self.found = copy.deepcopy(found)


# -- a step breaks off -----------------------------------------------------------------------------


def test_steps_that_fail_after_some_layers_leave_no_trace(
    tmp_path: Path, undisturbed: ElasticJob
) -> None:
    job = ElasticJob(tmp_path)
    layers = {3: 0, 7: 3, 9: 7}
    assert job.run(crash={"layers": layers}) == 0, job.output()
    torn = [row["layers"] for row in job.told("torn")]
    assert torn == [number for number in layers.values() for _ in range(2)]
    assert job.syncs() == [(0, 2), (2, 2), (6, 2), (8, 2)]
    _same_ends(job, undisturbed, resets=3)


# -- hosts come and go -----------------------------------------------------------------------------


def test_a_new_worker_takes_the_live_state_and_saves_with_the_others(tmp_path: Path) -> None:
    job = ElasticJob(tmp_path, hosts=GROWS, ranks=1)
    assert job.run(crash={"kind": "hosts", "batch": 3}) == 0, job.output()
    assert job.syncs() == [(0, 1), (4, 2)]
    ends = [job.end(rank) for rank in range(2)]
    own = {"1.running_mean", "1.running_var"}
    for end in ends:
        end["model"] = {key: value for key, value in end["model"].items() if key not in own}
        epoch, batch, losses, resets = end.pop("values")
        assert (epoch, batch, len(losses), resets) == (2, end["iterations"], batch, 1)
        del end["torch"]
    assert differences(*ends) == []
    last = max(committed_steps(job.root))
    assert last == ends[0]["iterations"] // 2 * 2


def test_a_worker_whose_host_is_taken_away_leaves_the_other_where_it_is(tmp_path: Path) -> None:
    job = ElasticJob(tmp_path, hosts=SHRINKS)
    crash = {"kind": "hosts", "batch": 3}
    assert job.run(options={"keep_last": None}, crash=crash) == 0, job.output()
    assert job.syncs() == [(0, 2), (4, 1)]
    end = job.end(0)
    assert end["values"].pop() == 1
    assert len(end["values"].pop()) == end["iterations"]
    assert end["values"] == [2, end["iterations"]]


# -- arguments -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Any:
    """Horovod in this process, on one rank."""
    hvd.init()
    yield
    hvd.shutdown()


def _wrapped(**options: Any) -> tuple[torch.nn.Module, Any]:
    model = parts.make_model()
    named = list(model.named_parameters())
    options = {"checkpointer": None, **options}
    plain = parts.make_optimizer(model)
    return model, ckpt_horovod.DistributedOptimizer(plain, named_parameters=named, **options)


def _wrong(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    model, optimizer = _wrapped()
    given = {"model": model, "optimizer": optimizer, "root": "ckpts"}
    change(given)
    return given


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda given: given.pop("root"), "root=None: give the directory"),
        (lambda given: given.update(root=""), "root='': give the directory"),
        (lambda given: given.update(root="s3://b/run"), "root='s3://b/run' is a URL"),
        (
            lambda given: given.pop("optimizer"),
            "optimizer=NoneType is not wrapped: give the result",
        ),
        (
            lambda given: given.update(optimizer=parts.make_optimizer(given["model"])),
            "optimizer=AdamW is not wrapped: give the result of ckpt_horovod.DistributedOptimizer",
        ),
        (
            lambda given: given.update(optimizer=_wrapped(policy=EverySeconds(60))[1]),
            "ranks that come and go cannot share",
        ),
        (lambda given: given.update(options={"keep_last": 2}), "pass ckpt_core.Options"),
        (lambda given: given.update(store_options=5), "pass ckpt_core.StoreOptions"),
        (lambda given: given.update(roots="nodes"), "use 'shared' or 'node'"),
        (
            lambda given: given.update(roots="node", options=Options(keep_last=1)),
            "keep_last=1 is not enough with roots='node'",
        ),
        (lambda given: given.update(per_rank="losses"), r"must be a list, such as \['losses'\]"),
        (lambda given: given.update(rng=3), "rng=: this name is taken"),
        (lambda given: given.update(attributes=3), "attributes=: this name is taken"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_do(change: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TorchState(**_wrong(change))


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_has_a_checkpointer_is_refused(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path, coordination=ckpt_horovod.coordination()) as checkpointer,
        pytest.raises(ConfigError, match="wrap it with checkpointer=None"),
    ):
        TorchState(*_wrapped(checkpointer=checkpointer), root=tmp_path)


@pytest.mark.usefixtures("alone")
def test_a_commit_before_the_first_sync_and_after_close_is_refused(tmp_path: Path) -> None:
    state = TorchState(*_wrapped(), root=tmp_path, batch=0)
    with pytest.raises(ConfigError, match="inside the function that hvd"):
        state.commit()
    with state:
        state.sync()
        state.commit()
    assert committed_steps(tmp_path) == (0,)
    with pytest.raises(ConfigError, match="inside the function that hvd"):
        state.commit()


@pytest.mark.usefixtures("alone")
def test_hosts_that_change_are_looked_for_after_an_iteration_and_not_within_it(
    tmp_path: Path,
) -> None:
    model, optimizer = _wrapped(every_n_steps=1)
    with TorchState(model, optimizer, root=tmp_path) as state:
        state.sync()
        state.on_hosts_updated(time.time(), HostUpdateResult.added)
        with optimizer.iteration():
            for look in (state.check_host_updates, state.commit):
                with pytest.raises(ConfigError, match="call it after the block"):
                    look()
        with pytest.raises(HostsUpdatedInterrupt):
            state.check_host_updates()
        assert optimizer.iterations == 1
    assert committed_steps(tmp_path) == (1,)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("changes", [False, True])
def test_hosts_that_change_between_the_passes_of_a_step_are_told_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    """Ranks that meet anew begin a step anew, and the passes before would be lost."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # one rank reduces as well
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = ckpt_horovod.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=list(model.named_parameters()),
        checkpointer=None,
        backward_passes_per_step=2,
    )
    with TorchState(model, optimizer, root=tmp_path) as state:

        def train() -> None:
            nonlocal changes
            for number in range(optimizer.iterations, 4):
                with optimizer.iteration():
                    model(torch.tensor([[1.0, number]])).sum().backward()
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                if changes and number == 2:
                    changes = False
                    state.on_hosts_updated(time.time(), HostUpdateResult.added)
                state.check_host_updates()

        state.sync()
        if changes:
            with pytest.raises(HostsUpdatedInterrupt):
                train()
            assert optimizer.iterations == 4
            state.on_reset()
            state.sync()
        train()
    assert model.weight.tolist() == [[-4.0, -6.0]]


@pytest.mark.usefixtures("alone")
def test_behind_a_change_of_hosts_a_pass_without_a_step_is_an_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Checkpointer that was closed had ended the iteration before, and not the one that begins."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # one rank reduces as well
    model, optimizer = _wrapped(backward_passes_per_step=2)
    with TorchState(model, optimizer, root=tmp_path, batch=0) as state:

        def train(until: int) -> None:
            while state.batch < until:
                state.batch += 1
                parts.loss_of(model, [1, 2]).backward()
                if state.batch % 2 == 0:
                    optimizer.step()
                    state.check_host_updates()
                optimizer.end_iteration()
                if state.batch % 2 == 0:
                    optimizer.zero_grad()

        state.sync()
        state.on_hosts_updated(time.time(), HostUpdateResult.added)
        with pytest.raises(HostsUpdatedInterrupt):
            train(2)
        state.on_reset()
        state.sync()
        train(6)
        assert optimizer.iterations == 6


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("behind", [False, True])
def test_looks_for_hosts_that_are_never_behind_a_step_are_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    behind: bool,
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # one rank reduces as well
    model, optimizer = _wrapped(backward_passes_per_step=2)
    with TorchState(model, optimizer, root=tmp_path) as state:
        state.sync()
        for number in range(8):
            parts.loss_of(model, [1, 2]).backward()
            if number == 0:
                state.on_hosts_updated(time.time(), HostUpdateResult.added)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            elif not behind or number == 0:
                state.check_host_updates()
        if behind:
            with pytest.raises(HostsUpdatedInterrupt):
                state.check_host_updates()
        optimizer.zero_grad()
    told = [text for text in caplog.messages if "call check_host_updates() or commit()" in text]
    assert len(told) == (0 if behind else 1)


def test_a_state_that_is_not_closed_finishes_its_commit_when_the_process_exits(
    tmp_path: Path,
) -> None:
    text = f"""
import horovod.torch as hvd, torch, ckpt_horovod
from ckpt_horovod.elastic import TorchState
hvd.init()
model = torch.nn.Linear(512, 512)
optimizer = ckpt_horovod.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    checkpointer=None,
)
state = TorchState(model, optimizer, root={str(tmp_path)!r})
state.sync()
state.commit()
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=100)
    assert committed_steps(tmp_path) == (0,)


@pytest.mark.usefixtures("alone")
def test_values_and_objects_come_back_as_they_were_committed(tmp_path: Path) -> None:
    model, optimizer = _wrapped()
    scheduler = parts.make_scheduler(optimizer)
    options = StoreOptions(dead_after=5)
    state = TorchState(
        model,
        optimizer,
        root=tmp_path,
        store_options=options,
        scheduler=scheduler,
        batch=0,
        seen=[],
    )
    with state:
        state.sync()
        optimizer.zero_grad()
        parts.loss_of(model, [1, 2]).backward()
        optimizer.step()
        scheduler.step()
        state.batch, state.seen = 1, [1, 2]
        state.commit()
        committed = copy.deepcopy(model.state_dict()), scheduler.state_dict()
        optimizer.step()
        scheduler.step()
        state.batch = 2
        state.seen.append(3)
        state.restore()
        state.on_reset()
        state.sync()
        assert (state.batch, state.seen, optimizer.iterations) == (1, [1, 2], 1)
        assert differences((model.state_dict(), scheduler.state_dict()), committed) == []
        assert state.scheduler is scheduler
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.usefixtures("alone")
def test_another_model_in_its_place_is_saved_instead(tmp_path: Path) -> None:
    model, optimizer = _wrapped()
    head = torch.nn.Linear(2, 2)
    with TorchState(model, optimizer, root=tmp_path, head=head) as state:
        state.sync()
        state.head = other = torch.nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="cannot be replaced"):
            state.optimizer = _wrapped()[1]
        expected = other.weight.detach().clone()
        state.commit()
        with torch.no_grad():
            other.weight.zero_()
        state.restore()
        state.sync()
    assert torch.equal(other.weight, expected)
