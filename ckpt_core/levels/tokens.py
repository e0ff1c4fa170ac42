"""The token that the nodes of a job share, and the keys that are made of it.

It lies in a file on each node that its owner alone may read. Requests are signed with a key made of it; the
token and the key are never sent, logged, or part of a URL or an error.
"""

from __future__ import annotations

import hmac
import os
import stat
from dataclasses import dataclass, field

from ckpt_core.errors import ConfigError

TOKEN_VARIABLE = "CKPT_PEER_TOKEN_FILE"
"""Names the file, in the environment of whoever reads or writes at a peer."""

PEER_BUCKET, PEER_REGION = "steps", "us-east-1"
"""All that a peer keeps is in one bucket, in a region that only its clients care about."""

_LEAST, _MOST = 32, 4096
_HOW = "(umask 077; head -c 32 /dev/urandom | base64 > {}) makes one; copy it to each node"


@dataclass(frozen=True)
class Keys:
    """What a request is signed with.

    Attributes:
        access_key_id: says which token is meant; may be known.
        secret_access_key: may not.
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)


def read_keys(path: str | os.PathLike[str]) -> Keys:
    """The keys of the token in a file.

    Raises:
        ConfigError: names the file, and what to do.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb", opener=_opener) as file:
            found = os.fstat(file.fileno())
            token = file.read(_MOST + 1).strip() if stat.S_ISREG(found.st_mode) else b""
    except OSError as exc:
        text = f"the token's file {name} cannot be read: {exc.strerror or exc}"
        raise ConfigError(f"{text}: {_HOW.format(name)}") from None
    if found.st_mode & 0o077:
        raise ConfigError(f"others can read the token's file {name}: chmod 600 {name}")
    if not _LEAST <= len(token) <= _MOST:
        text = f"the token's file {name} holds no token of {_LEAST} to {_MOST} characters"
        raise ConfigError(f"{text}: {_HOW.format(name)}")
    access, secret = (_derived(token, use) for use in ("access key", "secret key"))
    return Keys(access[:20].upper(), secret)


def _derived(token: bytes, use: str) -> str:
    return hmac.digest(token, f"ckpt-core peer, {use}".encode(), "sha256").hex()


def _opener(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)  # a pipe would wait for a writer
