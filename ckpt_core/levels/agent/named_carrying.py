"""`NamedCarrier`: takes directories of files to one level, when no step is to be sent there.

    one turn: the directory that the level wants next, whole; else the pointers that may move

A pointer moves once the directory that it is to name is whole there, and never back. Called by `Carrier`, on
its thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ckpt_core.errors import CorruptCheckpoint, UnknownFormat
from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.copying import How, Sent, send
from ckpt_core.levels.agent.precedence import Precedence
from ckpt_core.levels.agent.sent_before import SentBefore
from ckpt_core.levels.agent.source import OpenSave, with_nearest
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Away, Copy, Far
from ckpt_core.levels.named import (
    Named,
    NamedFiles,
    due_pointers,
    newest_directories,
    overtaken,
    wanted_directories,
)
from ckpt_core.options import Level, scheme_of
from ckpt_core.system.files import Files

logger = logging.getLogger(__name__)

Plans = Callable[[Far, Copy], How]
"""How a copy is sent: what may be replaced is left open."""


class NamedCarrier:
    """The directories of files of one level. Opens no connection, and asks the level nothing, without any."""

    def __init__(self, url: str, board: Board, *, files: Files, timing: Timing) -> None:
        self._url, self._board = url, board
        self._files, self._timing = files, timing
        self._sources: dict[Path, NamedFiles] = {}
        self._precedence: Precedence[str] = Precedence()
        self._there: dict[str, Copy] = {}
        self._pointed: dict[str, str] = {}
        self._looked_s = float("-inf")
        self._told: set[Copy] = set()
        self._damaged: set[Copy] = set()
        self._passed: dict[str, str] = {}
        self._before = SentBefore()

    def turn(self, far: Far, level: Level, folders: Sequence[Path], plans: Plans) -> bool:
        """Do what comes first; whether there may be more to do.

        Args:
            folders: where directories come from, the nearest first.

        Raises:
            As `send`.
        """
        here = self._here(folders)
        if not here:
            return False
        try:
            self._look(far)
            there = {name: copy.attempt for name, copy in self._there.items()}
            lesser = self._precedence.lesser(there, far)
            here = [one for one in here if lesser.get(one.name) != one.copy.attempt]
            self._pass_over(overtaken(here, level, there=self._there))
            last = self._board.is_last([one.copy.attempt for one in newest_directories(here)])
            for one in wanted_directories(here, level, there=self._there, last=last):
                self._send(far, one, folders, plans)
                return True
            return self._point(far, here, plans)
        except BaseException:
            self._looked_s = float("-inf")  # what was seen there may have changed meanwhile
            raise

    # -- inside ----------------------------------------------------------------------------------

    def _here(self, folders: Sequence[Path]) -> list[Named]:
        sources, known = [], dict[tuple[str, str], Named]()
        for folder in folders:
            if folder not in self._sources:
                self._sources[folder] = NamedFiles(DirectoryFar(folder, files=self._files))
            source, looked = self._sources[folder], tuple[Named, ...]()
            with suppress(Away):  # told by its own carrier
                looked = source.look()
            sources.append((source.far, {one.name: one.copy.attempt for one in looked}))
            # The pointers of the nearest count.
            known = {(one.name, one.copy.attempt): one for one in looked} | known
        counts = self._precedence.merge(sources)
        found = [known[one] for one in counts.items()]
        for one in found:
            if not one.here and one.copy not in self._told:
                self._told.add(one.copy)
                text = "%s does not go to %s: other nodes have a part of it in roots of their own"
                logger.warning(text, one.name, self._url)
        return [one for one in found if one.copy not in self._damaged]

    def _look(self, far: Far) -> None:
        is_cheap = scheme_of(self._url) is None
        age_s = time.monotonic() - self._looked_s
        if age_s >= (self._timing.others_s if is_cheap else self._timing.look_s):
            self._there, self._pointed = far.directories(), far.pointers()
            self._looked_s = time.monotonic()
            self._tell()

    def _send(self, far: Far, one: Named, folders: Sequence[Path], plans: Plans) -> None:
        present = self._there.get(one.name)
        how = replace(
            plans(far, one.copy),
            replaces=None if present is None else present.attempt,
            before=self._before,
        )
        try:
            with_nearest(
                folders, one.copy, lambda save: self._carry(far, save, how), files=self._files
            )
        except (CorruptCheckpoint, UnknownFormat) as damage:
            self._damaged.add(one.copy)
            text = f"{one.name} is damaged and was not sent to {self._url}: {damage}"
            logger.error("%s", text)
            with self._board.change(self._url) as status:
                status.problem, status.since_s = text, time.time()

    def _carry(self, far: Far, save: OpenSave, how: How) -> None:
        began = time.monotonic()
        with self._board.change(self._url) as status:
            status.begins(save.copy.step, save.nbytes)
        try:
            sent = send(save, far, how)
        finally:
            with self._board.change(self._url) as status:
                status.busy_s += time.monotonic() - began
        if sent is Sent.REACHED:
            self._there[save.copy.target] = save.copy
            logger.info("%s: %s is there", self._url, save.copy.target)
        else:
            self._looked_s = float("-inf")
        self._board.moved()
        with self._board.change(self._url) as status:
            status.rests()
        self._tell()

    def _point(self, far: Far, here: Sequence[Named], plans: Plans) -> bool:
        due = due_pointers(here, there=self._there, pointed=self._pointed)
        for pointer, name in due.items():
            plans(far, self._there[name]).may_publish()
            far.point(pointer, name)
            self._pointed[pointer] = name
            logger.info("%s: %s names %s", self._url, pointer, name)
            self._board.moved()
        return bool(due)

    def _pass_over(self, overtaken: dict[str, str]) -> None:
        passed = {one.target: one.attempt for one in self._damaged} | overtaken
        if passed != self._passed:
            self._passed = passed
            self._tell()

    def _tell(self) -> None:
        with self._board.change(self._url) as status:
            status.files = {name: copy.attempt for name, copy in self._there.items()}
            status.files_skipped = self._passed
