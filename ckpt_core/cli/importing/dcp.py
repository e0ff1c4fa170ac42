"""A directory of torch.distributed.checkpoint: read by one process, however many ranks wrote it.

Its `.metadata` is a pickle, and so is whatever is no tensor. Untrusted, the first is read by an unpickler
that knows DCP's own data classes alone, the others with `weights_only`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeGuard

from ckpt_core.cli.importing.source import Asked, Source, Tree
from ckpt_core.cli.importing.torch_file import (
    arrays_allowed,
    damaged,
    placed,
    refused_by,
    untrusted,
)
from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.layout import check_block, uncovered
from ckpt_core.types import Block, Slice

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    [
        *(
            f"{_MODULE}.metadata.{name}"
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *(f"{_MODULE}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
        *("pathlib.PosixPath", "pathlib._local.PosixPath"),
    ]
)


def _recognises(path: Path) -> bool:
    return (path / _METADATA).is_file()


def _read(asked: Asked) -> Tree:
    if not _recognises(asked.path):
        text = (
            f"{asked.path} is no directory of torch.distributed.checkpoint: it has no {_METADATA}"
        )
        raise ConfigError(text, path=asked.path)
    flat, places = _load(asked)
    changed: dict[str, str] = {}
    tree = _with_lists(_nested(flat, places), "", changed)
    return placed(asked, _by_number(tree, "", changed), changed=changed)


def _load(asked: Asked) -> tuple[dict[str, Any], Mapping[str, tuple[Any, ...]]]:
    """Everything by its name in the metadata, and where that lies in the tree."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    reader, planner = _doors(asked)
    try:
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata.items()
        flat = {name: _room(name, entry) for name, entry in entries}
        with warnings.catch_warnings():
            # It takes one process to be meant, and it is.
            warnings.filterwarnings("ignore", "torch.distributed is")
            load(flat, storage_reader=reader, planner=planner)
    except (Exception, CheckpointException) as exc:  # DCP's is no Exception
        raise _told(asked.path, exc) from exc
    return flat, metadata.planner_data or {name: (name,) for name in flat}


def _told(path: Path, exc: BaseException) -> CkptError:
    """The error behind one of DCP, which has one for each rank: here there is one rank."""
    for cause in getattr(exc, "failures", {}).values():
        exc = cause[0] if isinstance(cause, tuple) else cause
    return exc if isinstance(exc, CkptError) else damaged(path, exc)


def _room(name: str, entry: Any) -> Any:
    """Where an entry is read to: a tensor of its whole size; what is none comes by itself.

    Raises ValueError, or `Invalid`, where chunks leave a part of it out: nothing would be read there.
    """
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(entry, TensorStorageMetadata):
        return None
    shape = tuple(entry.size)
    dtype, whose = entry.properties.dtype, f"of a chunk of {name}"
    blocks = [Block(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    slices = [Slice(0, check_block(one, shape, whose) * dtype.itemsize, one) for one in blocks]
    if gap := uncovered(shape, dtype.itemsize, slices):
        raise ValueError(f"no chunk of {name} holds {gap}")
    return torch.empty(entry.size, dtype=dtype)


def _doors(asked: Asked) -> tuple[Any, Any]:
    """What reads the directory: as DCP does if it is trusted, else with nothing run that it asks for."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **named: Any) -> Metadata:
            with open(asked.path / _METADATA, "rb") as file:
                return _unpickled(file, asked)

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            try:
                with arrays_allowed():
                    found = torch.load(value, map_location="cpu", weights_only=not asked.trusted)
            except pickle.UnpicklingError as exc:
                names = refused_by(exc)
                raise untrusted(asked.path, names) if names else exc from exc
            self.state_dict[read_item.dest_index.fqn] = found

    # Flat: every entry by its name in the metadata.
    return Reader(asked.path), Planner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _unpickled(file: IO[bytes], asked: Asked) -> Metadata:
    from torch.distributed.checkpoint.metadata import StorageMeta

    found: Metadata = pickle.load(file) if asked.trusted else _Safe(file, asked.path).load()
    if getattr(found, "storage_meta", None) is None:
        found.storage_meta = StorageMeta()
    return found


class _Safe(pickle.Unpickler):
    """Knows what DCP's metadata is made of."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str, /) -> Any:
        import torch

        full = f"{module}.{name}"
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if full not in _CLASSES:
            raise untrusted(self._path / _METADATA, [full])
        return super().find_class(module, name)


# -- the tree --------------------------------------------------------------------------------------


def _nested(flat: Mapping[str, Any], places: Mapping[str, tuple[Any, ...]]) -> dict[Any, Any]:
    """The tree that was flattened, lists as dicts of numbers: DCP notes where each entry was."""
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        *path, last = places.get(name, (name,))
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree


def _with_lists(tree: Any, path: str, changed: dict[str, str]) -> Any:
    """Places in a list are numbers there; keys of a dict are always text."""
    if not isinstance(tree, dict):
        return tree
    made = {key: _with_lists(value, _join(path, key), changed) for key, value in tree.items()}
    if not made or not all(type(key) is int for key in made):
        return made
    places = range(max(made) + 1)
    # What holds nothing has no entry; the items after it keep their numbers.
    changed |= {_join(path, key): "DCP kept nothing of it: {}" for key in places if key not in made}
    return [made.get(key, {}) for key in places]


def _by_number(tree: Any, path: str, changed: dict[str, str]) -> Any:
    """The same with states of optimizers as torch's own have them, which know parameters by number.

    DCP's `get_state_dict` names them instead; and where it is given numbers, it makes text of them. A
    state that holds nothing yet it leaves out.
    """
    if isinstance(tree, list):
        return [_by_number(one, _join(path, key), changed) for key, one in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    groups, rows = tree.get("param_groups"), tree.get("state", {})
    if _are_groups(groups) and isinstance(rows, dict):
        names = [str(name) for group in groups for name in group["params"]]
        number = {name: place for place, name in enumerate(names)}
        if len(number) == len(names) and rows.keys() <= number.keys():
            empty = "" if rows else "; state is empty"
            changed[path] = f"parameters by number, not by name{empty}"
            return {
                **tree,
                "state": _numbered(rows, number),
                "param_groups": _renamed(groups, number),
            }
    return {key: _by_number(value, _join(path, key), changed) for key, value in tree.items()}


def _are_groups(found: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether these are the groups of an optimizer."""
    return isinstance(found, list) and all(
        isinstance(one, dict) and isinstance(one.get("params"), list) for one in found
    )


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _numbered(rows: Mapping[str, Any], number: Mapping[str, int]) -> dict[int, Any]:
    return {number[name]: rows[name] for name in sorted(rows, key=lambda name: number[name])}


def _renamed(groups: list[Any], number: Mapping[str, int]) -> list[Any]:
    return [
        {**group, "params": [number[str(name)] for name in group["params"]]} for group in groups
    ]


DCP = Source(
    name="dcp",
    what="a directory of torch.distributed.checkpoint, with .metadata",
    place=70,
    recognises=_recognises,
    read=_read,
)
