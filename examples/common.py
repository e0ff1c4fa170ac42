"""What the examples share and what is not about checkpoints: arguments, text, fingerprints."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CORPUS_BYTES = 4_000_000


def parse_args(description: str | None, *, levels: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    if levels:
        parser.add_argument("--level", action="append", default=[], help="a further root, or a URL")
        parser.add_argument("--level-every", type=int, default=100, help="steps that go there")
    parser.add_argument("--root", required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in all")
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    parser.add_argument("--result", type=Path, required=True, help="file for the final fingerprint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=device_of, default="cpu", help="cpu, cuda, ..., or auto")
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("ckpt_core").setLevel(logging.INFO)  # a line for each committed step
    return parser.parse_args()


def device_of(name: str) -> torch.device:
    """This process's device of that kind, one for each rank of a machine; ranks share if there are fewer.

    `auto` is an accelerator where there is one.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(name if name != "auto" else "cpu" if found is None else found.type)
    if device.type == "cpu" or device.index is not None:
        return device
    module = torch.get_device_module(device)
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("HOROVOD_LOCAL_RANK") or "0"
    module.set_device(int(rank) % module.device_count())
    return torch.device(device.type, module.current_device())


def make_deterministic(seed: int) -> None:
    """The same numbers on every run of this machine: threads, seed and algorithms are fixed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)  # leaves a core to the copy, the checksums and the writes
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


def load_corpus() -> torch.Tensor:
    """Real text that every machine has: the modules of Python's own standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:CORPUS_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(corpus: torch.Tensor, *, seed: int, step: int, size: int, length: int) -> torch.Tensor:
    """Token windows [size, length + 1]. They depend on (seed, step) alone: resuming needs no more."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    starts = torch.randint(len(corpus) - length, (size, 1), generator=generator)
    return corpus[starts + torch.arange(length + 1)].long()


def write_result(path: Path, *, step: int, losses: list[float], objects: list[Any]) -> None:
    """One JSON line that two runs share if and only if they ended in the same bits."""
    state = [item.state_dict() for item in objects]
    result = {"step": step, "sha256": fingerprint(state), "losses_sha256": fingerprint(losses)}
    path.write_text(json.dumps(result) + "\n")


def fingerprint(tree: Any) -> str:
    digest = hashlib.sha256()
    for part in _parts(tree):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, dict):
        for key in sorted(tree, key=repr):
            yield repr(key).encode()
            yield from _parts(tree[key])
    elif isinstance(tree, list | tuple):
        yield f"sequence of {len(tree)}".encode()
        for item in tree:
            yield from _parts(item)
    elif isinstance(tree, torch.Tensor):
        flat = tree.detach().cpu().contiguous()
        yield f"{flat.dtype} {tuple(flat.shape)}".encode()
        yield ctypes.string_at(flat.data_ptr(), flat.nbytes)
    else:
        yield repr(tree).encode()
