"""`Precedence`: which save of a step is sent, where a root and the levels hold several.

    found = precedence.merge([(root, its saves), (nearest directory, its saves), ...])
    lesser = precedence.lesser(there, far)       those of `found` that leave the level's own save as it is

Idea: what the root holds was saved there, or training has gone on from it, and goes before all else. A level
that was left out for a while holds saves that the run has gone back behind: of those that levels alone hold
the one that was made last counts, and it takes the place of another only where their manifests say that it is
later. What cannot be told stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from ckpt_core.errors import CkptError
from ckpt_core.layout import MANIFEST_NAME, Manifest
from ckpt_core.levels.far.door import Away, Readable
from ckpt_core.types import step_dir_name

Key = TypeVar("Key", bound=int | str)
"""The number of a step, or the name of a directory of files."""
_Held = tuple[str, Readable]
"""The attempt of a save, and what holds it."""


class Precedence(Generic[Key]):
    """What is sent to one level. For one thread."""

    def __init__(self) -> None:
        self._found: dict[Key, str] = {}
        self._places: dict[Key, Readable] = {}
        self._made_unix_s: dict[str, float] = {}

    def merge(self, sources: Sequence[tuple[Readable, Mapping[Key, str]]]) -> dict[Key, str]:
        """The saves that count, with their attempts.

        Args:
            sources: the root, then the directories before the level, the nearest first.
        """
        (_, root), *others = sources
        self._found, self._places = dict(root), {}
        for place, saves in others:
            for key, attempt in saves.items():
                if key not in root and self._counts(key, attempt, place):
                    self._found[key], self._places[key] = attempt, place
        return dict(self._found)

    def lesser(self, there: Mapping[Key, str], far: Readable) -> dict[Key, str]:
        """Saves of `merge` that are not sent: another one is in their place, which may well be the later.

        Args:
            there: what is whole at the level.

        Raises:
            Away: the level does not say when that was made.
        """
        return {
            key: self._found[key]
            for key, place in self._places.items()
            if there.get(key, self._found[key]) != self._found[key]
            and not self._is_later(key, (self._found[key], place), (there[key], far))
        }

    # -- inside ----------------------------------------------------------------------------------

    def _counts(self, key: Key, attempt: str, place: Readable) -> bool:
        """Whether a save of a directory goes before what has been found in nearer ones."""
        if key not in self._found:
            return True
        nearer = self._found[key], self._places[key]
        with suppress(Away):  # told of by its own carrier
            return attempt != nearer[0] and self._is_later(key, (attempt, place), nearer)
        return False

    def _is_later(self, key: Key, mine: _Held, other: _Held) -> bool:
        """Whether a save of a directory is known to be later than another one.

        Raises:
            Away: what holds the other one does not say.
        """
        mine_s = None
        with suppress(Away):  # as above
            mine_s = self._made(key, *mine)
        other_s = None if mine_s is None else self._made(key, *other)
        return mine_s is not None and other_s is not None and mine_s > other_s

    def _made(self, key: Key, attempt: str, place: Readable) -> float | None:
        """When a save was made, as its manifest has it; None: that cannot be told."""
        if attempt not in self._made_unix_s:
            target = key if isinstance(key, str) else step_dir_name(key)
            data = place.manifest(target)
            with suppress(CkptError):
                manifest = Manifest.decode(data or b"", path=Path(target, MANIFEST_NAME))
                if manifest.attempt == attempt:
                    self._made_unix_s[attempt] = manifest.created_unix_s
        return self._made_unix_s.get(attempt)
