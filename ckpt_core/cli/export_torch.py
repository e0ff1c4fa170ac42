"""One file for `torch.load(..., weights_only=True)`: tensors and plain values in their containers.

The skeleton is rewritten before anything is built from it: what `weights_only` refuses takes a plain
form or is left out. Then the file is opened the same way as its readers will, which reads no tensor.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator
from typing import IO

import torch

from ckpt_core.cli.exported import Exported, check_room, unique, with_its_reason
from ckpt_core.cli.parts import Part
from ckpt_core.cli.tensors import fill
from ckpt_core.cli.tree import Json, children_of, key_text, kind_of, read_tree, walk
from ckpt_core.cli.values import value_text
from ckpt_core.errors import ConfigError, RestoreError
from ckpt_core.restore import RankLeaves
from ckpt_core.state import Kind, Seq, Skeleton

_GONE = object()
_ATOMS = (
    "int",
    "float",
    "str",
    "complex",
    "bytes",
    "bytearray",
    "dtype",
    "device",
    "layout",
    "versions",
    "tensor",
    "composite",
)


def write_torch(file: IO[bytes], part: Part, leaves: RankLeaves, made: Exported) -> None:
    """Write the chosen part into an empty file; the part is in memory once.

    Raises:
        ConfigError: nothing is chosen, the disk is too small, or torch cannot hold a dtype.
        CorruptCheckpoint: the step's bytes or manifest are not what was written.
        RestoreError: torch cannot build or read back what the skeleton says; or this is the root of a
            node, and a part of a chosen tensor lies in another one.
    """
    obj = leaves.manifest.skeleton
    obj = obj if isinstance(obj, dict) else {}
    node = _Rewriter(part, made).rewrite(obj.get("tree"))
    if node is _GONE:
        raise ConfigError(f"{part.shown}: nothing has such a name; `ckpt-core show` lists them")
    used = {item.tensor.leaf for item in walk(read_tree({"tree": node})) if item.tensor is not None}
    leaves.require(used)
    found = {name: leaf for name in sorted(used) if (leaf := leaves.leaf(name)) is not None}
    specs = {name: leaf.spec for name, leaf in found.items()}
    total = sum(leaf.nbytes for leaf in found.values())
    check_room(file, total)
    skeleton = Skeleton.from_json({**obj, "tree": node, "pools": _pools(obj, used)}, path=file.name)
    try:
        tensors = skeleton.allocate(specs)
        for name in specs:
            fill(tensors[name], made.told(leaves.blocks(name), of_bytes=total))
        with with_its_reason():
            torch.save(skeleton.unflatten(tensors, trusted=False), file)
        file.flush()
        # Torch opens no name that is not UTF-8.
        opened = f"/proc/self/fd/{file.fileno()}"
        with warnings.catch_warnings():
            # torch tells of the time that looking at sparse tensors takes.
            warnings.simplefilter("ignore", UserWarning)
            name = opened if os.path.exists(opened) else file.name
            torch.load(name, weights_only=True, mmap=True)
    except (RuntimeError, KeyError, pickle.UnpicklingError) as exc:
        text = f"torch cannot hold this step in one file: {' '.join(str(exc).split())[:300]}"
        raise RestoreError(text) from exc
    made.tensors = len(specs)


def _pools(obj: dict[str, Json], used: set[str]) -> list[Json]:
    """Storages that are exported whole; leaves of the others get one each."""
    pools = obj.get("pools")
    rows = [row for row in pools if isinstance(row, dict)] if isinstance(pools, list) else []
    return [
        row for row in rows if isinstance(row.get("offsets"), dict) and used >= set(row["offsets"])
    ]


class _Rewriter:
    """Takes the chosen part out of a skeleton's tree, in forms that `weights_only` accepts."""

    def __init__(self, part: Part, made: Exported) -> None:
        self._part = part
        self._made = made
        self._found: list[tuple[str, Json]] = []

    def rewrite(self, tree: Json) -> Json:
        """The new tree, or _GONE when nothing of it is chosen."""
        made = self._chosen(tree, "")
        if not self._part.strip:
            return made
        if not self._found:
            return _GONE
        if len(self._found) == 1 and not self._part.name(self._found[0][0]):
            return self._found[0][1]
        named: dict[str, Json] = {}
        for path, node in self._found:
            named[unique(self._part.name(path) or path.rpartition(".")[2], named)] = node
        return {"!": "dict", "v": named}

    def _chosen(self, node: Json, path: str) -> Json:
        if self._is_chosen(path):
            made = self._plain(node, path)
            if made is not _GONE:
                self._found.append((path, made))
            return made
        if not self._part.enters(path):
            return _GONE
        if isinstance(node, dict) and node.get("!") == "object":
            return self._chosen(node.get("state"), path)
        rows = [
            [name, made]
            for key, child in _children(node)
            if (made := self._chosen(child, _join(path, key_text(key)))) is not _GONE
            and (name := key if self._part.strip else self._key(key, path)) is not _GONE
        ]
        return {"!": "dict", "items": rows} if rows else _GONE

    def _is_chosen(self, path: str) -> bool:
        # `--prefix model.` means what is below "model": the container itself, with its own type.
        return self._part.keeps(path) or (bool(path) and self._part.prefix == f"{path}.")

    def _plain(self, node: Json, path: str) -> Json:
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, list):
            return self._items(node, path)
        tag = node.get("!") if isinstance(node, dict) else None
        tag = tag if isinstance(tag, str) else ""
        if tag and _is_atom(node):
            return node
        kind = kind_of(node)
        if kind is not None and kind.loose:
            return self._container(node, kind, path)
        if tag == "object":
            return self._plain(node.get("state"), path)
        if tag == "array":
            self._note(path, "numpy array", "tensor")
            return node.get("leaf")
        return self._leave_out(path, value_text(node))

    def _key(self, node: Json, path: str) -> Json:
        """As it is, or _GONE: in another form, a key might have no hash, or be equal to another one."""
        if _is_key(node):
            return node
        return self._leave_out(_join(path, key_text(node)), f"key {value_text(node)}")

    def _leave_out(self, path: str, what: str) -> Json:
        self._made.left_out[unique(path, self._made.left_out)] = what
        return _GONE

    def _container(self, node: dict[str, Json], kind: Kind, path: str) -> Json:
        self._note(path, kind.tag, kind.loose)
        if kind.form is Seq:
            if kind.hashed:
                kept = [item for item in node["v"] if self._key(item, path) is not _GONE]
            else:
                kept = self._items(node["v"], path)
            return {"!": kind.loose, "v": kept}
        made: dict[str, Json] = {"!": kind.loose}
        made["items"] = list(self._rows(_children(node), path))
        if isinstance(node.get("attrs"), dict) and kind.loose == "OrderedDict":
            made["attrs"] = self._plain(node["attrs"], _join(path, "__dict__"))
        return made

    def _rows(self, rows: list[tuple[Json, Json]], path: str) -> Iterator[list[Json]]:
        for key, child in rows:
            if self._key(key, path) is not _GONE:
                made = self._plain(child, _join(path, key_text(key)))
                if made is not _GONE:
                    yield [key, made]

    def _items(self, items: list[Json], path: str) -> list[Json]:
        made = [self._plain(item, _join(path, str(index))) for index, item in enumerate(items)]
        # None in its place: the items after it keep their numbers.
        return [None if item is _GONE else item for item in made]

    def _note(self, path: str, before: str, after: str) -> None:
        if before != after:
            self._made.changed[path] = f"{before} as {after}"


def _children(node: Json) -> list[tuple[Json, Json]]:
    """Key and value nodes below a container that torch takes in some form."""
    kind = kind_of(node)
    return children_of(node) if kind is not None and kind.loose else []


def _is_key(node: Json) -> bool:
    """Whether it can be a key of a dict, or be in a set, where torch loads it."""
    if not isinstance(node, dict):
        return not isinstance(node, list)
    if node.get("!") in ("tuple", "Size") and kind_of(node) is not None:
        return all(map(_is_key, node["v"]))
    return _is_atom(node)


def _is_atom(node: Json) -> bool:
    # No bytes at all are pickled as a call of `bytes`, which is refused.
    return node.get("!") in _ATOMS and (node["!"], node.get("v")) != ("bytes", "")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
