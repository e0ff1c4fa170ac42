"""What is in the places of manifests in an object store: nothing, a copy, or the mark of one taken away."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_core.errors import CorruptCheckpoint, UnknownFormat
from ckpt_core.layout import MANIFEST_NAME, Manifest, retired_in
from ckpt_core.levels.far.bucket import Bucket, Unchanged, Version
from ckpt_core.levels.far.door import Copy
from ckpt_core.types import parse_step_dir

logger = logging.getLogger(__name__)

_MARK_HOLDS_S = 60.0


@dataclass(frozen=True)
class ManifestPlace:
    """What is in a manifest's place, as it was last seen.

    Attributes:
        version: which writing of it; None: nothing is there.
        copy: what is whole there; None: nothing that can be understood.
        gone: attempts (hex digits) whose files have been, or are being, taken away.
    """

    version: Version | None
    copy: Copy | None = None
    gone: tuple[str, ...] = ()
    seen_s: float = field(default_factory=time.monotonic)


class ManifestPlaces:
    """Those of one level, each remembered as it was last seen. Thread-safe."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._known: dict[str, ManifestPlace] = {}

    def at(self, target: str, *, anew: bool = False) -> ManifestPlace:
        """What is in a manifest's place, by key; asked only whether it has changed, where that will do."""
        known = None if anew else self._known.get(target)
        if known and known.gone and time.monotonic() < known.seen_s + _MARK_HOLDS_S:
            return known
        try:
            version = known.version if known else None
            found = self._bucket.get(manifest_key(target), unless=version)
        except Unchanged:
            assert known is not None
            return known
        place = ManifestPlace(None) if found is None else self.understood(target, *found)
        self._known[target] = place
        return place

    def understood(self, target: str, data: bytes, version: Version) -> ManifestPlace:
        """What these bytes say that were read there."""
        gone = retired_in(data)
        if gone:
            return ManifestPlace(version, gone=gone)
        try:
            manifest = Manifest.decode(data, path=Path(target) / MANIFEST_NAME)
        except (CorruptCheckpoint, UnknownFormat) as exc:
            logger.warning("%s: %s is left out: %s", self._bucket.url, target, exc)
            return ManifestPlace(version)
        step = parse_step_dir(target)
        if (manifest.directory is None) != (step is not None) or step not in (None, manifest.step):
            text = "%s: %s is left out: it holds another's manifest"
            logger.warning(text, self._bucket.url, target)
            return ManifestPlace(version)
        directory = None if step is not None else target
        return ManifestPlace(version, Copy(manifest.step, manifest.attempt, directory))

    def forget(self, target: str) -> None:
        """It has been written."""
        self._known.pop(target, None)

    def keep(self, targets: Collection[str]) -> None:
        """Forget all others."""
        # A copy of it: other threads write.
        self._known = {name: one for name, one in dict(self._known).items() if name in targets}


def manifest_key(target: str) -> str:
    """Where the manifest of a step or directory lies."""
    return f"{target}/{MANIFEST_NAME}"


def may_publish(place: ManifestPlace, copy: Copy, replaces: str | None) -> bool:
    """Whether this copy may be put there.

    Args:
        replaces: attempt that it takes the place of; its own one: also of a mark that this copy was retired,
            where nobody else sends or deletes; None: of none.
    """
    if place.copy is not None:
        return place.copy.attempt == replaces
    # Nothing is there, or the mark of others; never over what cannot be understood.
    if place.version is None:
        return True
    return bool(place.gone) and (copy.folder not in place.gone or replaces == copy.attempt)
