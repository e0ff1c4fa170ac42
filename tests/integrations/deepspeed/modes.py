"""Jobs: ways to train, saved while training goes on, and loaded by this engine and by DeepSpeed's own."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt_core
import ckpt_deepspeed
from ckpt_core.save.barriers import Barriers
from ckpt_deepspeed import roots
from tests.faults.layers import Delays, Stuck
from tests.integrations.deepspeed.ways import (
    Way,
    advance,
    micro,
    micro_batch,
    parts,
    start,
)

STEPS, AT = 5, 3
SMALL: dict[str, Any] = {
    "chunk_bytes": 4096,
    "staging_bytes": "32KiB",
    "eager_leaf_bytes": 64,
    "mode": "host",
    "writers": 2,
    "in_flight": 3,
    "debug_barrier": True,
    "timeout": 60,
}
"""Little staging memory, so that copying is held up by the writing of what was copied first."""


class Disk:
    """What Checkpointers write to that are opened `inside`: it dawdles, and stands still when told to."""

    def __init__(self, most_s: float = 0.01) -> None:
        self._delays = Delays(most_s, seed=dist.get_rank())
        self._stuck = Stuck("pwrite")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Those that are opened here are closed at the end."""
        kept = roots.Checkpointer

        def opened(*args: Any, **kwargs: Any) -> ckpt_core.Checkpointer:
            files = self._stuck.files(type(self._delays.files()))
            return kept(*args, **kwargs, files=files)

        roots.Checkpointer = opened  # type: ignore[misc,assignment]
        try:
            yield
            ckpt_deepspeed.close()
        finally:
            self._stuck.release()
            roots.Checkpointer = kept  # type: ignore[misc]

    def go_on(self) -> None:
        """Write again."""
        self._stuck.release()

    @contextlib.contextmanager
    def still(self, root: Path) -> Iterator[None]:
        """Nothing is written to an open directory inside; what was saved there before is durable."""
        ckpt_deepspeed.wait(root)
        self._stuck.engage()
        try:
            yield
        finally:
            self._stuck.release()


def staged(root: Path) -> bool:
    """Whether all has been copied that was saved to an open directory."""
    return roots.ROOTS._open[os.path.realpath(root)].checkpointer.is_staged()


def exact(folder: Path, **how: Any) -> dict[str, Any]:
    """Train with a save at each step, and again from the one in the middle, by us and by DeepSpeed."""
    way = Way(**how)
    ours, plain, tag = folder / "ours", folder / "plain", f"global_step{AT}"
    disk = Disk()
    with disk.inside():
        end, behind = _saving_all(way, ours, disk)
    made = start(way)
    advance(made, way, 0, AT)
    made.save_checkpoint(str(plain), client_state={"step": AT})
    advance(made, way, AT, STEPS)
    plain_end = parts(made)
    made.destroy()
    dist.barrier()
    return {
        "behind": behind,
        "latest": (ours / "latest").read_text(),
        "whole": [ckpt_core.verify(path).ok for path in sorted(ours.glob("global_step*"))],
        "names": [names(ours / tag), names(plain / tag)],
        "own names": [own_names(ours / tag), own_names(plain / tag)],
        "outside": [outside(ours), outside(plain)],
        "ends": {
            "plain": plain_end,
            "ours": end,
            "ours from ours": resumed(way, ours, tag, SMALL),
            "plain from ours": resumed(way, ours, tag, None),
            "ours from plain": resumed(way, plain, tag, SMALL),
        },
    }


def shared(folder: Path, **how: Any) -> dict[str, Any]:
    """How many tags have each file, and where a run ends that goes on from the last but one."""
    way, root = Way(**how), folder / "c"
    made = start(way, SMALL | {"share_unchanged": True})
    for step in range(STEPS):
        advance(made, way, step, step + 1)
        made.save_checkpoint(str(root), client_state={"step": step + 1})
        ckpt_deepspeed.wait(root)
    end = parts(made)
    made.destroy()
    tag = root / f"global_step{STEPS - 1}"
    dist.barrier()
    return {
        "names": {name: (tag / name).stat().st_nlink for name in names(tag)},
        "whole": [ckpt_core.verify(path).ok for path in sorted(root.glob("global_step*"))],
        "ends": {
            "end": end,
            "ours": resumed(way, root, tag.name, SMALL),
            "plain": resumed(way, root, tag.name, None),
        },
    }


def _saving_all(way: Way, root: Path, disk: Disk) -> tuple[dict[str, str], bool]:
    """The end of a run, and whether its second save returned before all was copied."""
    made = start(way, SMALL)
    assert type(made.checkpoint_engine).__name__ == "CkptCoreEngine"
    behind = False
    for step in range(STEPS):
        advance(made, way, step, step + 1)
        with disk.still(root) if step == 1 else contextlib.nullcontext():
            made.save_checkpoint(str(root), client_state={"step": step + 1})
            behind |= not staged(root)
    end = parts(made)
    made.destroy()
    return end, behind


def resumed(way: Way, root: Path, tag: str, section: dict[str, Any] | None) -> dict[str, str]:
    """The end of a run that begins with a tag."""
    made = start(way, section, seed=7)
    path, client = made.load_checkpoint(str(root), tag=tag)
    assert path is not None
    advance(made, way, client["step"], STEPS)
    found = parts(made)
    made.destroy()
    return found


def names(tag: Path) -> list[str]:
    """The files of a tag, this package's own left out."""
    return sorted(_files(tag) - set(own_names(tag)))


def own_names(tag: Path) -> list[str]:
    """This package's files in a tag."""
    return sorted(
        name for name in _files(tag) if name == "manifest.json" or name.startswith("rank-")
    )


def _files(tag: Path) -> set[str]:
    return {path.relative_to(tag).as_posix() for path in tag.rglob("*") if path.is_file()}


def outside(root: Path) -> list[str]:
    """What is beside the tags."""
    return sorted(path.name for path in root.iterdir() if path.is_file() and path.name[0] != ".")


# -- the barrier -----------------------------------------------------------------------------------


def barred(folder: Path, **how: Any) -> dict[str, Any]:
    """What training has done a while after a save of which nothing can be written."""
    way, root, disk = Way(**how), folder / "c", Disk()
    seen: dict[str, Any] = {}
    with disk.inside():
        made = _begun(way, root)
        with disk.still(root):
            made.save_checkpoint(str(root))
            before = _weights(made)

            def look() -> None:
                seen.update(steps=made.global_steps, same=_weights(made) == before)
                disk.go_on()

            timer = threading.Timer(0.3, look)
            timer.start()
            advance(made, way, 2, 3)
            timer.join()
        seen["moved"] = _weights(made) != before
        made.destroy()
    return seen | {"latest": (root / "latest").read_text()}


def unbarred(folder: Path, **how: Any) -> dict[str, Any]:
    """The same with the barrier taken out: what is said of the save."""
    way, root, disk = Way(**how), folder / "c", Disk()
    problem = ""
    with disk.inside():
        made = _begun(way, root)
        with disk.still(root), _no_barrier():
            made.save_checkpoint(str(root))
            advance(made, way, 2, 3)
        try:
            ckpt_deepspeed.wait(root)
        except ckpt_core.CkptError as exc:
            problem = str(exc)
        made.destroy()
    return {"problem": problem, "latest": (root / "latest").read_text()}


def _weights(made: Any) -> list[str]:
    """What an update changes."""
    found = parts(made)
    return [found["parameters"], found["optimizer"]]


def _begun(way: Way, root: Path) -> Any:
    """An engine after two steps; the first is saved."""
    made = start(way, SMALL)
    advance(made, way, 0, 1)
    made.save_checkpoint(str(root))
    advance(made, way, 1, 2)
    return made


@contextlib.contextmanager
def _no_barrier() -> Iterator[None]:
    own, kept = Barriers.before_step, roots.ROOTS.wait_staged
    roots.ROOTS.wait_staged = lambda: None  # type: ignore[method-assign]
    Barriers.before_step = lambda self, optimizer: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        roots.ROOTS.wait_staged = kept  # type: ignore[method-assign]
        Barriers.before_step = own  # type: ignore[method-assign]


# -- other moments to save -------------------------------------------------------------------------


def halfway(folder: Path, **how: Any) -> dict[str, Any]:
    """Saved between two micro-batches of a step, whose first gradient DeepSpeed does not save."""
    way = Way(**how)
    found: dict[str, Any] = {}
    for name, section in (("ours", SMALL), ("plain", None)):
        made = start(way, section)
        advance(made, way, 0, AT)
        micro(made, micro_batch(made, way, AT, 0))
        made.save_checkpoint(str(folder / name), tag="half", client_state={"step": AT})
        made.save_16bit_model(str(folder / f"{name} weights"))
        micro(made, micro_batch(made, way, AT, 1))
        found[name] = parts(made)
        made.destroy()
        dist.barrier()
    loaders = {"ours": SMALL, "plain": None}
    resumes = {
        f"{to} from {source}": resumed(way, folder / source, "half", loaders[to])
        for source in loaders
        for to in loaders
    }
    return {"ends": found, "resumed": resumes}


def between(folder: Path, **how: Any) -> dict[str, Any]:
    """`save_16bit_model` right after a save: what was saved is committed, and the weights are there."""
    way, root, weights = Way(**how), folder / "c", folder / "weights"
    with Disk().inside():
        made = start(way, SMALL)
        advance(made, way, 0, 1)
        made.save_checkpoint(str(root))
        made.save_16bit_model(str(weights))
        dist.barrier()
        there = (weights / "pytorch_model.bin").exists()
        advance(made, way, 1, 2)
        made.save_checkpoint(str(root))
        made.save_16bit_model(str(root))
        made.destroy()
    with contextlib.chdir(
        folder
    ):  # a name that is relative when it is given, and when it is asked for
        made = start(way, SMALL)
        made.load_checkpoint("c")
        made.save_checkpoint("c", tag="again")
        ckpt_deepspeed.wait("c")
        made.destroy()
    return {
        "there": there,
        "latest": (root / "latest").read_text(),
        "weights": sorted(torch.load(weights / "pytorch_model.bin")),
        "beside": (root / "pytorch_model.bin").exists(),
        "whole": ckpt_core.verify(root / "again").ok,
    }


def two(folder: Path, **how: Any) -> dict[str, Any]:
    """Two engines by turns, into one directory and into one each; nobody waits."""
    way = Way(**how)
    seeds = (0, 1)
    shared, own = folder / "shared", [folder / "own0", folder / "own1"]
    with Disk().inside():
        engines = [start(way, SMALL, seed=seed) for seed in seeds]
        for step in range(3):
            for number, made in enumerate(engines):
                advance(made, way, step, step + 1)
                client = {"step": step + 1}
                made.save_checkpoint(str(shared), tag=f"e{number}s{step + 1}", client_state=client)
                made.save_checkpoint(str(own[number]), client_state=client)
        ends = []
        for made in engines:
            advance(made, way, 3, STEPS)
            ends.append(parts(made))
        for made in engines:
            made.destroy()
    return {
        "ends": ends,
        "shared": [resumed(way, shared, f"e{number}s2", None) for number in seeds],
        "own": [resumed(way, own[number], "global_step2", SMALL) for number in seeds],
        "latest": [(root / "latest").read_text() for root in (shared, *own)],
        "tags": sorted(path.name for path in shared.iterdir() if path.name[0] == "e"),
    }


# -- arguments -------------------------------------------------------------------------------------


def tags(folder: Path, validation: str, **how: Any) -> dict[str, Any]:
    """Each rank passes a tag of its own, and then all the same."""
    way, root = Way(**how, settings={"checkpoint": {"tag_validation": validation}}), folder / "c"
    made = start(way, {**SMALL, "timeout": 20})
    advance(made, way, 0, 1)
    problems = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made.save_checkpoint(str(root), tag=f"rank{dist.get_rank()}")
        except AssertionError as exc:
            problems.append(f"at once: {exc}")
    warned = [str(one.message) for one in caught if "passed the tag" in str(one.message)]
    try:
        ckpt_deepspeed.wait(root)
    except ckpt_core.CkptError as exc:
        problems.append(str(exc))
    dist.barrier()
    there = sorted(path.name for path in root.iterdir() if path.name[0] != ".")
    dist.barrier()
    made.save_checkpoint(str(root), tag="same")
    ckpt_deepspeed.wait(root)
    made.destroy()
    return {
        "problems": problems,
        "warned": warned,
        "there": [
            name for name in there if name != "zero_to_fp32.py" and name != "zero_to_torch.py"
        ],
        "latest": (root / "latest").read_text(),
    }


class Holder:
    """An object that pickle knows how to take apart."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


Pair = collections.namedtuple("Pair", "left right")


def client_state(folder: Path) -> dict[str, Any]:
    """Tensors in any container of `client_state` are those of the call, whatever becomes of them then."""
    root, disk, way = folder / "c", Disk(), Way()
    with disk.inside():
        made = _begun(way, root)
        tensors = [torch.full((20_000,), float(number)) for number in range(6)]
        growing = collections.defaultdict(list, {"a": [tensors[0]]})
        client = {
            "step": 2,
            "defaultdict": growing,
            "pair": Pair(tensors[1], tensors[2]),
            "object": Holder(tensors[3]),
            "view": tensors[4][100:],
            "deep": [{"set": (tensors[5],)}],
        }
        with disk.still(root):
            made.save_checkpoint(str(root), client_state=client)
            for tensor in tensors:
                tensor.fill_(-1.0)
            growing["a"].append(1)
        ckpt_deepspeed.wait(root)
        _, found = start(way, SMALL).load_checkpoint(str(root))
        made.destroy()
    return {
        "values": [
            float(tensor.unique())
            for tensor in (
                found["defaultdict"]["a"][0],
                found["pair"].left,
                found["pair"].right,
                found["object"].tensor,
                found["view"],
                found["deep"][0]["set"][0],
            )
        ],
        "kinds": [type(found["defaultdict"]).__name__, type(found["pair"]).__name__],
        "left": len(found["defaultdict"]["a"]),
    }
