"""`Level`: one more root that committed steps are taken to, and what a user says of it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.units import known_names, parse_bytes

PEER = "peer"
"""The scheme of another node, which serves a directory of its own: `ckpt-core serve`."""

SCHEMES = ("s3", "gs", "az", PEER)
"""Object stores, as the beginning of a URL names them; a peer speaks as one."""

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_PEER = re.compile(
    r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):([0-9]{1,5})/([^/.][^/]*)(/.*)?", re.ASCII | re.DOTALL
)
_SIGNED = re.compile(r"\?.*(sig|signature|token|credential|key|secret)[^/&=]*=", re.IGNORECASE)
"""A query as signed URLs have it, pasted with the place."""


@dataclass(frozen=True, slots=True)
class Level:
    """One more root: a directory, or a place in an object store.

    Committed steps are taken to it behind training, by a process of its own. It has the format of every root.

    Attributes:
        url: a directory; or "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix"; or
            "peer://host:port/name", a node where `ckpt-core serve` runs. Credentials are no part of it: they
            come from the environment, as the store's own tools take them.
        every: steps that are multiples of it go there; so does the last step of a run.
        keep_last: newest steps to keep there; None keeps all.
        keep_every: steps that are multiples of this are kept there for ever; None keeps none of them.
        bandwidth: most bytes for each second that this machine sends there, as 200_000_000 or "200MB"
            (or "200MB/s"); None: no bound.
        backlog: steps that this level still wants and that are kept for it where they are, although they
            would be retired. What is behind more than that is passed over, newest first.
    """

    url: str
    every: int = 1
    keep_last: int | None = 2
    keep_every: int | None = None
    bandwidth: int | str | None = None
    backlog: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url(self.url))
        for name in ("every", "backlog"):
            _check_count(name, getattr(self, name))
        for name in ("keep_last", "keep_every"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.bandwidth is not None:
            object.__setattr__(self, "bandwidth", _checked_bandwidth(self.bandwidth))

    @property
    def scheme(self) -> str | None:
        """That of an object store; None for a directory."""
        return scheme_of(self.url)

    @property
    def bytes_per_s(self) -> int | None:
        """`bandwidth` in bytes for each second."""
        assert not isinstance(self.bandwidth, str)
        return self.bandwidth

    def to_json(self) -> dict[str, Any]:
        """What `parse` takes."""
        return dataclasses.asdict(self)


def scheme_of(url: str | os.PathLike[str]) -> str | None:
    """The scheme of a URL, in lower case; None for a path."""
    match = _URL.fullmatch(os.fspath(url))
    return None if match is None else match[1].lower()


def parse_levels(value: object) -> tuple[Level, ...]:
    """Levels as users give them: a sequence of `Level`s, mappings of its fields, or URLs; or JSON of it.

    Raises:
        ConfigError: names the level and the field.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as exc:
            raise ConfigError(
                f"levels={value!r} is no JSON: write it like "
                '[{"url": "s3://bucket/run", "every": 100}]'
            ) from exc
    if not isinstance(value, Sequence):
        raise ConfigError(
            f"levels={value!r} is no list of levels: give ckpt_core.Level(...) in a list"
        )
    levels = tuple([_level(one, number) for number, one in enumerate(value, 1)])
    urls = [level.url for level in levels]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"levels: {url} is given twice: give each level once")
    return levels


def _level(value: object, number: int) -> Level:
    if isinstance(value, Level):
        return value
    try:
        if isinstance(value, str | os.PathLike):
            return Level(os.fspath(value))
        if isinstance(value, Mapping):
            known = [field.name for field in dataclasses.fields(Level)]
            for name in value:
                if name not in known:
                    raise ConfigError(
                        f"{name!r} is no field of a level: {known_names(name, known)}"
                    )
            if "url" not in value:
                raise ConfigError(
                    "url is missing: name a directory, or a place like s3://bucket/run"
                )
            return Level(**value)
    except ConfigError as exc:
        raise ConfigError(f"levels: number {number}: {exc}") from exc
    raise ConfigError(
        f"levels: number {number}: {value!r} is no level: give ckpt_core.Level(url, ...)"
    )


def _checked_url(url: object) -> str:
    if not isinstance(url, str | os.PathLike) or not os.fspath(url):
        raise ConfigError(f"url={url!r} is no place: name a directory, or one like s3://bucket/run")
    text = str(os.fspath(url))
    match = _URL.fullmatch(text)
    if match is None:
        # The loop may change its working directory before anything goes there.
        return os.path.abspath(os.path.expanduser(text))
    scheme, rest = match[1].lower(), match[2].rstrip("/")
    if scheme == "file":
        return os.path.abspath("/" + rest.lstrip("/"))
    place = rest.split("/", 1)[0]
    if "@" in place or _SIGNED.search(rest):
        # Not repeated: what stands before the @, or is signed, may be a secret.
        raise ConfigError(f"url={scheme}://... holds credentials: give them by the environment")
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"url={text!r} has an unknown scheme: known are {known} and directories")
    if not place:
        raise ConfigError(f"url={text!r} names no bucket: write it like {scheme}://bucket/run")
    if scheme == PEER and not _is_peer(rest):
        raise ConfigError(
            f"url={text!r} is no place at a peer: write it like peer://node-b:7070/run"
        )
    return f"{scheme}://{rest}"


def _is_peer(rest: str) -> bool:
    found = _PEER.fullmatch(rest)
    names = rest.split("/")[1:]
    return found is not None and 0 < int(found[2]) < 65536 and not {"", ".", ".."} & {*names}


def _checked_bandwidth(value: object) -> int:
    if isinstance(value, str):
        value = value.strip().removesuffix("/s")
    size = parse_bytes(value, field="bandwidth")  # type: ignore[arg-type]
    if size == 0:
        raise ConfigError("bandwidth=0 lets nothing through: give bytes for each second, or None")
    return size


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an int of at least 1")
