"""Steps come back: what levels hold, and one of them made a step of the root again.

    steps, times, bring    errands: what needs a connection
    BringsBack             what a restore asks (`ckpt_core.restore.further`), for the rank that leads a root

Idea: a step that is brought is published like a save, and its manifest still names the attempt that saved
it. So a kill leaves what a kill during a save leaves, and there is one way to read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ckpt_core.errors import (
    CkptError,
    CommitError,
    CorruptCheckpoint,
    PersistError,
    RestoreError,
    RootBusy,
)
from ckpt_core.layout import MANIFEST_NAME, Manifest
from ckpt_core.levels.bring.fetching import PATIENCE_S, Wanted, fetch
from ckpt_core.levels.bring.sources import open_source
from ckpt_core.levels.errands import Errands, Progress, run_errand
from ckpt_core.levels.far.door import Away, Copy, Readable
from ckpt_core.levels.helping import run_here
from ckpt_core.options import scheme_of
from ckpt_core.store import Attempt, step_path
from ckpt_core.system.files import Files
from ckpt_core.system.interrupts import holding
from ckpt_core.types import RankInfo, step_dir_name

logger = logging.getLogger("ckpt_core")

Json = Any
_Result = TypeVar("_Result")

_PAUSES_S = (0.2, 1.0)
"""A level that is away is asked again after each of these."""
_LIST_S = 60.0
"""How long the levels have to say what they hold."""


# -- errands ---------------------------------------------------------------------------------------


def steps(request: Json, progress: Progress, *, files: Files | None = None) -> Json:
    """What levels hold, asked all at once: `{"levels": [url, ...], "timeout_s": s}`.

    Of those that `"parity"` names, too, their directories of parity are meant, with the attempts of these.

    Returns:
        For each level `{"steps": [[step, attempt], ...]}`, or `{"problem": text}` where it did not answer.
    """
    parity = {*request.get("parity", ())}

    def ask(far: Readable, url: str) -> Json:
        found = _parity(far) if url in parity else far.steps()
        return {"steps": list(found.items())}

    return _asked(request["levels"], ask, timeout_s=request["timeout_s"], files=files)


def times(request: Json, progress: Progress, *, files: Files | None = None) -> Json:
    """When saves were made: `{"levels": [url, ...], "steps": [step, ...], "timeout_s": s}`.

    Returns:
        For each level `{"times": [[attempt, created_unix_s], ...]}`, or `{"problem": text}` likewise.
    """

    def ask(far: Readable, url: str) -> Json:
        found = []
        for step in request["steps"]:
            data = far.manifest(step_dir_name(step))
            if data is not None:
                manifest = Manifest.decode(data, path=Path(url, step_dir_name(step)))
                found.append((manifest.attempt, manifest.created_unix_s))
        return {"times": found}

    return _asked(request["levels"], ask, timeout_s=request["timeout_s"], files=files)


def _asked(
    urls: Sequence[str],
    ask: Callable[[Readable, str], Json],
    *,
    timeout_s: float,
    files: Files | None,
) -> list[Json]:
    """What levels say, asked all at once."""
    answers: list[Json] = [{"problem": "it has not answered in time"} for _ in urls]

    def hear(number: int, url: str) -> None:
        for pause_s in (*_PAUSES_S, 0.0):
            try:
                with open_source(url, files=files) as far:
                    answers[number] = ask(far, url)
                return
            except (CkptError, OSError) as exc:
                answers[number] = {"problem": str(exc)}
                if not isinstance(exc, Away) or exc.hopeless:
                    return
            time.sleep(pause_s)

    threads = [
        threading.Thread(target=hear, args=pair, name="ckpt-levels", daemon=True)
        for pair in enumerate(urls)
    ]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return list(answers)


def _parity(far: Readable) -> dict[int, str]:
    return {copy.step: copy.attempt for copy in far.directories().values()}


def bring(request: Json, progress: Progress, *, files: Files | None = None) -> Json:
    """Fetch a save into a directory of this machine, verified and durable: `{"bytes": n}`.

    Args:
        request: `url`, `step`, `attempt`, and the rest of `Wanted`.

    Raises:
        CkptError: see `fetch`.
    """
    wanted = Wanted(
        Copy(request["step"], request["attempt"]),
        Path(request["directory"]),
        tuple(request["ranks"]),
        request["world_size"],
        request["patience_s"],
    )
    with open_source(request["url"], files=files) as far:
        return {"bytes": fetch(far, wanted, progress, files=files or Files())}


# -- for the process that trains -------------------------------------------------------------------


class Store(Protocol):
    """What is asked of the root's store."""

    root: Path

    def begin(self, step: int, *, brought: bool) -> Attempt:
        """See `StepStore`."""

    def publish(self, attempt: Attempt) -> Path:
        """See `StepStore`."""

    def abandon(self, attempt: Attempt) -> None:
        """See `StepStore`."""


@dataclass(frozen=True, slots=True)
class _Level:
    """What a level has said of itself."""

    url: str
    steps: Mapping[int, str]


class BringsBack:
    """`FurtherLevels` of one restore: the levels are asked once what they hold, the nearest first."""

    def __init__(
        self,
        urls: Sequence[str],
        store: Store,
        info: RankInfo,
        *,
        files: Files,
        timeout_s: float,
        errands: Errands | None = None,
    ) -> None:
        """
        Args:
            urls: of the levels, the nearest first.
            store: of the first root, open.
            files: the door to directories, also to levels that are.
            timeout_s: longest time without a word from storage or a level.
            errands: a process that may be there already; None: one for each errand.
        """
        self._errand = run_errand if errands is None else errands.run
        self._urls, self._store, self._info = list(urls), store, info
        self._files, self._timeout_s = files, timeout_s
        self._levels: list[_Level] | None = None
        self._steps: dict[int, tuple[str, ...]] = {}
        self._away: tuple[str, ...] = ()

    def steps(self) -> dict[int, tuple[str, ...]]:
        """See `FurtherLevels`."""
        if self._levels is None:
            self._levels = self._ask()
            self._steps = self._in_order(self._levels)
        return self._steps

    def away(self) -> tuple[str, ...]:
        """See `FurtherLevels`."""
        return self._away

    def bring(
        self,
        step: int,
        attempt: str,
        *,
        whole: bool = False,
        keeps: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """See `FurtherLevels`."""
        ranks = () if whole else self._info.members
        if keeps and not whole:
            ranks = tuple(sorted({*ranks, *self._change(lambda: self._there(step))}))
        problems: list[CkptError] = []
        for level in self._levels or ():
            if level.steps.get(step) != attempt:
                continue
            try:
                self._bring(level.url, Copy(step, attempt), ranks, progress)
            except (PersistError, CommitError, RootBusy) as exc:
                raise RestoreError(str(exc), step=step, path=self._store.root) from exc
            except CkptError as exc:
                logger.warning("step %d cannot be brought from %s: %s", step, level.url, exc)
                problems.append(exc)
            else:
                return
        raise self._nowhere(step, problems)

    # -- inside ----------------------------------------------------------------------------------

    def _there(self, step: int) -> list[int]:
        """The ranks of which the root has a step."""
        path = step_path(self._store.root, step)
        with suppress(OSError, CkptError):
            raw = (path / MANIFEST_NAME).read_bytes()
            return [row.rank for row in Manifest.decode(raw, path=path).ranks]
        return []  # gone, or damaged: there is nothing to keep

    def _in_order(self, levels: Sequence[_Level]) -> dict[int, tuple[str, ...]]:
        """All saves of each step, the one made last first; where levels do not tell that, the nearest."""
        saves: dict[int, list[str]] = {}
        for level in levels:
            for step, attempt in level.steps.items():
                if attempt not in saves.setdefault(step, []):
                    saves[step].append(attempt)
        # A level may have been left out for a while, and hold what the run has gone back behind since.
        several = {step for step, attempts in saves.items() if len(attempts) > 1}
        urls = [level.url for level in levels if not several.isdisjoint(level.steps)]
        made: dict[str, float] = {}
        if several:
            timeout_s = min(_LIST_S, self._timeout_s / 4)  # the other ranks wait for both answers
            answers = self._answers("times", urls, timeout_s=timeout_s, steps=sorted(several))
            made = {save: at for one in answers for save, at in one.get("times", ())}
        for step in several:
            if made.keys() >= {*saves[step]}:
                saves[step].sort(key=made.__getitem__, reverse=True)
        return {step: tuple(attempts) for step, attempts in saves.items()}

    def _answers(
        self, name: str, urls: Sequence[str], *, timeout_s: float, **more: Json
    ) -> list[Json]:
        request = {"levels": list(urls), "timeout_s": timeout_s, **more}
        try:
            found: list[Json] = self._done(name, request, urls, timeout_s=timeout_s + 5.0)
        except Away as exc:
            found = [{"problem": str(exc)} for _ in urls]
        return found

    def _ask(self) -> list[_Level]:
        timeout_s = min(_LIST_S, self._timeout_s / 2)
        answers = self._answers("steps", self._urls, timeout_s=timeout_s)
        levels, away = [], []
        for url, answer in zip(self._urls, answers, strict=True):
            if "problem" in answer:
                text = answer["problem"]
                away.append(text if url in text else f"{url}: {text}")
            else:
                levels.append(_Level(url, dict(answer["steps"])))
        self._away = tuple(away)
        return levels

    def _bring(
        self, url: str, copy: Copy, ranks: tuple[int, ...], progress: Progress | None
    ) -> None:
        began = time.monotonic()
        logger.info("bringing step %d from %s", copy.step, url)
        # An interrupt comes while bytes are fetched, and nowhere else: names are changed undisturbed.
        with holding() as held:
            # Under a name of its own: the errand of a trainer that was killed may still write under another.
            begun: list[Attempt] = []
            try:
                # Noted where it is begun: this thread may fail before it hears of it.
                self._change(lambda: begun.append(self._store.begin(copy.step, brought=True)))
                with held.allowed():
                    size = self._fetch(url, copy, begun[0].path, ranks, progress)
                self._change(lambda: self._store.publish(begun[0]))
            except BaseException:
                for attempt in begun:
                    self._change(partial(self._store.abandon, attempt))
                raise
        seconds = time.monotonic() - began
        logger.info("brought step %d from %s: %d bytes, %.1f s", copy.step, url, size, seconds)

    def _fetch(
        self,
        url: str,
        copy: Copy,
        directory: Path,
        ranks: tuple[int, ...],
        progress: Progress | None,
    ) -> int:
        request = {
            "url": url,
            "step": copy.step,
            "attempt": copy.attempt,
            "directory": str(directory),
            "ranks": ranks,
            "world_size": self._info.world_size,
            "patience_s": min(PATIENCE_S, self._timeout_s / 2),
        }
        answer = self._done("bring", request, [url], timeout_s=self._timeout_s, progress=progress)
        return int(answer["bytes"])

    def _change(self, action: Callable[[], _Result]) -> _Result:
        """Something that may block on storage."""
        return run_here(lambda _: action(), timeout_s=self._timeout_s)

    def _done(
        self,
        name: str,
        request: Json,
        urls: Sequence[str],
        *,
        timeout_s: float,
        progress: Progress | None = None,
    ) -> Json:
        """An errand; where only directories are asked it needs no process of its own."""
        if any(scheme_of(url) is not None for url in urls):
            return self._errand(name, request, timeout_s=timeout_s, progress=progress)
        action = {"steps": steps, "times": times, "bring": bring}[name]

        def act(tell: Progress) -> Json:
            def told(done: int, total: int) -> None:
                tell(done, total)
                if progress is not None:
                    progress(done, total)

            return action(request, told, files=self._files)

        return run_here(act, timeout_s=timeout_s)

    def _nowhere(self, step: int, problems: Sequence[CkptError]) -> RestoreError:
        text = "; ".join(map(str, problems)) or "no level holds it any more"
        text = f"step {step} could not be brought to {self._store.root}: {text}"
        if problems and all(isinstance(one, CorruptCheckpoint) for one in problems):
            path = problems[0].path or self._store.root
            return CorruptCheckpoint(text, path=path, step=step)
        return RestoreError(text, step=step, path=self._store.root)
