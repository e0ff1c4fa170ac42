"""Starts elastic jobs on this machine, under two host names: Horovod can lose one and keep the other."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.integrations.horovod.launch import HOROVODRUN, LAUNCHERS

HERE = Path(__file__).parent
TOP = HERE.parents[2]
LIMIT_S = 150.0
_SHOWN = 6000

BOTH = "echo localhost:1; echo 127.0.0.1:1"
GROWS = "echo localhost:1; if [ -e changed ]; then echo 127.0.0.1:1; fi"
SHRINKS = "echo localhost:1; if [ ! -e changed ]; then echo 127.0.0.1:1; fi"


@dataclass(frozen=True)
class ElasticJob:
    """A job in a folder of its own; `run` may be called again, as a user starts the same command again.

    Attributes:
        folder: holds the checkpoints, what the workers tell, and how they end.
        hosts: shell commands that print host names and slots, run in the folder.
        ranks: how many workers are there at the start.
        told: for the script, see there.
    """

    folder: Path
    hosts: str = BOTH
    ranks: int = 2

    def run(self, **told: Any) -> int:
        """Run horovodrun to its end, and end whatever is left of it; its exit status."""
        told = {"folder": str(self.folder), "epochs": 2, "commit_every": 2, **told}
        self.folder.mkdir(parents=True, exist_ok=True)
        script = self.folder / "hosts"
        script.write_text(f"#!/bin/sh\ncd '{self.folder}'\n{self.hosts}\n")
        script.chmod(0o755)
        for stale in self.folder.glob("here.*"):
            stale.unlink()
        with (self.folder / "output").open("ab") as sink:
            process = LAUNCHERS.popen(
                [*self._command(script), str(HERE / "elastic_script.py"), json.dumps(told)],
                cwd=TOP,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the job hangs\n{self.output()}") from None
            finally:
                self._end(process)

    def _command(self, script: Path) -> list[str]:
        counts = ["-np", str(self.ranks), "--min-np", "1", "--max-np", "2"]
        hosts = ["--host-discovery-script", str(script), "--network-interface", "lo"]
        return [*HOROVODRUN, "--gloo", *counts, *hosts, sys.executable]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        doomed: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(process.pid)
            doomed = [top, *top.children(recursive=True)]
        # Whoever lost its parent is nobody's child any more, but has left its number.
        for row in self.told("began"):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker = psutil.Process(row["pid"])
                if worker.create_time() == row["born"]:
                    doomed.append(worker)
        for one in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        psutil.wait_procs([one for one in doomed if one.pid != process.pid], timeout=10)

    # -- what it told ----------------------------------------------------------------------------

    def output(self) -> str:
        """The end of what all processes printed."""
        return (self.folder / "output").read_text(errors="replace")[-_SHOWN:]

    def told(self, event: str) -> list[dict[str, Any]]:
        """What the workers told of an event, in order."""
        path = self.folder / "events"
        rows = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(json.loads, rows) if row["event"] == event]

    def syncs(self) -> list[tuple[int, int]]:
        """(step, number of ranks) of each `sync`, in order, once for all ranks that took part."""
        found = [(row["step"], row["size"]) for row in self.told("synced")]
        return [one for at, one in enumerate(found) if at == 0 or found[at - 1] != one]

    def end(self, rank: int) -> dict[str, Any]:
        """How a rank ended."""
        path = self.folder / f"end.{rank}.pt"
        assert path.exists(), f"rank {rank} never came to an end\n{self.output()}"
        found: dict[str, Any] = torch.load(path, weights_only=False)
        return found

    @property
    def root(self) -> Path:
        """Where the checkpoints are."""
        return self.folder / "ckpts"

    def node_root(self, host: str) -> Path:
        """Where those of a host are, with roots="node"."""
        return self.folder / f"ckpts.{host}"


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two endings differ, bit for bit."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and torch.equal(one, other)
        return [] if same else [where]
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() ^ other.keys(), key=str)
        rows = [f"{where}.{key}: only in one" for key in keys]
        for key in one.keys() & other.keys():
            rows += differences(one[key], other[key], f"{where}.{key}")
        return rows
    if isinstance(one, list | tuple) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return [row for at, pair in enumerate(pairs) for row in differences(*pair, f"{where}.{at}")]
    return [] if one == other else [where]
