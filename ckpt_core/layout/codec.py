"""The envelope of both manifests: JSON that ends with its own checksum.

The last 28 bytes are `,"xxh3":"<16 hex digits>"}` and a newline; the digits are the xxh3_64 of all
bytes before them. With them the file is still one JSON object, so any JSON tool reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from ckpt_core.errors import ConfigError, UnknownFormat
from ckpt_core.layout.names import FORMAT_NAME, FORMAT_VERSION
from ckpt_core.layout.rules import MAX_MANIFEST_BYTES
from ckpt_core.layout.strict_json import Invalid, note, parse

_Decoded = TypeVar("_Decoded")
_SUFFIX = re.compile(rb',"xxh3":"([0-9a-f]{16})"\}\n\Z')
_SUFFIX_BYTES = 28


class Text(str):
    """JSON that is written as it is."""

    __slots__ = ()


def spell(value: Any) -> Text:
    """The JSON of a value.

    Raises:
        TypeError, ValueError, RecursionError: there is none.
    """
    return Text(json.dumps(value, allow_nan=False, separators=(",", ":")))


def encode(build: Callable[[], dict[str, Any]], *, what: str) -> bytes:
    """The file of the object that `build` gives, some of whose values may be `Text`.

    Raises:
        ConfigError: `build` raises Invalid, the object is no JSON, or the file would be too long.
    """
    try:
        rows = [
            f'"{name}":{value if type(value) is Text else spell(value)}'
            for name, value in build().items()
        ]
    except Invalid as exc:
        raise ConfigError(f"{what}: {exc.what}: expected {exc.expected}, got {exc.got}") from exc
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{what} cannot be written as JSON: {exc}") from exc
    body = f"{{{','.join(rows)}".encode("ascii")
    if len(body) + _SUFFIX_BYTES > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"{what} takes {len(body)} bytes of at most {MAX_MANIFEST_BYTES}: "
            "keep large values in tensors, not in plain objects"
        )
    return b'%s,"xxh3":"%s"}\n' % (body, xxhash.xxh3_64_hexdigest(body).encode())


def decode(build: Callable[[dict[str, Any]], _Decoded], data: bytes, *, path: Path) -> _Decoded:
    """What `build` makes of the object in `data`, once checksum, format and version are right.

    Raises:
        CorruptCheckpoint: checksum or JSON is wrong, or `build` raises Invalid.
        UnknownFormat: another version.
    """
    try:
        _check_sum(data)
        obj = parse(data)
        _check_version(obj, path)
        return build(obj)
    except Invalid as exc:
        raise exc.of(path) from exc


def _check_sum(data: bytes) -> None:
    if len(data) > MAX_MANIFEST_BYTES:
        raise Invalid("length", expected=f"at most {MAX_MANIFEST_BYTES} bytes", got=len(data))
    suffix = _SUFFIX.match(data[-_SUFFIX_BYTES:])
    if suffix is None:
        got = note(repr(data[-_SUFFIX_BYTES:]))
        raise Invalid("end of the file", expected='`,"xxh3":"<16 hex>"}` and a newline', got=got)
    with memoryview(data) as view:
        actual = xxhash.xxh3_64_hexdigest(view[:-_SUFFIX_BYTES])
    if actual != suffix[1].decode():
        raise Invalid("checksum", expected=suffix[1].decode(), got=actual)


def _check_version(obj: Any, path: Path) -> None:
    if type(obj) is not dict or obj.get("format") != FORMAT_NAME:
        got = obj.get("format") if type(obj) is dict else obj
        raise Invalid("format", expected=repr(FORMAT_NAME), got=got)
    version = obj.get("version")
    if type(version) is not int:
        raise Invalid("version", expected="an int", got=version)
    if not 1 <= version <= FORMAT_VERSION:
        raise UnknownFormat(
            f"{path} has format version {str(version)[:20]}, this release reads 1 to "
            f"{FORMAT_VERSION}: install a newer ckpt-core; the checkpoint is untouched",
            version=version,
            path=path,
        )
