"""Training changes leaves as soon as it may; every committed step is exactly the state at its step."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_training import Run, clone, same

import ckpt_core
from ckpt_core import BarrierError, Checkpointer, ConfigError, Options, StagingError
from ckpt_core.coordination import NoCoordination
from ckpt_core.store import committed_steps
from ckpt_core.system.files import Files


class SlowFiles(Files):
    """A disk that takes its time, at random."""

    def __init__(self, seed: int, most_s: float = 0.01) -> None:
        self._random = random.Random(seed)
        self._most_s = most_s

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        time.sleep(self._random.random() * self._most_s)
        super().pwrite(fd, data, offset)


class GatedFiles(Files):
    """A disk on which writes of shard files stand still while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if isinstance(data, memoryview):
            assert self.gate.wait(60)
        super().pwrite(fd, data, offset)


TINY = Options(chunk_bytes=4096, staging_bytes="96KiB", in_flight=2, keep_last=None)


def assert_each_step_holds(root: Path, copies: dict[int, dict[str, Any]]) -> None:
    """Every step comes back as it was when it was saved."""
    for step, copy in copies.items():
        other = Run(seed=5)
        with Checkpointer(root) as ck:
            found = ck.restore(other.state(), step=step)
        assert found is not None
        other.step = found.state["step"]
        assert same(other.copy(), copy), step


@pytest.mark.parametrize("mode", ["host", "direct"])
def test_every_committed_step_is_the_state_at_its_step(tmp_path: Path, mode: str) -> None:
    options = Options(
        chunk_bytes=4096,
        staging_bytes="96KiB",
        eager_leaf_bytes=64,
        mode=mode,
        keep_last=None,
        in_flight=3,
    )
    run, copies = Run(), {}
    with Checkpointer(tmp_path, options, files=SlowFiles(1)) as ck:
        for _ in range(25):
            run.forward()
            ck.wait_staged()
            run.update()
            copies[run.step] = run.copy()
            ck.save(run.step, run.state())
    assert_each_step_holds(tmp_path, copies)


def test_buffers_and_counters_may_change_right_after_save(tmp_path: Path) -> None:
    run = Run()
    run.train()
    counters = {"seen": 1, "history": [1, 2], "ema": torch.ones(4)}
    with Checkpointer(tmp_path, TINY, files=SlowFiles(2)) as ck:
        ck.save(1, {"run": run.model, "counters": counters})
        before = clone(run.model.state_dict())
        counters["seen"] = 2
        counters["history"].append(3)  # type: ignore[attr-defined]
        counters["ema"].zero_()  # type: ignore[attr-defined]
        run.forward()  # no wait_staged: only BatchNorm buffers change here
    tree = ckpt_core.load(tmp_path)
    assert tree["counters"]["seen"] == 1
    assert tree["counters"]["history"] == [1, 2]
    assert tree["counters"]["ema"].sum() == 4
    assert same(dict(tree["run"]), dict(before))


def big() -> dict[str, torch.Tensor]:
    return {name: torch.full((40_000,), float(number)) for number, name in enumerate("abcd")}


def test_a_missing_barrier_is_found_and_the_leaves_are_named(tmp_path: Path) -> None:
    state = big()
    files = GatedFiles()
    options = Options(chunk_bytes=4096, staging_bytes="32KiB", debug_barrier=True)
    with Checkpointer(tmp_path, options, files=files) as ck:
        handle = ck.save(1, state)
        state["d"].add_(1)  # the pool is full of "a": "d" has not been copied
        files.gate.set()
        with pytest.raises(BarrierError, match=r"1 leaf changed.*: d\."):
            handle.committed.result(timeout=60)
        with pytest.raises(BarrierError):
            ck.save(2, state)
        ck.save(3, state)
        ck.wait()
        assert ck.steps()[-1] == 3


def test_with_every_byte_looked_at_leaves_that_are_not_contiguous_are_saved(tmp_path: Path) -> None:
    convolution = torch.nn.Conv2d(64, 128, 3).to(memory_format=torch.channels_last)
    state = {"model": convolution, "every_second": torch.randn(40_000)[::2]}
    with Checkpointer(tmp_path, Options(debug_barrier=True)) as ck:
        ck.save(1, state).committed.result(timeout=60)
        save = ck.begin(2, {"weight": convolution.weight})
        save.stage(["weight"])
        save.seal(state).committed.result(timeout=60)
        assert ck.steps() == (1, 2)


def test_wait_staged_for_names_waits_for_those_alone(tmp_path: Path) -> None:
    state = big()
    files = GatedFiles()
    # Room for "a" and part of "b" while the disk stands still.
    options = Options(chunk_bytes="64KiB", staging_bytes="384KiB", in_flight=2)
    with Checkpointer(tmp_path, options, files=files) as ck:
        handle = ck.save(1, state)
        ck.wait_staged(["a"])
        state["a"].zero_()
        assert not handle.staged.done()
        files.gate.set()
        ck.wait_staged()
        assert handle.staged.done()
    assert ckpt_core.load(tmp_path)["a"].sum() == big()["a"].sum()


def test_a_barrier_may_leave_out_the_snapshot_that_is_being_made(tmp_path: Path) -> None:
    state = big()
    files = GatedFiles()
    options = Options(chunk_bytes="64KiB", staging_bytes="256KiB", in_flight=2)
    with Checkpointer(tmp_path, options, files=files) as ck:
        save = ck.begin(1, state)
        save.stage(state)  # the disk stands still, and there is no room for all
        assert not ck.is_staged()
        assert not ck.is_staged(["d"])
        assert ck.is_staged(before=1) and ck.is_staged(before=save)
        ck.wait_staged(before=1)
        ck.wait_staged(before=save)
        assert not ck.is_staged(before=2)
        files.gate.set()
        ck.wait_staged(before=2)
        assert ck.is_staged() and ck.is_staged(["a", "d"])
        save.seal()
    assert ckpt_core.load(tmp_path)["d"].sum() == big()["d"].sum()


def test_a_barrier_that_never_opens_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    files = GatedFiles()
    options = Options(chunk_bytes="64KiB", staging_bytes="256KiB", timeout=0.5)
    ck = Checkpointer(tmp_path, options, files=files)
    handle = ck.save(1, big())
    with pytest.raises(ckpt_core.CkptError):
        handle.committed.result(timeout=60)
    began = time.monotonic()
    ck.wait_staged()  # the save was given up: nobody reads the leaves any more
    assert time.monotonic() - began < 60
    files.gate.set()
    with pytest.raises(ckpt_core.CkptError):
        ck.close()


def layerwise(ck: Checkpointer, run: Run, order: Callable[[list[str]], list[str]]) -> None:
    names = dict(run.model.named_parameters())
    save = ck.begin(run.step, names)
    for name in order(list(names)):
        save.stage([name])
    save.seal(run.state())


@pytest.mark.parametrize("seed", range(4))
def test_layer_by_layer_gives_the_same_state_as_save(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    run, copies = Run(), {}
    options = Options(chunk_bytes=4096, staging_bytes="128KiB", keep_last=None)
    with Checkpointer(tmp_path, options, files=SlowFiles(seed)) as ck:
        for _ in range(8):
            run.forward()
            ck.wait_staged([name for name, _ in run.model.named_parameters()])
            ck.wait_staged()
            run.update()
            copies[run.step] = run.copy()
            layerwise(ck, run, lambda names: rng.sample(names, len(names)))
    assert_each_step_holds(tmp_path, copies)


def test_each_layer_may_change_once_it_alone_is_staged(tmp_path: Path) -> None:
    state = big()
    with Checkpointer(tmp_path, TINY, files=SlowFiles(3)) as ck:
        save = ck.begin(1, state)
        for name in "dbca":
            save.stage([name])
            ck.wait_staged([name])
            state[name].fill_(-1)
        handle = save.seal()
        handle.committed.result(timeout=60)
    tree = ckpt_core.load(tmp_path)
    assert {name: tensor[0].item() for name, tensor in tree.items()} == dict(
        zip("abcd", (0.0, 1.0, 2.0, 3.0), strict=True)
    )


def test_a_layerwise_save_tells_what_is_wrong_with_its_use(tmp_path: Path) -> None:
    state = big()
    with Checkpointer(tmp_path, TINY) as ck:
        with pytest.raises(ConfigError, match="overlaps"):
            ck.begin(1, {"a": state["a"], "half": state["a"][:100]})
        with pytest.raises(ConfigError, match="takes tensors by name"):
            ck.begin(1, {"a": 3})  # type: ignore[dict-item]
        save = ck.begin(1, state)
        with pytest.raises(ConfigError, match="not among"):
            save.stage(["z"])
        save.stage("abc")
        with pytest.raises(ConfigError, match=r"not staged, .*: 1 tensor, first 'd'"):
            save.seal()
        save.stage("d")
        with pytest.raises(ConfigError, match="nowhere in the state"):
            save.seal({"only": state["a"]})
        save.seal({"all": state}).committed.result(timeout=60)
        with pytest.raises(ConfigError, match="sealed"):
            save.seal()
        ck.begin(2, state).abort()
        ck.save(3, state)
        ck.wait()
        assert ck.steps() == (1, 3)


def test_closing_gives_up_a_layerwise_save_that_was_never_sealed(tmp_path: Path) -> None:
    began = time.monotonic()
    ck = Checkpointer(tmp_path, Options(timeout=600))
    ck.begin(1, big()).stage("ab")
    with pytest.raises(StagingError, match="never sealed"):
        ck.close()
    assert time.monotonic() - began < 300
    with Checkpointer(tmp_path) as ck:
        assert ck.steps() == ()


def test_a_restore_does_not_wait_for_a_save_that_only_its_caller_can_end(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Options(timeout=600)) as ck:
        ck.save(1, state := big())
        save = ck.begin(2, state)
        with pytest.raises(ConfigError, match="step 2 was begun and is not sealed"):
            ck.restore(state)
        save.abort()
        found = ck.restore(state)
        assert found is not None and found.step == 1
        files = ck.begin_files(3, "tag")
        with pytest.raises(ConfigError, match="step 3 was begun"):
            ck.restore(state)
        files.abort()


def test_a_layerwise_save_given_up_by_the_watchdog_gives_its_memory_back(tmp_path: Path) -> None:
    options = Options(timeout=8, in_flight=1, chunk_bytes=4096, staging_bytes="64KiB")
    with Checkpointer(tmp_path, options) as ck:
        save = ck.begin(1, big())
        save.stage("ab")
        ck.save(2, big())  # waits for the place of step 1, and does not know of its failure yet
        with pytest.raises(ckpt_core.PersistError, match=r"given up .* not sealed"):
            ck.save(3, big())
        ck.save(3, {"w": torch.ones(10)}).committed.result(timeout=60)
        assert ck.steps()[-1] == 3


def test_who_holds_a_save_open_is_told_of_the_close_in_time_to_seal_it(tmp_path: Path) -> None:
    state = big()
    with Checkpointer(tmp_path) as ck:
        save = ck.begin(1, state)
        save.stage(state)
        ck.on_close(save.seal)
    assert ckpt_core.committed_steps(tmp_path) == (1,)


def test_a_loop_that_ends_in_an_error_seals_nothing(tmp_path: Path) -> None:
    told: list[int] = []

    def loop() -> None:
        with Checkpointer(tmp_path) as ck:
            ck.begin(1, big())
            ck.on_close(lambda: told.append(1))
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert not told
    assert ckpt_core.committed_steps(tmp_path) == ()


def test_a_close_goes_on_when_whom_it_tells_raises(tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path)
    save = ck.begin(1, big())
    ck.on_close(save.seal)  # tensors were not staged
    with pytest.raises(ckpt_core.ConfigError, match="not staged"):
        ck.close()
    with Checkpointer(tmp_path) as again:  # the root is free
        assert (again.rank, again.world_size) == (0, 1)


def test_one_that_raises_does_not_keep_the_next_one_from_sealing(tmp_path: Path) -> None:
    ck, state = Checkpointer(tmp_path), big()
    save = ck.begin(1, state)
    save.stage(state)
    ck.on_close(lambda: 1 / 0)
    ck.on_close(save.seal)
    with pytest.raises(ZeroDivisionError):
        ck.close()
    assert ckpt_core.committed_steps(tmp_path) == (1,)


def test_a_seal_that_is_interrupted_is_made_at_the_next_close(tmp_path: Path) -> None:
    ck, state, interrupts = Checkpointer(tmp_path), big(), [KeyboardInterrupt()]
    save = ck.begin(1, state)
    save.stage(state)

    def seal() -> None:
        if interrupts:
            raise interrupts.pop()
        save.seal()

    ck.on_close(seal)
    with pytest.raises(KeyboardInterrupt):
        ck.close()
    ck.close()
    assert ckpt_core.committed_steps(tmp_path) == (1,)


def test_what_cannot_be_called_is_refused_before_the_close(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ck, pytest.raises(ckpt_core.ConfigError, match="on_close"):
        ck.on_close(5)  # type: ignore[arg-type]


def test_a_call_of_another_thread_leaves_a_save_that_is_being_made_alone(tmp_path: Path) -> None:
    entered, asked = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, torch.Tensor]:
            entered.set()
            assert asked.wait(60)
            return {"x": torch.ones(3)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...

    with Checkpointer(tmp_path) as ck:

        def ask() -> None:
            assert entered.wait(60)
            ck.wait_staged()
            asked.set()

        other = threading.Thread(target=ask)
        other.start()
        ck.save(1, {"slow": Slow()}).committed.result(60)
        other.join()
    assert committed_steps(tmp_path) == (1,)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_another_thread_began_before_a_save_leaves_it_alone(
    tmp_path: Path, fails: bool
) -> None:
    entered, let_go = threading.Event(), threading.Event()
    told: list[KeyError] = []

    class Held:
        """Names that are asked for when the call has begun."""

        def __iter__(self) -> Iterator[str]:
            entered.set()
            assert let_go.wait(60)
            if fails:
                raise KeyError
            return iter(())

    class Slow:
        def state_dict(self) -> dict[str, torch.Tensor]:
            let_go.set()
            other.join(60)
            # If this save fails from here on, it is undone; and it is still undisturbed.
            assert ck._engine.journal.mine.undo is not None
            assert not gc.isenabled()
            return {"x": torch.ones(3)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...

    def ask() -> None:
        try:
            ck.wait_staged(Held())
        except KeyError as exc:
            told.append(exc)

    with Checkpointer(tmp_path) as ck:
        other = threading.Thread(target=ask)
        other.start()
        assert entered.wait(60)
        ck.save(1, {"slow": Slow()}).committed.result(60)
    assert gc.isenabled()
    assert committed_steps(tmp_path) == (1,)
    assert len(told) == fails


def test_a_save_inside_another_one_that_fails_is_declined_at_once(tmp_path: Path) -> None:
    class Ranks(NoCoordination):
        def decline(self, attempt_id: str, step: int, error: BaseException) -> None:
            declined.append((step, str(error)))

    class Torn:
        def state_dict(self) -> dict[str, torch.Tensor]:
            with pytest.raises(ConfigError):
                ck.save(2, {"x": torch.ones(3).to("meta")})
            return {"x": torch.ones(3)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...

    declined: list[tuple[int, str]] = []
    with Checkpointer(tmp_path, coordination=Ranks()) as ck:
        ck.save(1, {"torn": Torn()})
        ck.wait()
    assert committed_steps(tmp_path) == (1,)
    assert [step for step, _ in declined] == [2]
    assert "ConfigError" in declined[0][1]


@pytest.mark.parametrize("left_bytes", [0, 199_996])
@pytest.mark.parametrize("offset", [0, 8, None], ids=["whole", "offset", "strided"])
@pytest.mark.parametrize("debug", [False, True])
def test_a_leaf_whose_memory_is_taken_away_before_its_turn_is_named(
    tmp_path: Path, debug: bool, offset: int | None, left_bytes: int
) -> None:
    files = GatedFiles()
    leaves = {name: torch.ones(50_000) for name in "abc"}
    state = {
        name: leaf.view(250, 200).t() if offset is None else leaf[offset:]
        for name, leaf in leaves.items()
    }
    with Checkpointer(tmp_path, replace(TINY, debug_barrier=debug), files=files) as ck:
        handle = ck.save(1, state)
        nbytes = leaves["c"].untyped_storage().nbytes()
        # The pool is full of "a": "c" has not been copied.
        leaves["c"].untyped_storage().resize_(left_bytes)
        files.gate.set()
        with pytest.raises(BarrierError, match=r"1 leaf had memory that was taken away.*: c\."):
            handle.committed.result(timeout=60)
        leaves["c"].untyped_storage().resize_(nbytes)
        with pytest.raises(BarrierError):
            ck.save(2, state)
        ck.save(3, state)
        ck.wait()
        assert ck.steps() == (3,)


def test_a_leaf_that_is_sent_to_another_process_meanwhile_is_saved_from_where_it_lies_then(
    tmp_path: Path,
) -> None:
    files = GatedFiles()
    state = {name: torch.arange(50_000) for name in "abc"}
    with Checkpointer(tmp_path, TINY, files=files) as ck:
        handle = ck.save(1, state)
        before = state["a"].data_ptr()
        ForkingPickler.dumps(state)  # as a queue of torch.multiprocessing does
        assert state["a"].data_ptr() != before
        files.gate.set()
        path = handle.committed.result(timeout=60)
    found = ckpt_core.load(path)
    assert all(torch.equal(found[name], leaf) for name, leaf in state.items())
