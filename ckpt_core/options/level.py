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
from ckpt_core.options.addresses import absolute
from ckpt_core.units import known_names, parse_bytes, parse_count

PEER = "peer"
"""The scheme of another node, which serves a directory of its own: `ckpt-core serve`."""

PEERS = "peers"
"""What stands for a URL where the nodes of the job keep one another's steps: where that is, they find out."""

PARITY = "parity"
"""Likewise, where they keep parity; and the scheme of what is rebuilt from it."""

SCHEMES = ("s3", "gs", "az", PEER)
"""Object stores, as the beginning of a URL names them; a peer speaks as one."""

_MEANT = {
    **{"gcs": "gs", "azure": "az", "s3a": "s3", "s3n": "s3"},
    **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs"), "az"),
}
"""Schemes as other programs write them -> what they are here."""

_COLLAPSED = re.compile(rf"({'|'.join([*SCHEMES, *_MEANT])}|file(?=:/)):/?(?!/)", re.IGNORECASE)

_OF_NODES = ("bind", "dir", "domain")
_OF_PEERS = ("peers", "parity", *_OF_NODES)
_SHAPE = re.compile(r"([1-9][0-9]{0,3})\+([1-9][0-9]{0,3})", re.ASCII)
_SHAPE_K, _SHAPE_M = range(2, 17), range(1, 3)

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_PEER = re.compile(
    r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):([0-9]{1,5})/([^/.][^/]*)(/.*)?", re.ASCII | re.DOTALL
)
_NO_NAMES = frozenset(("", ".", ".."))
"""Clients resolve them, or refuse them: what would be at one place is looked for at another."""

_THIS_MACHINE = re.compile(r"\Alocalhost(?=/)", re.IGNORECASE)
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
        every: steps that are multiples of it go there; so does the last step of a run. Leave it at 1 with
            `Auto` and `EverySeconds`, whose steps are multiples of nothing.
        keep_last: newest steps to keep there; None keeps all.
        keep_every: steps that are multiples of this are kept there for ever; None keeps none of them.
        bandwidth: most bytes for each second that this machine sends there, as 200_000_000 or "200MB"
            (or "200MB/s"); None: no bound.
        backlog: steps that this level still wants and that are kept for it where they are, although they
            would be retired. What is behind more than that is passed over, newest first.
        peers: 1, without a `url`: each node keeps a copy of another one's steps. The last three go with it.
        parity: "k+1" or "k+2", k from 2 to 16, without a `url`: groups of k+1 (k+2) nodes keep parity of one
            another's steps, so that any one (two) of a group may be lost. The other three go with it.
        bind: where this node listens for the others: an address of it, or the name of a network interface,
            and a port: "ib0:7077". With port 0 the system chooses one.
        dir: where this node keeps the copies of others, or parity. Made if it is not there.
        domain: what fails together with this node (a rack, a switch): its copy lies with another domain, if
            there is room for that. None: this node alone.
    """

    url: str = ""
    every: int = 1
    keep_last: int | None = 2
    keep_every: int | None = None
    bandwidth: int | str | None = None
    backlog: int = 1
    peers: int | None = None
    bind: str | None = None
    dir: str | os.PathLike[str] | None = None
    domain: str | None = None
    parity: str | None = None

    def __post_init__(self) -> None:
        if self.parity is not None:
            self._check_parity()
        elif self.peers is None:
            object.__setattr__(self, "url", _checked_url(self.url))
        else:
            if self.url not in ("", PEERS):
                raise ConfigError(f"url={self.url!r} and peers={self.peers!r}: give one of them")
            _check_peers(self)
            object.__setattr__(self, "url", PEERS)
            object.__setattr__(self, "dir", at_home(self.dir))
        try:
            self._check_rest()
        except ConfigError as exc:
            raise ConfigError(f"level {self.url}: {exc}") from exc

    def _check_rest(self) -> None:
        if not self.of_nodes:
            _check_alone(self)
        for name in ("every", "backlog", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None or name in ("every", "backlog"):
                object.__setattr__(self, name, parse_count(value, field=name))
        if self.bandwidth is not None:
            object.__setattr__(self, "bandwidth", _checked_bandwidth(self.bandwidth))

    def _check_parity(self) -> None:
        # A URL is what a plan has, once the nodes have met.
        is_place = self.url in ("", PARITY) or scheme_of(self.url) == PARITY
        if self.peers is not None or not is_place:
            other = f"peers={self.peers!r}" if self.peers is not None else f"url={self.url!r}"
            raise ConfigError(f"parity={self.parity!r} and {other}: give one of them")
        _check_shape(self.parity)
        _check_nodes(self, f"parity={self.parity!r}")
        object.__setattr__(self, "url", self.url or PARITY)
        object.__setattr__(self, "dir", at_home(self.dir))

    @property
    def of_nodes(self) -> bool:
        """Whether the nodes of the job keep one another's steps, whole or as parity."""
        return self.peers is not None or self.parity is not None

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
        """What `parse_levels` takes."""
        found = dataclasses.asdict(self)
        if self.peers is not None:
            return {name: value for name, value in found.items() if name not in ("url", "parity")}
        if self.parity is not None:
            return {name: value for name, value in found.items() if name != "peers"}
        return {name: value for name, value in found.items() if name not in _OF_PEERS}

    def for_all(self) -> dict[str, Any]:
        """What of it all nodes have to give alike."""
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if name not in _OF_NODES}


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
        except (ValueError, RecursionError) as exc:
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
                        f"{name!r} is no field of a level: {known_names(str(name), known)}"
                    )
            if not value.keys() & {"url", "peers", "parity"}:
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
        check_collapsed(text, "url")
        # The loop may change its working directory before anything goes there.
        return at_home(text)
    scheme, rest = match[1].lower(), match[2].rstrip("/")
    if scheme == "file":
        # This machine by its name, or by none; "file://tmp/run" has always been /tmp/run.
        return absolute("/" + _THIS_MACHINE.sub("", rest).lstrip("/"))
    place = rest.split("/", 1)[0]
    # Not repeated: what stands before an @, or is signed, may be a secret.
    is_secret = "@" in place or _SIGNED.search(rest) is not None
    if scheme in _MEANT:
        shown = f"{scheme}://..." if is_secret else text
        raise ConfigError(f"url={shown!r} has an unknown scheme: {_did_you_mean(_MEANT[scheme])}")
    if is_secret:
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
    wrong = next((name for name in rest.split("/") if name in _NO_NAMES), None)
    if wrong is not None:
        raise ConfigError(
            f"url={text!r} has {wrong!r} between its slashes, as no place in a store has: write it like "
            f"{scheme}://bucket/run"
        )
    return f"{scheme}://{rest}"


def check_collapsed(text: str, field: str) -> None:
    """Refuse a URL of which `pathlib` has made a path, or that is mistyped: it would become a directory.

    Raises:
        ConfigError: says how to write it.
    """
    found = _COLLAPSED.match(text)
    if found is not None:
        scheme = found[1].lower()
        meant = f"{scheme}://{'/' * (scheme == 'file')}{text[found.end() :]}"
        raise ConfigError(
            f"{field}={text!r} is the name of a directory, and looks like {meant}: give that as text, not as "
            f"a Path; the directory of that name is {absolute(text)}"
        )


def _did_you_mean(scheme: str) -> str:
    if scheme == "az":
        return "did you mean az://container/run, and AZURE_STORAGE_ACCOUNT_NAME for the account?"
    return f"did you mean {scheme}://bucket/run?"


def at_home(path: str | os.PathLike[str] | None) -> str:
    """As `absolute`; "~" is the home."""
    return absolute(os.path.expanduser(os.fspath(path or "")))


def _is_peer(rest: str) -> bool:
    found = _PEER.fullmatch(rest)
    names = rest.split("/")[1:]
    return found is not None and 0 < int(found[2]) < 65536 and not _NO_NAMES & {*names}


def _check_alone(level: Level) -> None:
    for name in _OF_NODES:
        if getattr(level, name) is not None:
            raise ConfigError(
                f"{name}={getattr(level, name)!r} goes with peers=1 or parity, not with a url: leave one of "
                f"them out"
            )


def _check_peers(level: Level) -> None:
    if type(level.peers) is not int or level.peers != 1:
        raise ConfigError(
            f"peers={level.peers!r}: one copy on one other node is what there is: peers=1"
        )
    _check_nodes(level, "peers=1")


def read_shape(value: object) -> tuple[int, int] | None:
    """Of "k+m": how many nodes' worth of data a group has, and of parity; None: it does not say."""
    found = _SHAPE.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def parity_shape(value: object) -> tuple[int, int] | None:
    """The same of a shape that groups can have; None: they cannot."""
    found = read_shape(value)
    if found is None or found[0] not in _SHAPE_K or found[1] not in _SHAPE_M:
        return None
    return found


def _check_shape(value: object) -> None:
    if parity_shape(value) is None:
        raise ConfigError(
            f"parity={value!r} is no shape of groups: write it like '4+1' (of 5 nodes any one may be lost) "
            f"or '4+2' (of 6 any two), with 2 to 16 before the plus"
        )


def _check_nodes(level: Level, what: str) -> None:
    if not isinstance(level.bind, str) or not level.bind:
        raise ConfigError(
            f"bind={level.bind!r} is no address: {what} has this node listen for the others. Name an "
            f'address or an interface of it, on the network between the nodes, and a port: bind="ib0:7077"'
        )
    folder: object = level.dir
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ConfigError(
            f"dir={level.dir!r} is no directory: name one in which this node keeps copies of others, "
            f"or parity"
        )
    if scheme_of(folder) is not None:
        raise ConfigError(f"dir={level.dir!r} is a URL: name a directory of this node")
    domain: object = level.domain
    if domain is not None and (not isinstance(domain, str) or not domain):
        raise ConfigError(f"domain={level.domain!r} is no name: give one like 'rack-7', or None")


def _checked_bandwidth(value: object) -> int:
    if isinstance(value, str):
        value = value.strip().removesuffix("/s")
    size = parse_bytes(value, field="bandwidth")  # type: ignore[arg-type]
    if size == 0:
        raise ConfigError("bandwidth=0 lets nothing through: give bytes for each second, or None")
    return size
