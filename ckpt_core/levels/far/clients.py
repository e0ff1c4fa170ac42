"""Clients of object stores: made from a URL and the environment.

    store = open_store("s3://bucket/run")

Credentials are taken from the environment, as each store's own tools take them.
"""

from __future__ import annotations

import configparser
import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from ckpt_core.errors import ConfigError
from ckpt_core.levels.tokens import PEER_BUCKET, PEER_REGION, TOKEN_VARIABLE, read_keys
from ckpt_core.options import PEER

Store = S3Store | GCSStore | AzureStore

ERRORS = (BaseError, OSError, ValueError, NotImplementedError)
"""What a call of the client may raise; a missing object is a FileNotFoundError."""

CONNECT_S = 5.0

_PROCESS = os.getpid()
"""In a fork of this one, the threads of the client are missing, and a call would never return."""
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_AZURE_NAMES = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"),
}
"""As the client reads them, and as Azure's own command line does."""
_AWS_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN), a profile, or a role",
    "gs": "set GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS, or give the machine a role",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another credential; or "
    "AZURE_STORAGE_CONNECTION_STRING",
    PEER: f"let {TOKEN_VARIABLE} name a file with the token that `ckpt-core serve` has there",
}


def split(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix of a level's URL; all that is at a peer is in one bucket."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    return scheme, PEER_BUCKET if scheme == PEER else bucket, prefix


def peer_path(url: str, key: str) -> str:
    """Where an object of a level at a peer is asked for, below the peer's `endpoint`."""
    _, bucket, prefix = split(url)
    return f"/{bucket}/{quote('/'.join(filter(None, (prefix, key))))}"


def open_store(url: str, *, request_s: float, retries: int) -> Store:
    """A client for what lies under a URL; opens no connection.

    Args:
        request_s: longest time that one request takes, and after which none is repeated.
        retries: how often one is repeated.

    Raises:
        ConfigError: the environment's settings cannot be right; or this is a fork of a process that has a
            client already.
    """
    if os.getpid() != _PROCESS:
        raise ConfigError(
            f"{url}: this is a fork of process {_PROCESS}, which has read from an object store: such a fork "
            "cannot. Start it by spawn (multiprocessing), or read there in one of the two alone"
        )
    scheme, bucket, prefix = split(url)
    keys = _peer_keys(url) if scheme == PEER else None
    plain = endpoint(url).startswith("http://")
    client: Any = {
        "connect_timeout": timedelta(seconds=min(CONNECT_S, request_s)),
        "timeout": timedelta(seconds=request_s),
        "allow_http": plain or os.environ.get("AWS_ALLOW_HTTP", "") == "true",
        "user_agent": "ckpt-core",
    }
    if scheme == PEER:
        # Nodes of a job are no business of a proxy that the environment names for the world outside.
        host = str(urlsplit(endpoint(url)).hostname)
        client |= {"proxy_url": endpoint(url), "proxy_excludes": host}
    retry: Any = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=request_s),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)},
    }
    shared: Any = {"prefix": prefix or None, "client_options": client, "retry_config": retry}
    try:
        if scheme == "gs":
            return GCSStore(bucket, **shared)
        if scheme == "az":
            return AzureStore(bucket, config=_azure_config(), **shared)
        if scheme == PEER:
            return S3Store(bucket, config=_peer_config(url), credential_provider=keys, **shared)
        return S3Store(bucket, config=_s3_config(plain), **shared)
    except ERRORS as exc:
        raise ConfigError(
            f"{url}: no client can be made of the environment's settings "
            f"({type(exc).__name__}): {CREDENTIALS[scheme]}"
        ) from None


def endpoint(url: str) -> str:
    """Where a peer is, or where the environment says that a store is; "" for the store's own."""
    scheme, _, rest = url.partition("://")
    if scheme == PEER:
        return f"http://{rest.partition('/')[0]}"
    azure = _azure_config() if scheme == "az" else {}
    named = [azure.get("endpoint"), *map(os.environ.get, _ENDPOINTS[scheme])]
    if azure.get("use_emulator", os.environ.get("AZURE_STORAGE_USE_EMULATOR")) == "true":
        named.append(os.environ.get("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:10000"))
    return next(filter(None, named), "")


def is_unsigned(home: str) -> bool:
    """Whether bodies go to a store without a sum of their own.

    The transport guards the bytes, and our sums are verified at the far end: hashing each part once more
    takes four times as long as sending it.
    """
    if os.environ.get("AWS_UNSIGNED_PAYLOAD"):
        return is_set("AWS_UNSIGNED_PAYLOAD")
    return not home.startswith("http://")


def is_set(name: str) -> bool:
    """Whether a variable says yes, as the client reads it."""
    return os.environ.get(name, "").lower() in ("true", "1", "yes", "on", "y")


def s3_settings() -> dict[str, str]:
    """Static keys and region as the environment has them; no keys where they are a role's."""
    names = {
        "access_key_id": ("AWS_ACCESS_KEY_ID",),
        "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
        "session_token": ("AWS_SESSION_TOKEN", "AWS_TOKEN"),
        "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    found = {"region": "us-east-1"}
    if not any(os.environ.get(name) for name in _AWS_SOURCES):
        found |= _profile()
    for key, variables in names.items():
        values = [value for name in variables if (value := os.environ.get(name))]
        if values:
            found[key] = values[0]
    return found


def peer_settings() -> dict[str, str]:
    """What requests to a peer are signed with, likewise.

    Raises:
        ConfigError: the environment names no file with a token, or what is wrong with that.
    """
    name = os.environ.get(TOKEN_VARIABLE)
    if not name:
        raise ConfigError(f"another node asks for the token of the job: {CREDENTIALS[PEER]}")
    keys = read_keys(name)
    return {
        "access_key_id": keys.access_key_id,
        "secret_access_key": keys.secret_access_key,
        "region": PEER_REGION,
    }


# -- inside ----------------------------------------------------------------------------------------


def _peer_keys(url: str) -> Any:
    try:
        settings = peer_settings()
    except ConfigError as exc:
        raise ConfigError(f"{url}: {exc}") from None
    keys = {name: settings[name] for name in ("access_key_id", "secret_access_key")}
    return lambda: {**keys, "token": None, "expires_at": None}


def _peer_config(url: str) -> Any:
    """Every setting that the client would take from the environment, where it stands for another store.

    Danger: what is left out here goes to the peer, in clear: a session's token, or a key for encryption.
    """
    config: dict[str, Any] = {
        "endpoint": endpoint(url),
        "region": PEER_REGION,
        "virtual_hosted_style_request": False,
        "s3_express": False,
        "request_payer": False,
        "skip_signature": False,
        # Sums of the bytes are signed, so that the peer refuses what is not as it was sent.
        "unsigned_payload": False,
        "conditional_put": "etag",
    }
    if "AWS_ENDPOINT_URL_S3" in os.environ:
        config["aws_endpoint_url_s3"] = config["endpoint"]
    if any(name.upper().startswith(("AWS_SERVER_SIDE", "AWS_SSE_")) for name in os.environ):
        config["server_side_encryption"] = "AES256"
    return config


def _s3_config(plain: bool) -> Any:
    config: dict[str, Any] = {}
    if "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        config["unsigned_payload"] = is_unsigned("http://" if plain else "")
    if not any(os.environ.get(name) for name in _AWS_SOURCES):
        config.update(_profile())
    return config


def _azure_config() -> Any:
    """What Azure's own tools find in the environment, and the client does not."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    rows = (row.partition("=") for row in text.split(";"))
    said = {name.strip().lower(): value.strip() for name, _, value in rows if value}
    home, account = said.get("blobendpoint", "").rstrip("/"), said.get("accountname", "")
    if home and not account:
        account = (urlsplit(home).hostname or "").partition(".")[0]
    if account and not home and "endpointsuffix" in said:
        protocol = said.get("defaultendpointsprotocol", "https")
        home = f"{protocol}://{account}.blob.{said['endpointsuffix']}"
    config = {
        "account_name": account,
        "account_key": said.get("accountkey", ""),
        "sas_key": said.get("sharedaccesssignature", "").removeprefix("?"),
        "endpoint": home,
        "use_emulator": said.get("usedevelopmentstorage", "").lower(),
    }
    for key, names in _AZURE_NAMES.items():
        if not text:
            config[key] = next((value for name in names if (value := os.environ.get(name))), "")
    return {key: value for key, value in config.items() if value}


def _profile() -> dict[str, str]:
    """Static keys of the profile in the files of AWS's tools, which the client does not read itself."""
    name = os.environ.get("AWS_PROFILE", "default")
    home = Path("~/.aws").expanduser()
    keys = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
    }
    found: dict[str, str] = {}
    places = (
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
        ("AWS_CONFIG_FILE", "config", ""),
    )
    for variable, file, section in places:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(os.environ.get(variable, home / file))
        except (configparser.Error, UnicodeDecodeError):
            continue
        section = section or (name if name == "default" else f"profile {name}")
        if not parser.has_section(section):
            continue
        rows = dict(parser.items(section))
        found.update({keys[key]: value for key, value in rows.items() if key in keys})
        if "region" in rows and not os.environ.get(
            "AWS_REGION", os.environ.get("AWS_DEFAULT_REGION")
        ):
            found["region"] = rows["region"]
    return found
