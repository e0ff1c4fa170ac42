"""The safetensors header that a shard file starts with: the text of its entries, and its bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring as quote

from ckpt_core.errors import ConfigError
from ckpt_core.layout.dtypes import in_header, nbytes
from ckpt_core.layout.names import SHARD_VERSION
from ckpt_core.types import LeafSpec
from ckpt_core.units import ALIGN_BYTES, align_up

__all__ = [
    "LENGTH_BYTES",
    "MAX_HEADER_BYTES",
    "METADATA_KEY",
    "PAD_PREFIX",
    "encode_header",
    "entry_bytes",
    "entry_middle",
    "metadata_text",
    "pad_entry",
    "plain_header",
    "quote",
    "region_bytes",
    "utf8",
]

LENGTH_BYTES = 8
"""The header's length comes first, as a little-endian u64."""

MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit of the JSON text: a file beyond it could not be opened by anyone else."""

METADATA_KEY = "__metadata__"
PAD_PREFIX = "__pad__"
_ALIGN = 8
"""Where tensors begin in a file that is no shard."""

_OURS = {"format": "pt", "ckpt_core": SHARD_VERSION}


def metadata_text(metadata: Mapping[str, str]) -> str:
    """The header's first entry.

    Raises:
        ConfigError: a key that is ours, or a value that is no text.
    """
    for key, value in metadata.items():
        if key in _OURS:
            raise ConfigError(f"metadata key {key!r} belongs to the format: choose another")
        if not all(isinstance(text, str) for text in (key, value)):
            raise ConfigError(
                f"metadata {key!r}: {value!r} is not text, and the header holds no other"
            )
    merged = json.dumps({**_OURS, **metadata}, ensure_ascii=False, separators=(",", ":"))
    return f'"{METADATA_KEY}":{merged}'


def _entries(specs: Iterable[LeafSpec]) -> Iterator[str]:
    position = 0
    for spec in specs:
        end = position + nbytes(spec)
        yield f"{quote(spec.name)}{entry_middle(spec)}{position},{end}]}}"
        position = end


def plain_header(specs: Iterable[LeafSpec]) -> bytes:
    """The first bytes of a safetensors file that is no shard: tensors without gaps, nothing of ours.

    Called by exports. The names are such as UTF-8 can write, each once.

    Raises:
        ConfigError: safetensors would refuse so long a header.
    """
    body = utf8(",".join([f'"{METADATA_KEY}":{{"format":"pt"}}', *_entries(specs)]))
    text_bytes = len(body) + len("{}")
    if text_bytes + _ALIGN > MAX_HEADER_BYTES:
        raise ConfigError(
            f"too many tensors for one safetensors file: a header of {text_bytes} bytes"
        )
    return _framed(body, LENGTH_BYTES + align_up(text_bytes, _ALIGN))


def entry_middle(spec: LeafSpec) -> str:
    """The part of an entry between its name and its offsets; the same for leaves of one kind."""
    code, shape = in_header(spec.dtype, spec.shape)
    dims = ",".join(map(str, shape))
    return f':{{"dtype":"{code}","shape":[{dims}],"data_offsets":['


def pad_entry(name: str, begin: int, end: int) -> str:
    """An entry of padding bytes."""
    return f'"{name}":{{"dtype":"U8","shape":[{end - begin}],"data_offsets":[{begin},{end}]}}'


def entry_bytes(name_bytes: int, middle: str, largest: int) -> int:
    """Most bytes that an entry takes with the comma before it; `name_bytes` counts the quotes."""
    return 1 + name_bytes + len(middle) + 2 * len(str(largest)) + len(",]}")


def region_bytes(text_bytes: int) -> int:
    """Room of a header whose entries take `text_bytes` with `__metadata__`: where tensors start.

    Raises:
        ConfigError: safetensors would refuse so long a header.
    """
    room = align_up(LENGTH_BYTES + text_bytes + len("{}"), ALIGN_BYTES)
    if room - LENGTH_BYTES > MAX_HEADER_BYTES:
        raise ConfigError(
            f"the shard's header takes {room - LENGTH_BYTES} bytes and safetensors allows "
            f"{MAX_HEADER_BYTES}: save fewer or shorter-named leaves in one shard"
        )
    return room


def encode_header(metadata: str, entries: Sequence[str], *, room_bytes: int | None = None) -> bytes:
    """The first bytes of the file, padded with spaces to a multiple of 4096 or to `room_bytes`.

    Raises:
        ConfigError: too long, or a name that UTF-8 cannot write.
    """
    body = utf8(",".join([metadata, *entries]))
    room = region_bytes(len(body)) if room_bytes is None else room_bytes
    assert LENGTH_BYTES + len(body) + len("{}") <= room, "more entries than room was reserved for"
    return _framed(body, room)


def _framed(body: bytes, room_bytes: int) -> bytes:
    length = struct.pack("<Q", room_bytes - LENGTH_BYTES)
    return b"".join([length, b"{", body, b"}"]).ljust(room_bytes, b" ")


def utf8(text: str) -> bytes:
    """The bytes of a text of names.

    Raises:
        ConfigError: a lone surrogate, which JSON readers other than Python's refuse.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        near = text[max(0, exc.start - 40) : exc.end]
        raise ConfigError(f"a name has a lone surrogate, which UTF-8 lacks: near {near!r}") from exc
