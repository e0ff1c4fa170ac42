"""Jobs about directories: one for each save, several by turns, files of others, two engines and one."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ckpt_deepspeed
from ckpt_core import verify
from ckpt_deepspeed.choosing import choose
from ckpt_deepspeed.roots import ROOTS
from tests.integrations.deepspeed.modes import Disk
from tests.integrations.deepspeed.plain import attempt
from tests.integrations.deepspeed.training import config, engine, engine_for, train

WAIT_S = 0.3


def rotated(folder: Path) -> dict[str, Any]:
    """As Trainer does it: what is there when each save has returned, and what stays open."""
    found: dict[str, Any] = {"durable": [], "open": [], "threads": []}
    with Disk().inside():
        made = engine(1, "bf16")
        for step in range(1, 6):
            train(made, step - 1, step)
            root = folder / f"checkpoint-{step}"
            made.save_checkpoint(str(root))
            found["durable"].append(
                (root / "latest").exists() and verify(root / f"global_step{step}").ok
            )
            found["open"].append(len(ROOTS._open))
            found["threads"].append(threading.active_count())
        made.destroy()
    again = engine(1, "bf16", seed=5)
    again.load_checkpoint(str(folder / "checkpoint-5"))
    with Disk().inside():
        train(again, 5, 6)
        again.save_checkpoint(str(folder / "elsewhere"))
        found["resumed"] = (folder / "elsewhere" / "latest").exists()
    return found


def used_again(folder: Path) -> dict[str, Any]:
    """Names come again, as of a second `train()`, and others are deleted: which saves leave a whole tag."""

    def whole(root: Path) -> bool:
        tags = list(root.glob("global_step*"))
        scripts = (root / "zero_to_fp32.py").exists()
        return scripts and len(tags) == 1 and verify(tags[0]).ok

    def saved(names: Iterable[str], before: Clears = None, behind: Clears = None) -> list[bool]:
        made, found = engine(1, "bf16"), []
        for step, name in enumerate(names):
            train(made, step, step + 1)
            _by_first(before, folder / name)
            made.save_checkpoint(str(folder / name))
            found.append(whole(folder / name))
            _by_first(behind, folder / name)
        made.destroy()
        return found

    def removed(root: Path) -> None:
        shutil.rmtree(root, ignore_errors=True)

    def emptied(root: Path) -> None:
        for tag in root.glob("global_step*"):
            shutil.rmtree(tag)

    def others(root: Path) -> None:
        for other in folder.glob(f"{root.name[:4]}*"):
            if other != root:
                removed(other)

    trainers = [f"checkpoint-{number}0" for number in range(1, 5)]
    with Disk().inside():
        return {
            "fits": [saved(trainers, behind=others) for _ in range(3)],
            "short fits": [saved(trainers[:2], behind=others) for _ in range(3)],
            "open": len(ROOTS._open),
            "slots": saved([f"slot-{step % 3}" for step in range(9)], before=removed)[1:],
            "pair": saved([f"pair-{step % 2}" for step in range(6)], behind=others)[1:],
            "emptied": saved([f"room-{step % 2}" for step in range(6)], before=emptied)[1:],
        }


Clears = Callable[[Path], None] | None


def _by_first(clears: Clears, root: Path) -> None:
    """The first rank deletes, while the others wait."""
    dist.barrier()
    if clears is not None and dist.get_rank() == 0:
        clears(root)
    dist.barrier()


def by_turns(folder: Path) -> dict[str, Any]:
    """Three engines, each with a directory: how many Checkpointers four rounds of saves take."""
    places = [folder / name for name in ("actor", "critic", "reward")]
    engines = [engine(1, "bf16", seed=number) for number in range(len(places))]
    used: list[Any] = []
    with Disk().inside():
        for step in range(4):
            for made, place in zip(engines, places, strict=True):
                train(made, step, step + 1)
                made.save_checkpoint(str(place))
                used.append(ROOTS._open[os.path.realpath(place)].checkpointer)
    for made in engines:
        made.destroy()
    return {
        "opened": len({id(one) for one in used}),
        "latest": [(place / "latest").read_text() for place in places],
        "whole": [verify(place / f"global_step{step}").ok for place in places for step in (1, 4)],
    }


def shared_with_others(folder: Path) -> dict[str, Any]:
    """Weights are exported into the directory of a tag that is in flight; then the tag is saved again."""
    root, weights = folder / "c", folder / "c" / "global_step1" / "pytorch_model.bin"
    with Disk().inside():
        made = engine(1, "bf16")
        train(made, 0, 1)
        made.save_checkpoint(str(root))
        made.save_16bit_model(str(weights.parent))
        ckpt_deepspeed.wait()
        dist.barrier()
        found: dict[str, Any] = {"kept": [weights.exists()]}
        dist.barrier()
        if dist.get_rank() == 0:
            (weights.parent / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_text(
                "of a larger job"
            )
            (weights.parent / "tokenizer").mkdir()
            (weights.parent / "tokenizer" / "vocab.json").write_text("{}")
        dist.barrier()
        made.save_checkpoint(str(root), client_state={"again": True})
        ckpt_deepspeed.wait()
        dist.barrier()
        found["kept"] += [weights.exists(), (weights.parent / "tokenizer" / "vocab.json").exists()]
        found["gone"] = not (weights.parent / "zero_pp_rank_7_mp_rank_00_optim_states.pt").exists()
        found["whole"] = verify(weights.parent).ok
        _, client = made.load_checkpoint(str(root))
        found["again"] = client["again"]
        made.destroy()
    return found


class _NoMemory:
    """Whoever pickles it finds no memory."""

    def __reduce__(self) -> Any:
        raise MemoryError("no memory on this rank")


def remembered_otherwise(folder: Path) -> dict[str, Any]:
    """Ranks know otherwise where an engine saved or loaded before; then it saves twice in each of two
    directories that are open. What each rank was told of that, for each way.
    """
    rank, found = dist.get_rank(), {}
    for way in ("save", "save, Fail", "load", "differing"):
        settings = config(0, "fp32", ours=True, timeout=15.0)
        made = engine_for(
            settings | {"checkpoint": {"tag_validation": way.partition(", ")[2] or "Warn"}}
        )
        places, step = [str(folder / way / name) for name in ("last", "best")], 0

        def save(place: str, made: Any = made, **client: Any) -> Any:
            nonlocal step
            step += 1
            train(made, step - 1, step)
            return attempt(lambda: made.save_checkpoint(place, f"t{step}", client))

        told = [save(place) for place in [*places, *places, places[0]]]
        ckpt_deepspeed.wait()
        dist.barrier()
        if way == "load":
            by = None if rank == 0 else _no_memory
            odd = str(attempt(lambda: made.load_checkpoint(places[1], custom_load_fn=by)))[:99]  # noqa: B023
            made.global_steps = step
        elif way == "differing":
            odd = save(places[rank])
            attempt(ckpt_deepspeed.wait)
        else:
            odd = save(places[1], **({"odd": _NoMemory()} if rank == 0 else {}))
        dist.barrier()
        told += [save(place) for place in [*places, *places]]
        told.append(attempt(ckpt_deepspeed.wait))
        found[way] = {"told": told, "odd": odd, "last": f"t{step - 1} t{step}"}
        found[way]["latest"] = " ".join(Path(place, "latest").read_text() for place in places)
        dist.barrier()
        made.destroy()
        attempt(ckpt_deepspeed.close)
    return found


def _no_memory(src: Any, dst: Any) -> None:
    raise MemoryError("no memory on this rank")


def in_the_way(folder: Path) -> str:
    """One of DeepSpeed's scripts cannot be copied."""
    root = folder / "c"
    (root / "zero_to_fp32.py").mkdir(parents=True, exist_ok=True)
    made = engine(1, "bf16")
    train(made, 0, 1)
    made.save_checkpoint(str(root))
    ckpt_deepspeed.wait()
    made.destroy()
    return (root / "latest").read_text()


def interrupted(folder: Path) -> list[str]:
    """Ctrl-C while the first of two directories is closed; then it is closed again, and saved to."""
    places, disk = [folder / name for name in "ab"], Disk()
    made = engine(1, "bf16")
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    with disk.inside():
        for step, place in enumerate(places):
            train(made, step, step + 1)
            made.save_checkpoint(str(place))
        with disk.still(places[0]):
            made.save_checkpoint(str(places[0]))
            timer = threading.Timer(WAIT_S, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                ckpt_deepspeed.close()
                told = ""
            except KeyboardInterrupt:
                told = "interrupted"
            timer.join()
        dist.barrier()
        ckpt_deepspeed.close()
        dist.barrier()
        signal.signal(signal.SIGINT, kept)
        train(made, 2, 3)
        for place in places:
            made.save_checkpoint(str(place))
        ckpt_deepspeed.wait()
        made.destroy()
    return [told, *((place / "latest").read_text() for place in places)]


def other_settings(folder: Path) -> list[Any]:
    """Two engines save to one directory, with settings that differ."""
    root, found = folder / "c", []
    for timeout_s in (20, 30):
        made = engine(1, "bf16", timeout=timeout_s)
        train(made, 0, 1)
        found.append(attempt(lambda: made.save_checkpoint(str(root))))  # noqa: B023
        made.destroy()
    ckpt_deepspeed.close()
    return found


def asked(folder: Path) -> list[Any]:
    """A tag that is not there, asked for in a directory that nobody has saved to."""
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return [attempt(lambda: choose(folder, "global_step5")), os.listdir(folder)]
