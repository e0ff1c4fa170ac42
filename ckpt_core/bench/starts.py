"""From the start of a process to its first step with a restored state; each time in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from ckpt_core.bench import cache
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.remote import ContenderFailed, environment_for_children
from ckpt_core.bench.results import Figure, Unit
from ckpt_core.bench.started import WAYS
from ckpt_core.bench.views import One, View

START = Figure("start", "Start of the process to first step", Unit.SECONDS)
OWN = Figure("start_own", "Of it the checkpointer: import, open, restore", Unit.SECONDS)
_PARTS = {
    "torch": Figure("start_torch", "Of a start: python, torch, the model", Unit.SECONDS),
    "import": Figure("start_import", "Of a start: the import", Unit.SECONDS),
    "open": Figure("start_open", "Of a start: to open", Unit.SECONDS),
    "restore": Figure("start_restore", "Of a start: restore", Unit.SECONDS),
    "step": Figure("start_step", "Of a start: the first step", Unit.SECONDS),
}
_OWN = ("import", "open", "restore")
_OF_TORCH = ("python", "torch", "build")
_CHILD = Path(__file__).with_name("started.py")
_RUN = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
_LAST_WORDS = 2000

FIGURES: tuple[View, ...] = (One(START), One(OWN))


def measure_starts(crew: Crew) -> None:
    """A few rounds of those contenders that have a way to start; their files are in the page cache."""
    crew.readmit()
    for name in [name for name in crew.names() if name in WAYS]:
        crew.notify(f"start, warm-up: {name}")
        _run(crew, name, "save")  # which writes what Python keeps of modules, too
    for name in crew.turns("start", reference=False):
        if name in WAYS:
            _turn(crew, name)


def _turn(crew: Crew, name: str) -> None:
    cache.warm(crew.team(name).root)
    printed = _run(crew, name, "start")
    if printed is None:
        return
    seconds: dict[str, float] = json.loads(printed)
    crew.report.add(START, name, sum(seconds.values()))
    crew.report.add(OWN, name, sum(seconds[part] for part in _OWN))
    seconds["torch"] = sum(seconds.pop(part) for part in _OF_TORCH)
    for part, figure in _PARTS.items():
        crew.report.add(figure, name, max(seconds[part], 1e-9))


def _run(crew: Crew, name: str, task: str) -> str | None:
    """What the child prints; None when the contender has failed, now or before."""
    settings = crew.run.settings
    try:
        root = crew.team(name).root / "start"
        root.mkdir(exist_ok=True)
        arguments = [task, name, str(root), str(settings.state_bytes), repr(time.monotonic())]
        return _output([str(_CHILD), *arguments], root, settings.timeout_s)
    except ContenderFailed as exc:
        crew.give_up(name, str(exc))
        return None


def _output(arguments: list[str], root: Path, timeout_s: float) -> str:
    environment = environment_for_children()
    # Else each start compiles what an installed package has compiled already.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _RUN, *arguments],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except subprocess.TimeoutExpired as exc:
        raise ContenderFailed(f"a start took longer than {timeout_s:.0f} s") from exc
    except subprocess.CalledProcessError as exc:
        raise ContenderFailed(f"a start failed: {exc.stderr[-_LAST_WORDS:]}") from exc
    return done.stdout
