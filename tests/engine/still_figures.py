"""What sharing is worth, in figures: `python -m tests.engine.still_figures DIRECTORY [GB]`.

Saves of a state of which 99 % stays the same, and of one of which all changes, with and without sharing,
in turns; then restores from the page cache in random order.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ckpt_core import Checkpointer, Options

WARM, SAVES, RESTORES = 5, 9, 7
PLAIN: dict[str, Any] = {}
FOUND: dict[str, Any] = {"share_unchanged": True}
DECLARED: dict[str, Any] = {"share_unchanged": True, "frozen": ["base"]}
STILL = {"written whole": PLAIN, "found": FOUND, "declared": DECLARED}
CHANGING = {"all changes, not shared": PLAIN, "all changes, looked at": FOUND}


def state_of(nbytes: float) -> dict[str, dict[str, torch.Tensor]]:
    base = {f"b{i}": torch.randn(int(nbytes * 0.99 / 4 / 200)) for i in range(200)}
    return {"base": base, "adapter": {f"a{i}": torch.randn(int(nbytes / 8000)) for i in range(20)}}


def saves(root: Path, state: dict[str, dict[str, torch.Tensor]], ways: dict[str, Any]) -> None:
    """Rounds in which each way saves once; leaves the newest step of each."""
    parts = state if ways is CHANGING else {"adapter": state["adapter"]}
    open_ = {way: Checkpointer(root / way, Options(keep_last=1, **ways[way])) for way in ways}
    rows: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    for step in range(1, WARM + SAVES + 1):
        for way, ck in open_.items():
            for tensor in (one for part in parts.values() for one in part.values()):
                tensor.add_(1)
            wrote, used, began = written(), time.process_time(), time.perf_counter()
            handle = ck.save(step, state)
            called = time.perf_counter()
            handle.staged.result()
            staged = time.perf_counter()
            handle.committed.result()
            times = [(end - began) * 1e3 for end in (called, staged, time.perf_counter())]
            if step > WARM:
                rows[way].append((*times, time.process_time() - used, (written() - wrote) / 1e6))
    for ck in open_.values():
        ck.close()
    for way, found in rows.items():
        columns = zip(*found, strict=True)
        cells = [f"{statistics.median(one):.3g} ({min(one):.3g}-{max(one):.3g})" for one in columns]
        print(f"| {way} | " + " | ".join(cells) + " |", flush=True)


def written() -> int:
    text = Path("/proc/self/io").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("write_by"))


def restores(root: Path, state: dict[str, dict[str, torch.Tensor]]) -> None:
    seconds: dict[str, list[float]] = {way: [] for way in STILL}
    for number in range(RESTORES + 1):
        for way in random.sample(list(STILL), len(STILL)):
            for file in sorted((root / way).glob("step-*/*")):
                file.read_bytes()
            with Checkpointer(root / way) as ck:
                began = time.perf_counter()
                ck.restore(state)
                seconds[way] += [time.perf_counter() - began] if number else []
    for way, found in seconds.items():
        print(
            f"restore, {way}: {statistics.median(found):.3f} s ({min(found):.3f}-{max(found):.3f})"
        )


def main(directory: str, gigabytes: str = "2") -> None:
    torch.set_num_threads(1)
    root = Path(directory) / f"still-{os.getpid()}"
    state = state_of(float(gigabytes) * 1e9)
    try:
        print("| way | call, ms | barrier, ms | durable, ms | processor, s | written, MB |")
        saves(root, state, CHANGING)
        saves(root, state, STILL)
        restores(root, state)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
