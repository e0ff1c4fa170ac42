"""Steps of torch optimizers see to the barrier by themselves: no program here says a word about it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import updates
from engine_training import Gate, clone, same
from torch.optim import optimizer as torch_optimizer

import ckpt_core
from ckpt_core import Checkpointer, Options, SaveHandle
from tests.quick import few

SETTINGS = Options(
    chunk_bytes=4096, staging_bytes="64KiB", eager_leaf_bytes=64, keep_last=None, timeout=60
)


def contents(state: dict[str, Any]) -> Any:
    """A copy of what a checkpoint of the state holds."""
    if isinstance(state, dict):
        return {key: contents(value) for key, value in state.items()}
    if isinstance(state, list):
        return [contents(value) for value in state]
    return clone(state.state_dict()) if hasattr(state, "state_dict") else clone(state)


def plain(tree: Any) -> Any:
    """With plain dicts, whatever kind they were of."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, list | tuple) else tree


def save_whole(ck: Checkpointer, step: int, state: dict[str, Any]) -> SaveHandle:
    return ck.save(step, state)


def save_by_layers(ck: Checkpointer, step: int, state: dict[str, Any]) -> SaveHandle:
    tensors = dict(state["model"].named_parameters())
    save = ck.begin(step, tensors)
    for name in tensors:
        save.stage([name])
    return save.seal(state)


@pytest.mark.parametrize("save", [save_whole, save_by_layers])
@pytest.mark.parametrize(
    "make", few(updates.PROGRAMS, 4, of="programs"), ids=lambda make: make.__name__
)
def test_every_committed_step_is_the_state_at_its_step(
    tmp_path: Path, make: Callable[[], updates.Program], save: Any
) -> None:
    program, gate, copies = make(), Gate(), {}
    if save is save_by_layers and program.state() is not program.parts:
        pytest.skip("begin takes the parameters of a module")
    with Checkpointer(tmp_path, SETTINGS, files=gate) as ck:
        program.step()
        for step in (1, 2):
            copies[step] = contents(program.state())
            gate.shut_for(0.1)
            save(ck, step, program.state())
            program.step()
        ck.wait()
    for step, copy in copies.items():
        tree = ckpt_core.load(tmp_path / f"step-{step:012d}", trusted=True)
        assert same(plain(tree), plain(copy)), f"step {step} is torn"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_a_compiled_step_waits_as_well(tmp_path: Path) -> None:
    test_every_committed_step_is_the_state_at_its_step(tmp_path, updates.compiled, save_whole)


def test_files_are_not_torn_by_a_step_either(tmp_path: Path) -> None:
    program, gate = updates.sgd(), Gate()
    with Checkpointer(tmp_path, SETTINGS, files=gate) as ck:
        program.step()
        copy = contents(program.state())
        gate.shut_for(0.1)
        save = ck.begin_files(1, "tag")
        save.add("model.pt", program.model.state_dict())
        save.seal()
        program.step()
    assert same(dict(torch.load(tmp_path / "tag" / "model.pt")), dict(copy["model"]))


@contextmanager
def stuck(
    root: Path, program: updates.Program, **changes: Any
) -> Iterator[tuple[Checkpointer, Gate]]:
    """A save of the program's state that is not staged before the gate opens."""
    gate = Gate()
    settings = Options(**(vars_of(SETTINGS) | changes))
    with Checkpointer(root, settings, files=gate) as ck:
        program.step()
        gate.shut()
        ck.save(1, program.state())
        try:
            yield ck, gate
        finally:
            gate.open_up()


def vars_of(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def test_an_optimizer_waits_for_no_leaf_that_is_known_to_be_anothers(tmp_path: Path) -> None:
    program = updates.sgd()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(10))], lr=0.1)
    with stuck(tmp_path, program) as (ck, _):
        other.step()  # all of the state belongs to the program's optimizer
        assert not ck.is_staged()


def test_an_optimizer_waits_for_leaves_of_which_nobody_knows_whose_they_are(tmp_path: Path) -> None:
    program = updates.sgd()
    program.parts["teacher"] = torch.ones(100_000)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(10))], lr=0.1)
    with stuck(tmp_path, program) as (ck, gate):
        gate.shut_for(0.2)
        other.step()
        assert ck.is_staged(["teacher"])


def test_whoever_sees_to_the_barrier_is_not_held_up(tmp_path: Path) -> None:
    program = updates.sgd()
    with stuck(tmp_path, program, on_error="warn") as (ck, _):
        ck.leave_barrier_to_owner(program.parts["optimizer"])
        program.update()  # tears the save, which nobody commits
        assert not ck.is_staged()
    assert ckpt_core.committed_steps(tmp_path) == ()


def test_the_step_is_not_held_up_by_a_save_that_has_failed(tmp_path: Path) -> None:
    program = updates.sgd()
    with stuck(tmp_path, program, timeout=0.3, on_error="warn") as (ck, _):
        program.update()  # returns when the save is given up
        assert ck.steps() == ()


def test_a_wait_that_lasts_too_long_raises_and_changes_nothing(tmp_path: Path) -> None:
    program = updates.sgd()
    with stuck(tmp_path, program) as (ck, _):
        # As with a watchdog that never comes: the save outlives the wait.
        ck._engine.barriers._timeout_s = 0.1
        before = contents(program.state())
        with pytest.raises(ckpt_core.StagingError, match="step 1 was not staged"):
            program.update()
        assert same(contents(program.state()), before)


@pytest.mark.parametrize("by", ["step", "call"])
def test_a_wait_in_vain_is_told_as_any_other(by: str, tmp_path: Path) -> None:
    program = updates.sgd()
    with stuck(tmp_path, program) as (ck, _):
        ck._engine.barriers._timeout_s = 0.1
        with pytest.raises(ckpt_core.StagingError):
            program.update() if by == "step" else ck.wait_staged()
        (told,) = [event for event in ck.events.events() if event.name == "waited"]
        assert told.seconds >= 0.1


def test_an_interrupt_reaches_the_caller_of_the_step_and_nothing_has_changed(
    tmp_path: Path,
) -> None:
    program = updates.sgd()
    with stuck(tmp_path, program) as (ck, gate):
        before = contents(program.state())
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            program.update()
        assert same(contents(program.state()), before)
        gate.open_up()
        program.update()
        ck.save(2, program.state())


def test_several_checkpointers_are_all_waited_for(tmp_path: Path) -> None:
    program, gates = updates.sgd(), (Gate(), Gate())
    program.step()
    with (
        Checkpointer(tmp_path / "a", SETTINGS, files=gates[0]) as first,
        Checkpointer(tmp_path / "b", SETTINGS, files=gates[1]) as second,
    ):
        for number, gate in enumerate(gates):
            gate.shut_for(0.1 + 0.2 * number)
        first.save(1, program.state())
        second.save(1, program.state())
        program.update()
        assert first.is_staged() and second.is_staged()


def test_a_closed_checkpointer_leaves_no_hook_behind(tmp_path: Path) -> None:
    before = dict(torch_optimizer._global_optimizer_pre_hooks)
    with Checkpointer(tmp_path):
        assert len(torch_optimizer._global_optimizer_pre_hooks) == len(before) + 1
        with pytest.raises(ckpt_core.RootBusy):
            Checkpointer(tmp_path)
    assert dict(torch_optimizer._global_optimizer_pre_hooks) == before


def test_optimizers_are_not_kept_alive(tmp_path: Path) -> None:
    program = updates.sgd()
    with Checkpointer(tmp_path, SETTINGS) as ck:
        program.step()
        ck.save(1, program.state())
        program.update()
        ck.wait()
        gone = weakref.ref(program.parts["optimizer"])
        del program
        gc.collect()
        assert gone() is None


def _step_in_child(program: updates.Program) -> None:
    program.update()
    os._exit(7)


def _ended_with(target: Callable[[Any], None], argument: object) -> int | None:
    """How a forked child ended; None: it has not, in a minute."""
    child = multiprocessing.get_context("fork").Process(target=target, args=(argument,))
    child.start()
    child.join(60)
    code = child.exitcode
    child.kill()
    return code


def test_a_forked_child_waits_for_nobody(tmp_path: Path) -> None:
    program = updates.sgd()
    with stuck(tmp_path, program):
        assert _ended_with(_step_in_child, program) == 7


def _wait_in_child(ck: Checkpointer) -> None:
    refused = 0
    for wait in (ck.wait, ck.wait_staged, ck.is_staged, lambda: ck.wait(level=1)):
        try:
            wait()
        except ckpt_core.ConfigError as exc:
            refused += "this is a fork of it" in str(exc)
    ck.close()
    os._exit(refused)


def test_a_forked_child_that_asks_to_wait_is_refused_at_once(tmp_path: Path) -> None:
    with stuck(tmp_path, updates.sgd()) as (ck, _):
        assert _ended_with(_wait_in_child, ck) == 4


@contextmanager
def held_by_a_thread(lock: Any) -> Iterator[None]:
    """As the finisher has it while names are synced: in a fork nobody gives it back."""
    held, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            enough.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def _ask_in_child(given: tuple[Checkpointer, SaveHandle, SaveHandle]) -> None:
    ck, committed, stuck_save = given
    refused = 0
    for ask in (
        lambda: ck.pin(1),
        lambda: ck.unpin(1),
        lambda: ck.unpin(1, retire=True),
        *(
            getattr(future, name)
            for future in (stuck_save.staged, stuck_save.committed)
            for name in ("result", "exception")
        ),
        lambda: stuck_save.staged.add_done_callback(print),
        lambda: stuck_save.committed.add_done_callback(print),
    ):
        try:
            ask()
        except ckpt_core.ConfigError as exc:
            refused += "this is a fork of it" in str(exc)
    os._exit(refused if committed.committed.result() == ck.root / "step-000000000000" else 99)


def test_a_forked_child_that_pins_or_asks_for_the_end_of_a_save_is_refused_at_once(
    tmp_path: Path,
) -> None:
    gate = Gate()
    with Checkpointer(tmp_path, SETTINGS, files=gate) as ck:
        ended = ck.save(0, updates.sgd().state())
        ck.wait()
        gate.shut()
        given = (ck, ended, ck.save(1, updates.sgd().state()))
        with held_by_a_thread(ck._engine.store._names):
            assert _ended_with(_ask_in_child, given) == 9
        gate.open_up()


def test_a_wait_of_a_step_is_told_and_counted(tmp_path: Path) -> None:
    program = updates.sgd()
    with stuck(tmp_path, program) as (ck, gate):
        gate.shut_for(0.2)
        began, before = time.monotonic(), ck.gauges.stall.seconds
        program.update()
        took = time.monotonic() - began
        waits = [event for event in ck.events.events() if event.name == "waited"]
        assert len(waits) == 1
        assert 0 < ck.gauges.stall.seconds - before <= took


@pytest.mark.parametrize("optimizers", [1, 3])
def test_iterations_can_be_told_apart_by_the_steps_alone(tmp_path: Path, optimizers: int) -> None:
    file = tmp_path / "events.jsonl"
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(optimizers)]
    made = [torch.optim.SGD([param], lr=0.1) for param in params]
    with Checkpointer(tmp_path / "root", Options(events_file=str(file))) as ck:
        for step in range(5):
            for optimizer in made:
                optimizer.step()
            ck.save(step, {"params": [param.detach() for param in params]})
    assert file.read_text().count('"barrier"') == 5
