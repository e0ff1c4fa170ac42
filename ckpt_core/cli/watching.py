"""`watch`: a running job in the terminal, or a line for each commit where there is none."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

from ckpt_core.cli.requests import WatchRequest
from ckpt_core.cli.text import console, say, say_json, say_wrong
from ckpt_core.cli.watch_text import picture, rows, saved_text, writer_text
from ckpt_core.cli.watched import Watched, Watcher
from ckpt_core.errors import ConfigError
from ckpt_core.system.interrupts import Terminated

_IDLE = 10
"""Looking takes at most one part in so many of the time, however much there is to look at."""

_HINT = "Ctrl-C ends this, not the job."
_MORE = f"{_HINT} What saves cost, and failures, are in its events: CKPT_CORE_EVENTS_FILE=run.jsonl"


def watch(request: WatchRequest) -> bool:
    """Show what there is until Ctrl-C, which is its usual end, or once. Always a success.

    What is not there yet is waited for; what cannot be read is shown as such.

    Raises:
        ConfigError: one object is asked for, and no end.
        Terminated: SIGTERM ended it.
    """
    if request.json and not request.once:
        raise ConfigError("--json answers with one object: give --once with it")
    watcher = Watcher(request.places)
    try:
        if request.once:
            _once(watcher, as_json=request.json)
        elif sys.stdout.isatty():
            _live(watcher, request.every)
        else:
            _lines(watcher, request.every)
    except Terminated:
        raise
    except KeyboardInterrupt:
        pass
    return True


def _once(watcher: Watcher, *, as_json: bool) -> None:
    seen = watcher.look()
    if as_json:
        say_json(asdict(seen))
    else:
        console().print(picture(seen), crop=False)


def _live(watcher: Watcher, every_s: float) -> None:
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        while True:
            began_s = time.monotonic()
            seen = watcher.look()
            live.update(picture(seen, hint=_HINT if seen.ranks else _MORE), refresh=True)
            _rest(began_s, every_s)


def _lines(watcher: Watcher, every_s: float) -> None:
    said = _Said()
    while True:
        began_s = time.monotonic()
        said.tell(watcher.look())
        sys.stdout.flush()
        _rest(began_s, every_s)


def _rest(began_s: float, every_s: float) -> None:
    time.sleep(max(every_s, _IDLE * (time.monotonic() - began_s)))


class _Said:
    """What has been told in lines, so that each thing is told once."""

    def __init__(self) -> None:
        self._first = True
        self._states: dict[str, str] = {}
        self._saves: set[tuple[int, float]] = set()
        self._steps: set[int] = set()

    def tell(self, seen: Watched) -> None:
        """A line for each thing that has changed; all there is, at first."""
        if self._first:
            for row in rows(seen):
                (say_wrong if row.wrong else say)(f"{row.label:12}{row.text}")
        self._saved(seen)
        for root in seen.roots:
            self._state(root.root, writer_text(root), wrong=root.writer is None)
            for level in () if root.further is None else root.further.levels:
                if level.problem or level.url in self._states:
                    text = f"level {level.number}: {level.problem or 'it goes on'}"
                    self._state(level.url, text, wrong=level.problem is not None)
        for number, problem in enumerate(seen.problems):
            self._state(f"problem {number}", problem, wrong=True)
        self._first = False

    def _state(self, about: str, text: str, *, wrong: bool) -> None:
        if self._states.get(about) != text and not self._first:
            (say_wrong if wrong else say)(text)
        self._states[about] = text

    def _saved(self, seen: Watched) -> None:
        told = min((rank.rank for rank in seen.ranks), default=None)
        for save in [save for rank in seen.ranks for save in rank.over]:
            key = (save.rank, save.unix_s)
            new = key not in self._saves and not self._first
            self._saves.add(key)
            if new and save.failure is not None:
                say_wrong(f"rank {save.rank}: step {save.step} failed: {save.failure}")
            elif new and save.rank == told:
                say(f"step {save.step} is saved: {saved_text(save)}")
        steps = {row.step for root in seen.roots for row in root.steps}
        if told is None and not self._first:
            for step in sorted(steps - self._steps):
                say(f"step {step} is saved")
        self._steps |= steps
