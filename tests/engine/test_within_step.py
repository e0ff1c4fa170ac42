"""A save that is made within an optimizer's step is of the state right before the update, whole."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_training import Gate, Run
from torch import nn

import ckpt_core
from ckpt_core import Checkpointer, ConfigError, Options, StagingError
from ckpt_core.save import Admission

LEAVES, ELEMENTS = 60, 4000
SETTINGS = Options(
    chunk_bytes=4096, staging_bytes="64KiB", eager_leaf_bytes=0, keep_last=None, mode="host"
)
Save = Callable[[], Any]


class Training:
    """All leaves are equal to the count of updates, and too many for the staging memory."""

    def __init__(self, kind: Callable[..., Any] = torch.optim.SGD) -> None:
        made = [nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(LEAVES)]
        self.state = {f"w{number:03}": param for number, param in enumerate(made)}
        self.optimizer = kind(made, lr=1.0)
        for param in made:
            param.grad = -torch.ones(ELEMENTS)


def plain(ck: Checkpointer, state: dict[str, Any]) -> Any:
    return ck.save(1, state).committed


def layers(ck: Checkpointer, state: dict[str, Any]) -> Any:
    half = dict(list(state.items())[: LEAVES // 2])
    made = ck.begin(1, half)
    made.stage(half)
    return made.seal(state).committed


def opened(ck: Checkpointer, state: dict[str, Any]) -> Any:
    """Begun and staged; sealed behind the step."""
    made = ck.begin(1, state)
    made.stage(state)
    return made


def files(ck: Checkpointer, state: dict[str, Any]) -> Any:
    made = ck.begin_files(1, "tag")
    made.add("w.pt", state)
    return made.seal().committed


def by_hook(optimizer: Any, save: Save) -> None:
    optimizer.register_step_pre_hook(lambda *_: save() and None)
    optimizer.step()


def by_closure(optimizer: Any, save: Save) -> None:
    optimizer.step(lambda: save() and None)


def by_both(optimizer: Any, save: Save) -> None:
    """In a hook behind the step of another optimizer, in a closure."""
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    inner.register_step_post_hook(lambda *_: save() and None)
    optimizer.step(inner.step)


def behind_an_error(optimizer: Any, save: Save) -> None:
    """The step before raises, so that no hook behind it is called."""

    def fails() -> None:
        raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        optimizer.step(fails)
    by_closure(optimizer, save)


def on_a_thread(optimizer: Any, save: Save) -> None:
    thread = threading.Thread(target=by_closure, args=(optimizer, save))
    thread.start()
    thread.join()


def within_another(optimizer: Any, save: Save) -> None:
    """An optimizer that changes the same leaves once more, behind the step of the one it wraps."""

    class Wrapping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            optimizer.step()
            with torch.no_grad():
                for group in self.param_groups:
                    torch._foreach_add_(group["params"], 1)

    optimizer.register_step_post_hook(lambda *_: save() and None)
    Wrapping(optimizer.param_groups[0]["params"], lr=1.0).step()


class Deeper(torch.autograd.Function):
    """A backward pass within a backward pass: from some depth on, torch takes a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, then: Save) -> torch.Tensor:
        ctx.depth, ctx.then = depth, then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.depth:
            with torch.enable_grad():
                deeper(ctx.depth - 1, ctx.then)
        else:
            ctx.then()
        return grads[0], None, None


def deeper(depth: int, then: Save) -> None:
    x = torch.ones(1, requires_grad=True)
    Deeper.apply(x, depth, then).sum().backward()


def on_a_thread_of_backward(optimizer: Any, save: Save) -> None:
    mine = threading.get_ident()

    def then() -> None:
        assert threading.get_ident() != mine
        save()

    optimizer.step(lambda: deeper(100, then))


PLACES = (
    *(by_hook, by_closure, by_both, behind_an_error, on_a_thread, within_another),
    on_a_thread_of_backward,
)


def step_saving(root: Path, make: Callable[..., Any], where: Callable[..., None]) -> Any:
    """A step in which a save is made on a slow disk, and what is committed of it."""
    training, gate, made = Training(), Gate(), []
    with Checkpointer(root, SETTINGS, files=gate) as ck:
        ck.leave_barrier_to_owner(Training().optimizer)

        def save() -> None:
            gate.shut_for(0.1)
            made.append(make(ck, training.state))

        where(training.optimizer, save)
        if not isinstance(made[0], Future):
            made[0] = made[0].seal().committed
        made[0].result(60)
    before = {float(leaf.detach()[0]) for leaf in training.state.values()}
    updates = 2.0 if where is within_another else 1.0
    assert before == {updates}
    if make is files:
        return torch.load(root / "tag" / "w.pt"), updates
    return ckpt_core.load(root / "step-000000000001"), updates


@pytest.mark.parametrize("make", [plain, layers, opened, files], ids=lambda make: make.__name__)
@pytest.mark.parametrize("where", PLACES, ids=lambda where: where.__name__)
def test_it_is_of_the_state_right_before_the_update(
    tmp_path: Path, make: Callable[..., Any], where: Callable[..., None]
) -> None:
    tree, updates = step_saving(tmp_path, make, where)
    assert {name: leaf.unique().tolist() for name, leaf in tree.items()} == {
        f"w{number:03}": [updates - 1] for number in range(LEAVES)
    }


def test_one_that_its_owner_makes_is_waited_for_only_in_the_step_that_it_calls(
    tmp_path: Path,
) -> None:
    """As Horovod's wrapped optimizer: around a step of torch lies its own, which waits by itself."""
    gate, state = Gate(), Training().state

    class Owning(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            made.append(ck.save(1, state))
            assert not ck.is_staged()
            gate.open_up()
            ck.wait_staged()
            super().step(closure)

    made: list[Any] = []
    torch.optim.SGD(state.values(), lr=1.0)  # torch adds hooks to a class with its first object
    optimizer = Owning(state.values(), lr=1.0)
    for param in state.values():
        param.grad = -torch.ones(ELEMENTS)
    with Checkpointer(tmp_path, SETTINGS, files=gate) as ck:
        ck.leave_barrier_to_owner(optimizer)
        gate.shut()

        def closure() -> None:
            gate.shut_for(0.1)
            made.append(ck.save(2, state))
            assert ck.is_staged()

        optimizer.step(closure)
        for handle in made:
            handle.committed.result(60)
    for step in (1, 2):
        tree = ckpt_core.load(tmp_path / f"step-{step:012d}")
        assert all((leaf == 0).all() for leaf in tree.values())


def test_behind_the_update_and_between_steps_nothing_waits(tmp_path: Path) -> None:
    training, gate = Training(), Gate()
    with Checkpointer(tmp_path, SETTINGS, files=gate) as ck:

        def save(step: int) -> None:
            gate.shut()
            ck.save(step, training.state)
            assert not ck.is_staged()  # the disk stands still: it cannot be
            gate.open_up()
            ck.wait()

        training.optimizer.register_step_post_hook(lambda *_: save(1))
        training.optimizer.step()
        save(2)
    for step in (1, 2):
        tree = ckpt_core.load(tmp_path / f"step-{step:012d}")
        assert all((leaf == 1).all() for leaf in tree.values())


@pytest.mark.parametrize("make", [plain, layers, opened, files], ids=lambda make: make.__name__)
def test_where_the_wait_is_in_vain_the_save_is_given_up(
    tmp_path: Path, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a loop that goes on with the update."""
    training, gate = Training(), Gate()
    with Checkpointer(tmp_path, SETTINGS, files=gate) as ck:

        def save() -> None:
            gate.shut()
            patience = ck._engine.flights.patience
            monkeypatch.setattr(ck._engine.flights, "patience", lambda deadline: 0.0)
            with pytest.raises(StagingError, match="still being copied"):
                make(ck, training.state)
            monkeypatch.setattr(ck._engine.flights, "patience", patience)

        by_closure(training.optimizer, save)
        gate.open_up()
        ck.wait()
        assert ck.steps() == () and not (tmp_path / "tag").exists()
        ck.save(2, training.state).committed.result(60)


def test_a_training_with_a_closure_of_lbfgs(tmp_path: Path) -> None:
    run = Run()
    optimizer = torch.optim.LBFGS(run.model.parameters(), max_iter=4)
    copies: list[Any] = []
    settings = Options(chunk_bytes=4096, staging_bytes="96KiB", eager_leaf_bytes=0, keep_last=None)
    with Checkpointer(tmp_path, settings) as ck:

        def closure() -> Any:
            optimizer.zero_grad()
            loss = run.model(torch.ones(8, 16)).square().mean()
            loss.backward()
            copies.append([param.detach().clone() for param in run.model.parameters()])
            ck.save(len(copies), dict(run.model.named_parameters()))
            return loss

        for _ in range(3):
            optimizer.step(closure)
        ck.wait()
        assert ck.steps() == tuple(range(1, len(copies) + 1))
    for step, copy in enumerate(copies, 1):
        tree = ckpt_core.load(tmp_path / f"step-{step:012d}")
        found = [tree[name] for name, _ in run.model.named_parameters()]
        assert all(map(torch.equal, found, copy))


class Held:
    """What a training step has in hand."""


@pytest.mark.parametrize("within", [False, True], ids=["between steps", "in a closure"])
@pytest.mark.parametrize("save", [plain, layers, files])
def test_nothing_that_the_caller_has_in_hand_stays_for_the_garbage_collector(
    save: Any, within: bool, tmp_path: Path
) -> None:
    training = Training()

    def made(ck: Checkpointer) -> weakref.ref[Held]:
        held = Held()

        def closure() -> torch.Tensor:
            assert held is not None
            save(ck, training.state).result(60)
            return torch.zeros(())

        training.optimizer.step(closure) if within else closure()
        return weakref.ref(held)

    with Checkpointer(tmp_path, SETTINGS) as ck:
        gc.collect()
        gc.disable()
        try:
            assert made(ck)() is None
        finally:
            gc.enable()


def test_an_open_save_that_is_interrupted_there_is_over_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with Checkpointer(tmp_path, SETTINGS) as ck:
        made = ck.begin(1, training.state)
        monkeypatch.setattr(Admission, "wait_copied", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step(lambda: made.stage(training.state))  # type: ignore[arg-type,return-value]
        for go_on in (lambda: made.stage(training.state), lambda: made.seal(training.state)):
            with pytest.raises(ConfigError, match="begin a new one"):
                go_on()
        assert ck.steps() == ()
