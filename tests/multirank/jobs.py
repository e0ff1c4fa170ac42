"""What the ranks of a test do; each function runs in every rank and returns what JSON can hold."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ckpt_core import Checkpointer, CkptError, FlatPart, Options, RngState
from ckpt_core.system.files import Files
from tests.crash.layers import CHANGES, KillAt, hooked
from tests.crash.promises import QuickFiles
from tests.engine.in_memory import CountingFiles, until_warm
from tests.multirank.crew import Rank

Tree = dict[str, Any]

_WARM_AFTER = 8


def options(**changes: Any) -> Options:
    """Small chunks, so that a small state is several of them."""
    given: dict[str, Any] = {"chunk_bytes": 16384, "writers": 2, "timeout": 20.0}
    return Options(**(given | changes))


def make_state(rank: int, step: int, *, rows: int = 40) -> Tree:
    """Replicated leaves that are a function of the step, private ones of the step and the rank."""
    torch.manual_seed(step)
    model = {
        f"layer{i}.{name}": torch.randn(shape) + step
        for i in range(3)
        for name, shape in (("weight", (rows, 300)), ("bias", (300,)))
    }
    model["scale"] = torch.tensor(float(step))
    # Strided: its row-major bytes are no run of memory.
    model["conv"] = torch.randn(8, 16, rows, 5).to(memory_format=torch.channels_last)
    return {
        "model": model,
        "sampler": {"order": torch.arange(1000) * (rank + 1) + step, "seen": rank * 100 + step},
        "step": step,
    }


def blank(tree: Any) -> Any:
    """The same tree, of zeros."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: blank(value) for key, value in tree.items()}
    return type(tree)()


def same(first: Any, second: Any) -> bool:
    """Every bit of two trees is the same."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[k], second[k]) for k in first)
    return bool(first == second)


def root_of(who: Rank, root: str) -> Path:
    """A root for each node, or one for all."""
    return Path(root) if who.node is None else Path(root) / who.node


def save_steps(who: Rank, root: str, steps: list[int], **changes: Any) -> list[Any]:
    """Save the steps one after the other; what became of each."""
    outcomes: list[Any] = []
    with Checkpointer(
        root_of(who, root), options(on_error="warn", **changes), coordination=who.meet()
    ) as ck:
        for step in steps:
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            ck.wait_staged()
            outcomes.append(str(handle.committed.result(60).name))
    return outcomes


def save_large(who: Rank, root: str, rows: int) -> None:
    """One step of a state in which large leaves count."""
    with Checkpointer(root, options(), coordination=who.meet()) as ck:
        state = make_state(who.rank, 1, rows=rows)
        ck.save(1, state, per_rank=["sampler"]).committed.result(60)


def restore_newest(who: Rank, root: str, step: int | None = None) -> dict[str, Any]:
    """Restore, and compare with what was saved; who this rank's private values came from."""
    with Checkpointer(root_of(who, root), options(), coordination=who.meet()) as ck:
        state = blank(make_state(who.rank, 1))
        found = ck.restore(state, step=step)
        if found is None:
            return {"step": None}
        source = who.rank if found.borrowed_from is None else found.borrowed_from
        expected = make_state(source, found.step)
        state["step"], state["sampler"]["seen"] = (
            found.state["step"],
            found.state["sampler"]["seen"],
        )
        return {
            "step": found.step,
            "same": same(state, expected),
            "read_bytes": found.read_bytes,
            "borrowed_from": found.borrowed_from,
            "world_size": found.world_size,
        }


def save_in_memory(who: Rank, root: str, steps: int) -> list[Any]:
    """Save so many steps on tmpfs; how each but the first few was staged, and what was written by calls."""
    files, found = CountingFiles(), []
    with Checkpointer(
        root_of(who, root), options(keep_last=1, in_flight=1), coordination=who.meet(), files=files
    ) as ck:
        for step in range(1, steps + 1):
            before = files.of_leaves
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            handle.committed.result(60)
            until_warm(ck)
            # Other ranks hear of a commit before the leader has made slots of what it retires. A rank that
            # did not wait for its slot would write a new file: of too many slots one is another rank's.
            while step > 1 and ck._engine.store.next_slot(1) is None:
                time.sleep(0.001)
            if step > _WARM_AFTER:
                found.append([ck.gauges.mode, files.of_leaves - before])
    return found


def killed_at(
    who: Rank, root: str, victim: int, n: int, point: str, first: int = 1, **changes: Any
) -> dict[str, Any]:
    """Commit `first` steps together; then the victim dies at its n-th file operation of the next one."""
    kill = KillAt(n, point=point) if who.rank == victim else None
    armed = threading.Event()

    def hook(name: str, args: tuple[Any, ...], act: Any) -> Any:
        if kill is not None and armed.is_set():
            return kill(name, args, act)
        return act()

    files = hooked(QuickFiles, hook, CHANGES)
    ck = Checkpointer(
        root_of(who, root),
        options(on_error="warn", **changes),
        coordination=who.meet(),
        files=files,
    )
    for step in range(1, first + 1):
        ck.save(step, make_state(who.rank, step), per_rank=["sampler"]).committed.result(60)
        until_warm(ck)
    armed.set()
    handle = ck.save(first + 1, make_state(who.rank, first + 1), per_rank=["sampler"])
    ck.wait_staged()
    try:
        handle.committed.result(60)
        outcome = "committed"
    except CkptError as exc:
        outcome = f"{type(exc).__name__}: {exc}"
    armed.clear()
    ck.close()
    return {"outcome": outcome, "operations": 0 if kill is None else kill.count}


def structures_differ(who: Rank, root: str, how: str, good: int) -> list[str]:
    """Behind `good` saves rank 1 has another structure, or other contents; then all have the same again."""
    outcomes = []
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet()) as ck:
        for step in range(1, good + 3):
            state = make_state(0, step)
            if step == good + 1 and who.rank == 1:
                if how == "shape":
                    state["model"]["layer1.bias"] = torch.zeros(299)
                elif how == "name":
                    state["model"]["extra"] = torch.zeros(3)
                else:
                    state["model"]["layer2.bias"] += 1
            try:
                outcomes.append(ck.save(step, state).committed.result(60).name)
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
    return outcomes


def cut_otherwise(
    who: Rank, root: str, cuts: list[list[list[int]]], **changes: Any
) -> list[list[str]]:
    """Save FlatParts, each rank its `[begin, end]` of 3000 elements; what became of it, and what is left.

    Beside them are parts that stay the same: an empty one, and a number that rank 0 has alone.
    """
    whole, outcomes = torch.arange(3000.0), []
    own = torch.arange(40.0 * who.rank, 40.0 * (who.rank + 1))
    number = torch.ones(0 if who.rank else 1)
    with Checkpointer(
        root_of(who, root), options(on_error="warn", **changes), coordination=who.meet()
    ) as ck:
        for step, cut in enumerate(cuts, 1):
            begin, end = cut[who.rank]
            state = {
                "w": FlatPart(whole[begin:end].clone(), (3000,), begin),
                "number": FlatPart(number, (), 0),
                "nothing": FlatPart(torch.zeros(0), (0, 4), 0),
                "still": FlatPart(own, (40 * who.world_size,), 40 * who.rank),
                "plain": torch.ones(50),
            }
            try:
                outcomes.append(ck.save(step, state).committed.result(60).name)
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
    return [outcomes, sorted(path.name for path in root_of(who, root).glob("step-*"))]


def gap_at_seal(who: Rank, root: str) -> list[str]:
    """Layer-wise saves whose seal brings parts; those of the second leave a gap."""
    outcomes = []
    part = torch.arange(100.0 * who.rank, 100.0 * (who.rank + 1))
    model = {"w": torch.ones(3000)}
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet()) as ck:
        for step, size in enumerate((100, 90, 100), 1):
            save = ck.begin(step, model)
            save.stage(["w"])
            state = model | {"part": FlatPart(part[:size], (200,), 100 * who.rank)}
            try:
                outcomes.append(save.seal(state).committed.result(60).name)
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
    return outcomes


def steps_differ(who: Rank, root: str) -> list[str]:
    """Rank 1 counts one step too many for a while."""
    outcomes = []
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet()) as ck:
        for step in (1, 11, 21):
            wrong = who.rank == 1 and step == 11
            try:
                handle = ck.save(step + wrong, make_state(0, step))
                outcomes.append(handle.committed.result(60).name)
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
    return outcomes


def gated(who: Rank, gate: str) -> Files:
    """A disk to which the last rank writes nothing until the gate is there."""
    last = who.rank == who.world_size - 1

    def hook(name: str, args: tuple[Any, ...], act: Any) -> Any:
        while last and name == "pwrite" and not Path(gate).exists():
            time.sleep(0.01)
        return act()

    return hooked(Files, hook, CHANGES)


def filling(full: threading.Event) -> Files:
    """A disk that takes nothing while it is full."""

    def hook(name: str, args: tuple[Any, ...], act: Any) -> Any:
        if full.is_set() and name in ("pwrite", "allocate"):
            raise OSError(28, os.strerror(28), "disk")
        return act()

    return hooked(Files, hook, CHANGES)


def slow_rank(who: Rank, root: str, gate: str) -> list[bool]:
    """The last rank writes nothing until the others have trained on: nobody waits for it meanwhile."""
    files = gated(who, gate)
    with Checkpointer(root, options(in_flight=2), coordination=who.meet(), files=files) as ck:
        handles = []
        for step in (1, 2):
            handles.append(ck.save(step, make_state(who.rank, step), per_rank=["sampler"]))
            ck.wait_staged()  # the update of the next step may begin
        pending = [not handle.committed.done() for handle in handles]
        if who.rank == 0:
            Path(gate).touch()
        for handle in handles:
            handle.committed.result(60)
    return pending


def full_disk(who: Rank, root: str, **changes: Any) -> list[str]:
    """Rank 1 cannot write step 2; step 3 works again everywhere."""
    broken = threading.Event()
    files = filling(broken)
    outcomes = []
    chosen = options(**({"on_error": "warn"} | changes))
    with Checkpointer(root, chosen, coordination=who.meet(), files=files) as ck:
        for step in (1, 2, 3):
            if who.rank == 1 and step == 2:
                broken.set()
            try:
                handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
                assert handle.committed.done() or not chosen.blocking
                outcomes.append(handle.committed.result(60).name)
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
            broken.clear()
    return outcomes


def refuses_to_start(who: Rank, root: str) -> list[str]:
    """Rank 1 cannot even start a save; the others hear of it at once, and the next one works."""
    outcomes = []
    with Checkpointer(root, options(on_error="raise"), coordination=who.meet()) as ck:
        for step in (1, 2, 3):
            state = make_state(who.rank, step)
            if who.rank == 1 and step == 1:
                state["odd"] = threading.Lock()
            try:
                outcomes.append(
                    ck.save(step, state, per_rank=["sampler"]).committed.result(60).name
                )
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
    return outcomes


class Interrupting:
    """An object in whose `state_dict` Ctrl-C comes."""

    def state_dict(self) -> dict[str, Any]:
        """Never returns."""
        raise KeyboardInterrupt

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Never called."""


def interrupted(who: Rank, root: str) -> list[Any]:
    """Rank 1 is interrupted in a save; the others hear of it long before `timeout`."""
    outcomes: list[Any] = []
    with Checkpointer(
        root, options(on_error="raise", timeout=300.0), coordination=who.meet()
    ) as ck:
        for step in (1, 2, 3):
            state = make_state(who.rank, step)
            if who.rank == 1 and step == 2:
                state["odd"] = Interrupting()
            try:
                outcomes.append(
                    ck.save(step, state, per_rank=["sampler"]).committed.result(60).name
                )
            except KeyboardInterrupt:
                outcomes.append("KeyboardInterrupt")
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
    return outcomes


def layerwise(who: Rank, root: str) -> dict[str, Any]:
    """Tensors become final in an order of each rank's own."""
    with Checkpointer(root, options(), coordination=who.meet()) as ck:
        for step in (1, 2):
            state = make_state(who.rank, step)
            model = state["model"]
            save = ck.begin(step, model)
            names = sorted(model, reverse=who.rank % 2 == 1)
            for name in names:
                save.stage([name])
                ck.wait_staged([name])
            handle = save.seal(state | {"rng": RngState()}, per_rank=["sampler"])
            handle.committed.result(60)
        live = blank(make_state(who.rank, 1)) | {"rng": RngState()}
        found = ck.restore(live)
        assert found is not None
        good = same(live["model"], make_state(0, 2)["model"])
        good = good and same(live["sampler"]["order"], make_state(who.rank, 2)["sampler"]["order"])
        return {"same": good, "step": found.step}


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(50, 60)
        self.norm = torch.nn.BatchNorm1d(60)


def buffers_are_the_first_ranks(who: Rank, root: str) -> list[float]:
    """BatchNorm statistics differ from rank to rank, as under DDP; every rank restores rank 0's."""
    torch.manual_seed(0)
    net = _Net()
    net.norm.running_mean += who.rank + 1  # type: ignore[operator]
    with Checkpointer(root, options(), coordination=who.meet()) as ck:
        ck.save(1, {"net": net, "rng": RngState()}).committed.result(60)
        fresh = _Net()
        assert ck.restore({"net": fresh, "rng": RngState()}) is not None
    assert same(dict(fresh.named_parameters()), dict(net.named_parameters()))
    mean = fresh.norm.running_mean
    assert mean is not None
    return [float(mean[0]), float(mean[-1])]


def wrong_root(who: Rank, root: str) -> str:
    """Each rank has a directory of its own, and nobody says that this is meant."""
    try:
        Checkpointer(Path(root) / str(who.rank), options(), coordination=who.meet()).close()
    except CkptError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "opened"


def storage_after_many(who: Rank, root: str, count: int) -> int:
    """Retention and recycling with several writers: bytes that the root takes after many saves.

    As rank 0 counts them: another one might list what rank 0 still retires.
    """
    with Checkpointer(root, options(keep_last=1), coordination=who.meet()) as ck:
        for step in range(count):
            ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            ck.wait_staged()
        ck.wait()
    if who.rank:
        return 0
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())
