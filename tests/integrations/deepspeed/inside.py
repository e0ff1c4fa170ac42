"""Jobs in the process that saves: readers, bad disks, the collector, and copies of a tag that are damaged."""

from __future__ import annotations

import gc
import random
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint import DeepSpeedCheckpoint, ZeROCheckpoint, ds_to_universal
from deepspeed.utils import zero_to_fp32

import ckpt_core
import ckpt_deepspeed
from ckpt_core.system.files import Files
from ckpt_deepspeed import roots
from tests.faults.layers import FaultAt, Stuck
from tests.integrations.deepspeed.plain import AT, TAG, attempt
from tests.integrations.deepspeed.training import Model, engine, train, weights

HELD_S = 0.3


# -- in this process -------------------------------------------------------------------------------


@contextmanager
def disk(layer: Any) -> Iterator[None]:
    """Checkpointers that are opened inside have a layer of faults below; they are closed at the end."""
    kept = roots.Checkpointer

    def faulty(*args: Any, **kwargs: Any) -> ckpt_core.Checkpointer:
        return kept(*args, **kwargs, files=layer.files(Files))

    roots.Checkpointer = faulty  # type: ignore[misc,assignment]
    try:
        yield
        ckpt_deepspeed.close()
    finally:
        roots.Checkpointer = kept  # type: ignore[misc]


def readers(folder: Path) -> dict[str, Any]:
    """Each right after `save_checkpoint` has returned, while the disk hangs for a moment: what it found."""
    found: dict[str, Any] = {}
    stuck = Stuck("sync")
    with disk(stuck):
        for number, (name, read) in enumerate(READERS.items()):
            root = folder / str(number)
            made = engine(2, "bf16")
            train(made, 0, AT)
            stuck.engage()
            made.save_checkpoint(
                str(root), client_state={ds_to_universal.UNIVERSAL_CHECKPOINT_INFO: {}}
            )
            behind = not (root / "latest").exists()
            threading.Timer(HELD_S, stuck.release).start()
            found[name] = [behind, attempt(lambda read=read, root=root: read(root))]
            dist.barrier()
            ckpt_deepspeed.wait()
            made.destroy()
    return found


def _universal_on_first(root: Path) -> str:
    arguments = SimpleNamespace(
        input_folder=str(root / TAG),
        output_folder=str(root / "universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    if dist.get_rank() == 0:
        ds_to_universal.main(arguments)
    return "read"


def _converted(convert: Callable[..., None], root: Path) -> str:
    convert(str(root), str(root / f"out{dist.get_rank()}"), max_shard_size=None)
    return "read"


def _loaded_plainly(root: Path) -> str:
    path, _ = engine(2, "bf16", ours=False, seed=7).load_checkpoint(str(root))
    return "read" if path else "nothing"


READERS: dict[str, Callable[[Path], str]] = {
    "get": lambda root: zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(root)) and "read",
    "load": lambda root: (
        zero_to_fp32.load_state_dict_from_zero_checkpoint(Model(), str(root)) and "read"
    ),
    "convert": lambda root: _converted(
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict, root
    ),
    "convert to": lambda root: _converted(zero_to_fp32.convert_zero_checkpoint_to_state_dict, root),
    "universal": _universal_on_first,
    "DeepSpeedCheckpoint": lambda root: DeepSpeedCheckpoint(str(root / TAG)) and "read",
    "ZeROCheckpoint": lambda root: ZeROCheckpoint(str(root / TAG)) and "read",
    "a plain engine": _loaded_plainly,
}


def persisted(folder: Path) -> dict[str, Any]:
    """wait="persisted": what is there when `save_checkpoint` returns, and what it raises on a bad disk."""
    fault = FaultAt(None, 5, names=("sync",), lasting=True)
    found: dict[str, Any] = {"there": []}
    with disk(fault):
        made = engine(1, "bf16", wait="persisted")
        for step in range(3):
            train(made, step, step + 1)
            made.save_checkpoint(str(folder / "c"))
            report = ckpt_core.verify(folder / "c" / f"global_step{step + 1}")
            found["there"].append([(folder / "c" / "latest").read_text(), report.ok])
            dist.barrier()
        if dist.get_rank() == dist.get_world_size() - 1:
            fault.n = 0
        dist.barrier()
        train(made, 3, 4)
        found["raised"] = attempt(lambda: made.save_checkpoint(str(folder / "c")))
        found["kept"] = [
            (folder / "c" / "latest").read_text(),
            (folder / "c" / "global_step4").exists(),
        ]
        dist.barrier()
        fault.mend()
        dist.barrier()
        train(made, 4, 5)
        made.save_checkpoint(str(folder / "c"))
        found["mended"] = (folder / "c" / "latest").read_text()
        dist.barrier()
    return found


class Collecting:
    """The collector runs while it is pickled, in the middle of a save."""

    def __reduce__(self) -> Any:
        gc.collect()
        return (str, ("pickled",))


def collected(folder: Path) -> dict[str, Any]:
    """An engine that nobody holds any more goes away while another one saves."""
    gc.disable()
    dropped = engine(1, "bf16", timeout=20)
    train(dropped, 0, 1)
    dropped.save_checkpoint(str(folder / "c"), tag="first")
    made = engine(1, "bf16", timeout=20)
    train(made, 0, 1)
    dropped.destroy()
    last = weakref.ref(dropped)
    del dropped
    held = last() is not None
    made.save_checkpoint(str(folder / "c"), tag="second", client_state={"probe": Collecting()})
    gc.enable()
    ckpt_deepspeed.wait()
    return {
        "held": held,
        "gone": last() is None,
        "whole": [ckpt_core.verify(folder / "c" / tag).ok for tag in ("first", "second")],
    }


def weights_of_a_tag(folder: Path) -> dict[str, Any]:
    """ZeRO-3 without optimizer states, from a tag that is not the latest, and past a damaged latest."""
    root = folder / "c"
    made = engine(3, "bf16")
    saved = []
    for step in range(2):
        train(made, step, step + 1)
        made.save_checkpoint(str(root))
        saved.append(weights(made))
    ckpt_deepspeed.wait()
    found = {"saved": saved, "asked": _weights_of(root, "global_step1")}
    dist.barrier()
    if dist.get_rank() == 0:
        _flip(next((root / "global_step2").glob("*optim_states.pt")), random.Random(0))
    dist.barrier()
    found["fallen back"] = _weights_of(root, None)
    return found


def _weights_of(root: Path, tag: str | None) -> str:
    made = engine(3, "bf16", seed=7)
    made.load_checkpoint(str(root), tag=tag, load_optimizer_states=False)
    return weights(made)


# -- damaged ---------------------------------------------------------------------------------------


def damaged(folder: Path, seeds: int) -> dict[str, Any]:
    """Copies of a tag, each damaged in another way: those that our engine loads all the same."""
    made = engine(1, "bf16")
    train(made, 0, 1)
    made.save_checkpoint(str(folder / "whole"), tag="t")
    ckpt_deepspeed.wait()
    made = engine(1, "bf16", seed=7)
    loaded, strange = [], []
    for seed in range(seeds):
        root = folder / str(seed)
        how = _copied(
            folder / "whole", root, lambda tag, seed=seed: _damage(tag, random.Random(seed))
        )
        said = attempt(lambda root=root: made.load_checkpoint(str(root), tag="t"))
        if not isinstance(said, str):
            loaded.append(how)
        elif not said.startswith("CorruptCheckpoint") or "'t'" not in said:
            strange.append([how, said])
    how = _copied(folder / "whole", folder / "foreign", _add_foreign)
    path, _ = made.load_checkpoint(str(folder / "foreign"))
    return {"loaded": loaded, "strange": strange, "foreign": Path(path).parent.name}


def _copied(source: Path, root: Path, change: Callable[[Path], str]) -> str:
    told = [""]
    if dist.get_rank() == 0:
        shutil.copytree(source, root)
        told = [change(root / "t")]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _damage(tag: Path, chance: random.Random) -> str:
    path = chance.choice(sorted(tag.iterdir()))
    how = chance.choice([_flip, _cut, _remove, _lengthen])
    how(path, chance)
    return f"{how.__name__} {path.name}"


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def _remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def _lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 5000)))


def _add_foreign(tag: Path) -> str:
    (tag / "README.md").write_text("mine")
    (tag / "more").mkdir()
    (tag / "more" / "tokenizer.json").write_text("{}")
    (tag / ".hidden").mkdir()
    (tag.parent / ".cache").mkdir()
    (tag.parent / "notes.txt").write_text("mine")
    return "foreign"
