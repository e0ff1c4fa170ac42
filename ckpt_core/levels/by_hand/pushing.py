"""One save of a root to a level now: what the agent does behind training, by hand (`ckpt-core push`)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.errors import ConfigError, RootBusy
from ckpt_core.layout import RUN_NAME
from ckpt_core.levels.agent.copying import How, Sent, send
from ckpt_core.levels.agent.pace import Backoff, Pace
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.claiming import parsed
from ckpt_core.levels.errands import Progress
from ckpt_core.levels.far.door import Away, Copy, Far
from ckpt_core.levels.far.opening import open_far
from ckpt_core.levels.trainer.joining import read_run
from ckpt_core.options import Level
from ckpt_core.store import check_pins, pinned_steps
from ckpt_core.system.files import Files

PATIENCE_S = 60.0
"""How long a level may fail at everything before it is given up."""

_FIRST_S, _MOST_S = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class Pushed:
    """What came of it.

    Attributes:
        copy: which save it was.
        nbytes: of its files.
        sent: how it ended.
        already: it was whole there before.
    """

    copy: Copy
    nbytes: int
    sent: Sent
    already: bool


def push(
    path: Path,
    level: Level,
    *,
    replace: bool = False,
    progress: Progress,
    patience_s: float = PATIENCE_S,
) -> Pushed:
    """Send a committed step, or a directory of files, verified; a pin and pointers of it go with it.

    Takes no lock. What has come there stays when this is cut short, and is not sent again.

    Args:
        path: of the step in its root.
        replace: also another save of the step that is whole there.
        patience_s: how long the level may be away.

    Raises:
        ConfigError: the level cannot hold steps, or has another save of it, or this user may not read the
            pins of the root; says what to do.
        RootBusy: it holds another run.
        NotCommitted: there is no such step, or it was retired meanwhile.
        CorruptCheckpoint: it is damaged here: nothing of it can be seen there.
        RestoreError: the system refused to read it.
        Away: the level cannot be reached or written to.
    """
    files, root = Files(), path.parent
    with open_far(level.url, files=files) as far, OpenSave(path, files=files) as save:
        if save.copy.directory is None:
            check_pins(root)
        far.check()
        _check_run(far, root)
        pushing = _Pushing(far, save, level, progress, patience_s, replace=replace)
        sent, already = pushing.patiently()
        if sent is Sent.REACHED:
            _follow(root, far, save.copy, files)
        return Pushed(save.copy, save.nbytes, sent, already)


class _Pushing:
    def __init__(
        self,
        far: Far,
        save: OpenSave,
        level: Level,
        progress: Progress,
        patience_s: float,
        *,
        replace: bool,
    ) -> None:
        self._replace = replace
        self._far, self._save, self._level = far, save, level
        self._progress, self._patience_s = progress, patience_s
        self._heard = time.monotonic()

    def patiently(self) -> tuple[Sent, bool]:
        """How it ended, and whether it was there before."""
        backoff = Backoff(first_s=_FIRST_S, most_s=_MOST_S)
        while True:
            try:
                return self._once()
            except Away as exc:
                if exc.hopeless or time.monotonic() - self._heard > self._patience_s:
                    raise
            time.sleep(backoff.failed())

    def _once(self) -> tuple[Sent, bool]:
        copy = self._save.copy
        there = self._far.steps().get(copy.step)
        if copy.directory is not None:
            named = self._far.directories().get(copy.directory)
            there = None if named is None else named.attempt
        if there == copy.attempt:
            return Sent.REACHED, True
        if there is not None and not self._replace:
            raise ConfigError(
                f"{self._far.url} has another save of {copy.target}, {there}, than {copy.attempt}: --force "
                f"replaces it. Nothing was sent",
                path=Path(copy.target),
            )
        how = How(Pace(self._level.bytes_per_s), replaces=there, progress=self._tell)
        return send(self._save, self._far, how), False

    def _tell(self, done: int) -> None:
        self._heard = time.monotonic()
        self._progress(done, self._save.nbytes)


def _check_run(far: Far, root: Path) -> None:
    word = far.read_word(RUN_NAME)
    if word is None:
        return
    mine, theirs = read_run(root), parsed(word).get("run")
    if theirs != mine:
        raise RootBusy(
            f"{far.url} holds another run, {theirs}, than {root}: nothing was sent. Name another place",
            path=root,
        )


def _follow(root: Path, far: Far, copy: Copy, files: Files) -> None:
    """What belongs to a save beside its files: its pin, or the pointers that name it."""
    if copy.directory is None:
        if copy.step in pinned_steps(root):
            far.pin(copy.step, True)
        return
    with open_far(str(root), files=files) as here:
        for pointer, named in here.pointers().items():
            if named == copy.directory:
                far.point(pointer, named)
