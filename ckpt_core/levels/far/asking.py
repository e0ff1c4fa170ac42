"""Who may ask a store without its client: where it is, and what a request of our own is signed with.

The client says nothing of its credentials. Keys that lie in the environment or in a file are read there; of
roles, botocore and google-auth know how to ask, where they are installed.
"""

from __future__ import annotations

import html
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpt_core.levels.far.clients import endpoint, is_set, peer_settings, s3_settings, split
from ckpt_core.levels.signing import Sign, signer
from ckpt_core.options import PEER
from ckpt_core.system.threads import own_lock

logger = logging.getLogger(__name__)

_GOOGLE = "https://storage.googleapis.com"
_ASKED_S = 10.0
"""For the place of a role."""

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True)
class Asking:
    """How a store is asked.

    Attributes:
        home: scheme and host, and a path if it has one; no slash at its end.
        sign: makes the headers of a request; raises OSError where credentials have ended and none come.
    """

    home: str
    sign: Sign


def asking(url: str) -> Asking | None:
    """That of a level; None where its store cannot be asked.

    Raises:
        ConfigError: a peer's token is not there.
    """
    scheme = split(url)[0]
    found = _OF[scheme](url) if scheme in _OF else None
    return None if found is None else Asking(found.home.rstrip("/"), found.sign)


def field(text: str, name: str) -> str:
    """What an answer in XML says of something, the first time. Raises ValueError: nothing."""
    found = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    if found is None:
        raise ValueError(name)
    return html.unescape(found[1])


def _peer(url: str) -> Asking:
    return Asking(endpoint(url), signer(peer_settings()))


def _s3(url: str) -> Asking | None:
    settings = s3_settings()
    home = endpoint(url) or f"https://s3.{settings['region']}.amazonaws.com"
    if is_set("AWS_SKIP_SIGNATURE"):
        return Asking(home, _unsigned)
    if "access_key_id" in settings:
        return Asking(home, signer(settings))
    role = _asked_of("botocore", _role)
    if role is None:
        return None
    # What it gives is asked for at each request: it ends while a large file is on its way.
    return Asking(home, lambda *asked: signer(settings | _keys_of(role))(*asked))


def _unsigned(method: str, url: str, content: str) -> dict[str, str]:
    return {}


def _google(url: str) -> Asking | None:
    info = _service_account()
    home = endpoint(url) or info.get("gcs_base_url") or _GOOGLE
    if info.get("disable_oauth"):
        return Asking(home, _unsigned)
    keys = _asked_of("google.auth", lambda: _google_keys(info))
    if keys is None:
        return None
    one_at_a_time = own_lock()

    def sign(method: str, url: str, content: str) -> dict[str, str]:
        with one_at_a_time:
            _refresh(keys)
        return {"authorization": f"Bearer {keys.token}"}

    return Asking(home, sign)


_OF: dict[str, Callable[[str], Asking | None]] = {PEER: _peer, "s3": _s3, "gs": _google}


def _service_account() -> dict[str, Any]:
    """As the client finds it; {}: there is none."""
    for name in (
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
    ):
        said = os.environ.get(name)
        if said:
            text = said if name.endswith("_KEY") else Path(said).read_text()
            found = json.loads(text)
            return found if isinstance(found, dict) else {}
    return {}


def _google_keys(info: Mapping[str, Any]) -> Any:
    if info:
        account = import_module("google.oauth2.service_account")
        keys = account.Credentials.from_service_account_info(info, scopes=[_SCOPE])
    else:
        keys, _ = import_module("google.auth").default(scopes=[_SCOPE])
    _refresh(keys)
    return keys


def _refresh(keys: Any) -> None:
    """Have a token that is good. Raises OSError."""
    if keys.valid:
        return
    request = import_module("google.auth.transport.requests").Request()
    patient: Any = partial(request, timeout=_ASKED_S)
    # For certificates of the place where machines are told their role.
    patient.session = request.session
    try:
        keys.refresh(patient)
    except Exception as exc:  # whatever the place of a role does; its text may hold a secret
        raise OSError(f"no token: {type(exc).__name__}") from None


def _role() -> Any:
    session = import_module("botocore.session").get_session()
    config = import_module("botocore.config").Config
    once = {"max_attempts": 0}
    session.set_default_client_config(
        config(connect_timeout=_ASKED_S / 2, read_timeout=_ASKED_S, retries=once)
    )
    found = session.get_credentials()
    return None if found is None or not _keys_of(found) else found


def _keys_of(role: Any) -> dict[str, str]:
    """Those of now. Raises OSError."""
    try:
        keys = role.get_frozen_credentials()
    except Exception as exc:  # likewise
        raise OSError(f"no keys: {type(exc).__name__}") from None
    if keys is None:
        return {}
    token = {"session_token": keys.token} if keys.token else {}
    return {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key, **token}


def _asked_of(package: str, ask: Callable[[], Any]) -> Any:
    """None: there are no credentials, or nobody here can ask for them."""
    try:
        return ask() if importlib.util.find_spec(package) is not None else None
    except Exception as exc:  # whatever the place of a role does; its text may hold a secret
        logger.debug("no credentials from %s: %s", package, type(exc).__name__)
        return None
