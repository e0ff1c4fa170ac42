"""What may lie in the place of a manifest in an object store, and in a directory that is served as one."""

from __future__ import annotations

import json
from collections.abc import Iterable

_START = b'{"retired"'


def retired_mark(folders: Iterable[str]) -> bytes:
    """Put in the place of the manifest of a step that is taken away: it names the folders of its attempts."""
    return json.dumps({"retired": list(folders)}).encode()


def retired_in(data: bytes) -> tuple[str, ...]:
    """The folders that a mark names; () when it is none."""
    return tuple(map(str, json.loads(data)["retired"])) if data.startswith(_START) else ()
