"""A worker of an elastic job: trains, and fails as it is told. Started by horovodrun with a JSON argument.

The argument: folder, epochs, commit_every, options, store, roots, and a crash: {kind, batch, victim}, or
{layers: {batch: number}}: the steps of these batches break off after so many layers.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import elastic_model as parts
import horovod.torch as hvd
import psutil
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic import ElasticSampler

import ckpt_horovod
from ckpt_core import Options, StoreOptions, TorchStore
from ckpt_core.restore import RestoreWarning
from ckpt_core.system.files import Files
from ckpt_horovod import stepping
from ckpt_horovod.elastic import TorchState

TOLD = json.loads(sys.argv[1])
FOLDER = Path(TOLD["folder"])
CRASH = {"kind": None, "batch": -1, "layers": {}} | TOLD.get("crash", {})


def note(event: str, **fields: Any) -> None:
    """Tell the test what happens, in one write."""
    row = {"event": event, "pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), **fields}
    with open(FOLDER / "events", "ab", buffering=0) as log:
        log.write(json.dumps(row).encode() + b"\n")


def together() -> None:
    """Wait until both ranks are here."""
    (FOLDER / f"here.{hvd.rank()}").touch()
    deadline = time.monotonic() + 60
    while not all((FOLDER / f"here.{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def die() -> None:
    """As by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def stuck(*arguments: Any) -> None:
    """A disk that hangs."""
    time.sleep(3600)


def tear(optimizer: Any, layers: int) -> None:
    """Let the next step fail half way, after so many layers were updated."""
    stepper = optimizer._iterations._stepper
    stock, size, updated = stepper.whole, stepping.CHUNK_BYTES, []
    real = stepping.SubSteps.update

    def update(self: Any, params: Any) -> None:
        if len(updated) == layers:
            stepper.whole, stepping.CHUNK_BYTES, stepping.SubSteps.update = stock, size, real
            note("torn", layers=len(updated))
            raise HorovodInternalError("a layer was not reduced")
        real(self, params)
        updated.append(params)

    stepping.CHUNK_BYTES, stepping.SubSteps.update = 1, update
    stepper.whole = lambda checkpointer, closure: stepper.in_layers(checkpointer, None)


def crash_before(state: TorchState) -> None:
    """What goes wrong before a batch, once."""
    layers = CRASH["layers"].pop(str(state.batch), None)
    if layers is not None:
        tear(state.optimizer, layers)
    if state.batch != CRASH["batch"]:
        return
    kind, CRASH["batch"] = CRASH["kind"], -1
    # A survivor must not: the rank that it waits for may be dead by then.
    if CRASH.get("victim", hvd.rank()) == hvd.rank():
        state.checkpointer.wait()
    if kind == "kill_all":
        together()
        die()
    elif kind == "kill_one" and hvd.rank() == CRASH["victim"]:
        die()
    elif kind == "stuck" and CRASH.get("victim") in (None, hvd.rank()):
        Files.sync = stuck  # type: ignore[method-assign]
    elif kind == "hosts" and hvd.rank() == 0:
        (FOLDER / "changed").touch()
        deadline = time.monotonic() + 60
        while state._host_messages.empty():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def crash_after() -> None:
    """What goes wrong right after a commit whose bytes cannot become durable."""
    if Files.sync is stuck:
        if CRASH.get("victim") is None:
            together()
        die()


def die_between_ranks() -> None:
    """Die after the ranks have been told where to meet, and before they do."""
    real = TorchStore.from_exchange

    def from_exchange(exchange: Any, **options: Any) -> Any:
        def told(text: str | None) -> str:
            exchange(text)
            die()
            raise AssertionError

        return real(told, **options)

    TorchStore.from_exchange = from_exchange  # type: ignore[method-assign]


@hvd.elastic.run
def train(state: TorchState) -> None:
    """Train to the end from wherever the state is."""
    model, optimizer, sampler = state.model, state.optimizer, state.sampler
    note("synced", step=optimizer.iterations, batch=state.batch, epoch=state.epoch)
    while state.epoch < TOLD["epochs"]:
        for items in parts.chunks(list(sampler)):
            crash_before(state)
            optimizer.zero_grad()
            loss = parts.loss_of(model, items)
            loss.backward()
            optimizer.step()
            state.scheduler.step()
            sampler.record_batch(0, parts.SHARE)
            state.batch += 1
            state.losses.append(loss.item())
            if state.batch % TOLD["commit_every"] == 0:
                state.commit()
                crash_after()
        state.epoch += 1
        sampler.set_epoch(state.epoch)


def end_of(state: TorchState) -> dict[str, Any]:
    """All that must be equal when two jobs are."""
    return {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict(),
        "sampler": state.sampler.state_dict(),
        "values": [state.epoch, state.batch, state.losses, state.lr_resets],
        "iterations": state.optimizer.iterations,
        "torch": torch.get_rng_state(),
    }


def main() -> None:
    """Make everything as a user would."""
    warnings.simplefilter("error")
    warnings.simplefilter("default", RestoreWarning)
    hvd.init()
    note("began", born=psutil.Process().create_time(), host=os.environ["HOROVOD_HOSTNAME"])
    torch.set_num_threads(1)
    if CRASH["kind"] == "open" and hvd.rank() == CRASH["victim"]:
        die_between_ranks()
    roots = TOLD.get("roots", "shared")
    model = parts.make_model()
    torch.manual_seed(5 + hvd.rank())
    plain = parts.make_optimizer(model)
    optimizer = ckpt_horovod.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        checkpointer=None,
        every_n_steps=TOLD.get("every_n_steps"),
        layerwise="in_step",
    )
    state = TorchState(
        model=model,
        optimizer=optimizer,
        root=FOLDER / ("ckpts" if roots == "shared" else f"ckpts.{os.environ['HOROVOD_HOSTNAME']}"),
        options=Options(timeout=60, **TOLD.get("options", {})),
        store_options=StoreOptions(**{"dead_after": 30, "timeout": 60, **TOLD.get("store", {})}),
        roots=roots,
        per_rank=["model.1.running_mean", "model.1.running_var", "losses"],
        scheduler=parts.make_scheduler(optimizer),
        sampler=ElasticSampler(list(range(parts.ITEMS))),
        epoch=0,
        batch=0,
        losses=[],
        lr_resets=0,
    )

    def rescale() -> None:
        state.lr_resets += 1

    state.register_reset_callbacks([rescale])
    with state:
        train(state)
        note("trained")
    note("ended", initial=state._parts.have_initial)
    torch.save(end_of(state), FOLDER / f"end.{hvd.rank()}.pt")
    gc.freeze()  # the end of the process would look for garbage among all that is imported


main()
