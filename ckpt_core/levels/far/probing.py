"""Whether an object store can hold a level: asked with a key of our own, before a run relies on it."""

from __future__ import annotations

import contextlib
from uuid import uuid4

from ckpt_core.errors import ConfigError
from ckpt_core.layout import MANIFEST_NAME, RUN_NAME
from ckpt_core.levels.far.bucket import CREATE, Bucket, Refused
from ckpt_core.levels.far.door import Away
from ckpt_core.types import parse_step_dir

_REQUEST_S = 4.0
_RETRIES = 1


def probe(url: str) -> None:
    """Write, read, list and delete a small object there, and see that conditions are honoured.

    Leaves nothing behind, unless it is cut off.

    Raises:
        ConfigError: it cannot hold a level before somebody does something, or is a step, by its name alone,
            or lies within one; says what.
        Away: it cannot be told now: it does not answer, or is out of order.
    """
    bucket = Bucket(url, request_s=_REQUEST_S, retries=_RETRIES)
    key = f".probe-{uuid4().hex[:12]}"
    try:
        _check_outside(url)
        problem = _problem(bucket, key)
    except Away as exc:
        if not exc.hopeless:
            raise
        problem = str(exc)
    else:
        problem = problem and f"{url}: {problem}"
    if problem:
        with contextlib.suppress(Away):
            bucket.delete([key])
        raise ConfigError(problem)


def _check_outside(url: str) -> None:
    """As for a directory (`check_layout`): readers would take the level for a step, or never see it."""
    parts = url.split("/")
    for number, name in enumerate(parts[3:], 3):
        place = "/".join(parts[:number])
        if parse_step_dir(name) is None:
            continue
        if number == len(parts) - 1:
            raise ConfigError(
                f"{url} has the name of a step: name the root, {place}, or another place. Nothing was written"
            )
        if _is_in_root(place, name):
            raise ConfigError(
                f"{url} lies within {place}/{name}, a step of the root {place}: name that root, or a place "
                f"outside it. Nothing was written"
            )


def _is_in_root(place: str, name: str) -> bool:
    bucket = Bucket(place, request_s=_REQUEST_S, retries=_RETRIES)
    return any(bucket.size(key) is not None for key in (RUN_NAME, f"{name}/{MANIFEST_NAME}"))


def _problem(bucket: Bucket, key: str) -> str:
    """What is wrong; "" when nothing is."""
    first = bucket.put(key, b"first", over=CREATE)
    found = bucket.get(key)
    if found is None or found[0] != b"first":
        return "what was written is not what is read back: use another store"
    if bytes(bucket.read(key, 1, 3)) != b"irs":
        return "ranges are not read as they are asked for: use another store"
    if not _refuses(bucket, key, CREATE):
        return _ignored("If-None-Match")
    bucket.put(key, b"second", over=first)
    if not _refuses(bucket, key, first):
        return _ignored("If-Match")
    bucket.look()
    bucket.delete([key])
    if bucket.size(key) is not None:
        return "what was deleted is still there: use another store"
    return ""


def _refuses(bucket: Bucket, key: str, over: dict[str, str]) -> bool:
    try:
        bucket.put(key, b"other", over=over)
    except Refused:
        return True
    return False


def _ignored(header: str) -> str:
    return (
        f"the server accepts conditions and ignores them ({header} on PUT), so two agents could overwrite "
        "one another's steps: use a server that honours them"
    )
