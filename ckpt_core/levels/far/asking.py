"""Who may ask a store without its client: where it is, and what a request of our own is signed with.

The client says nothing of its credentials. Keys that lie in the environment or in a file are read there; of
roles, botocore and google-auth know how to ask, where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpt_core.levels.far.clients import endpoint, peer_settings, s3_settings, split
from ckpt_core.levels.signing import Sign, signer
from ckpt_core.options import PEER

logger = logging.getLogger(__name__)

_GOOGLE = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True)
class Asking:
    """How a store is asked.

    Attributes:
        home: scheme and host, and a path if it has one; no slash at its end.
        sign: makes the headers of a request.
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


def _peer(url: str) -> Asking:
    return Asking(endpoint(url), signer(peer_settings()))


def _s3(url: str) -> Asking | None:
    settings = s3_settings()
    if "access_key_id" not in settings:
        settings |= _asked_of("botocore", _keys_of_a_role) or {}
    if "access_key_id" not in settings:
        return None
    return Asking(
        endpoint(url) or f"https://s3.{settings['region']}.amazonaws.com", signer(settings)
    )


def _google(url: str) -> Asking | None:
    info = _service_account()
    if info.get("disable_oauth"):
        return Asking(endpoint(url) or _GOOGLE, lambda method, url, content: {})
    token = _asked_of("google.auth", lambda: _google_token(info))
    if not token:
        return None
    headers = {"authorization": f"Bearer {token}"}
    return Asking(endpoint(url) or _GOOGLE, lambda method, url, content: headers)


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


def _google_token(info: Mapping[str, Any]) -> str:
    if info:
        account = import_module("google.oauth2.service_account")
        keys = account.Credentials.from_service_account_info(info, scopes=[_SCOPE])
    else:
        keys, _ = import_module("google.auth").default(scopes=[_SCOPE])
    keys.refresh(import_module("google.auth.transport.requests").Request())
    return str(keys.token)


def _keys_of_a_role() -> dict[str, str]:
    session = import_module("botocore.session").get_session()
    found = session.get_credentials()
    keys = None if found is None else found.get_frozen_credentials()
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
