"""`show`: what a step holds. Reads manifests only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.showing_ranks import (
    counts_text,
    holders_text,
    partial_text,
    say_tables,
    shared_json,
)
from ckpt_core.cli.steps import file_bytes, opened, rank_of
from ckpt_core.cli.text import age_text, say, say_json, say_rich, table
from ckpt_core.cli.tree import Item, read_tree, walk
from ckpt_core.cli.values import value_text
from ckpt_core.errors import ConfigError
from ckpt_core.layout import LeafEntry, RankManifest
from ckpt_core.restore import StepLeaves, StepManifest, StoredLeaf
from ckpt_core.units import clean, count_text, size_text

if TYPE_CHECKING:
    from rich.tree import Tree

    from ckpt_core.cli.requests import ShowRequest

_NO_KEY = "(the state itself)"


def show_step(request: ShowRequest) -> bool:
    """Print what a step holds; always a success.

    Raises:
        NotCommitted: there is no such step.
        CorruptCheckpoint, UnknownFormat, RestoreError: its manifests cannot be read.
        ConfigError: the rank that is asked for is not there, or none is named where one is needed.
    """
    with opened(request.path, request.step) as reader:
        leaves, step = reader.leaves, reader.leaves.step
    # Printed when nothing is read any more: a step that is retired meanwhile is shown whole.
    alone = step.manifest.world_size == 1
    chosen = None if request.rank is None and not alone else rank_of(step, request.rank)
    if request.json:
        say_json(_as_json(leaves, step.ranks if chosen is None else (chosen,)))
        return True
    if chosen is None and request.depth is not None:
        raise ConfigError("--depth cuts the tree of one rank: add --rank N")
    _say_summary(leaves)
    if chosen is None:
        say_tables(leaves, offsets=request.offsets)
    else:
        if not alone:
            say("")
            say(f"as rank {chosen.rank} has it")
        _show_rank(chosen, leaves, request)
    return True


def totals(top: Item, leaves: Mapping[str, StoredLeaf]) -> list[dict[str, Any]]:
    """For each key at the top: how many leaves and bytes; each leaf counts where it occurs first."""
    seen: set[str] = set()
    made: list[dict[str, Any]] = []
    for child in top.children or (top,):
        names = {item.tensor.leaf for item in walk(child) if item.tensor is not None}
        names = {name for name in names - seen if name in leaves}
        seen |= names
        size = sum(leaves[name].nbytes for name in names)
        made.append({"key": child.key, "leaves": len(names), "nbytes": size})
    return made


# -- for people --------------------------------------------------------------------------------


def _say_summary(leaves: StepLeaves) -> None:
    step, manifest = leaves.step, leaves.step.manifest
    alone = manifest.world_size == 1
    counts = count_text(len(leaves.shared), "leaf") if alone else counts_text(leaves)
    age = age_text(time.time() - manifest.created_unix_s)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_unix_s))
    say(f"step {manifest.step} in {step.path}")
    say(
        f"committed {when} ({age}) by {count_text(manifest.world_size, 'rank')}, {manifest.attempt}"
    )
    files = count_text(sum(len(rank.files) for rank in step.ranks), "file")
    say(
        f"{counts}, {size_text(manifest.state_bytes)} of state; "
        f"{files}, {size_text(file_bytes(step))}{_checksums(step)}"
    )
    if leaves.is_partial:
        say(partial_text(leaves))


def _checksums(step: StepManifest) -> str:
    chunks = [chunk for _, _, entry in step.files() for chunk in entry.chunks]
    missing = sum(chunk.xxh3 is None for chunk in chunks)
    if not missing:
        return f", {count_text(len(chunks), 'checksum')}"
    return f", {count_text(missing, 'chunk')} without checksum"


def _show_rank(rank: RankManifest, step: StepLeaves, request: ShowRequest) -> None:
    top, leaves = read_tree(rank.skeleton), {**step.shared, **step.private[rank.rank]}
    say_rich("", _TreeView(rank, step, request).of(top))
    several = step.step.manifest.world_size > 1
    others = _unnamed(top, step.private[rank.rank] if several else step.shared)
    if others:
        say(f"leaves that the tree does not name: {', '.join(others)}")
    if top.children:
        rows = [
            [row["key"], str(row["leaves"]), size_text(row["nbytes"])]
            for row in totals(top, leaves)
        ]
        say_rich("", table(("key", "leaves", "size"), rows, right=("leaves", "size")))


def _unnamed(top: Item, leaves: Mapping[str, StoredLeaf]) -> list[str]:
    named = {item.tensor.leaf for item in walk(top) if item.tensor is not None}
    return [name for name in leaves if name not in named]


class _TreeView:
    """Draws one rank's tree."""

    def __init__(self, rank: RankManifest, step: StepLeaves, request: ShowRequest) -> None:
        self._rank = rank
        self._step = step
        self._own = step.private[rank.rank]
        self._request = request
        self._first: dict[str, str] = {}

    def of(self, top: Item) -> Tree:
        """The whole tree, or as many levels as were asked for."""
        from rich.tree import Tree

        made = Tree(self._label(top))
        self._grow(made, top, self._request.depth)
        return made

    def _grow(self, branch: Tree, item: Item, depth: int | None) -> None:
        if depth == 0:
            return
        for child in item.children:
            self._grow(branch.add(self._label(child)), child, None if depth is None else depth - 1)

    def _label(self, item: Item) -> Any:
        from rich.text import Text

        made = Text(clean(item.key) if item.path else _NO_KEY, style="bold", overflow="fold")
        for text, style in self._parts(item):
            made.append(f"  {clean(text)}", style=f"not bold {style}")
        return made

    def _parts(self, item: Item) -> Iterator[tuple[str, str]]:
        if item.tensor is not None:
            yield from self._tensor(item)
            return
        if item.is_value:
            yield value_text(item.value), "green"
        else:
            yield f"{item.kind} of {len(item.children)}", "dim"
        if item.type_name and item.kind not in ("opaque", "enum"):
            yield item.type_name, "cyan"

    def _tensor(self, item: Item) -> Iterator[tuple[str, str]]:
        assert item.tensor is not None
        leaf = self._own.get(item.tensor.leaf) or self._step.shared.get(item.tensor.leaf)
        if leaf is None:
            where = (
                "which lies in another root" if self._step.is_partial else "which the step lacks"
            )
            yield f"{item.kind} of the leaf {item.tensor.leaf!r}, {where}", "red"
            return
        first = self._first.setdefault(leaf.spec.name, item.path)
        if item.tensor.view is not None:
            yield f"view {value_text(item.tensor.view)}", ""
        if first != item.path:
            yield f"same memory as {first}", "magenta"
            return
        yield f"{leaf.spec.dtype} {list(leaf.spec.shape)}", ""
        yield size_text(leaf.nbytes), "cyan"
        if item.kind == "array":
            yield "numpy", "dim"
        if leaf.spec.name != item.path:
            yield f"leaf {leaf.spec.name}", "dim"
        place = leaf.places[0]
        if place.part is not None:
            yield f"{count_text(len(leaf.places), 'slice')}, {holders_text(leaf)}", "dim"
        elif self._request.offsets:
            yield f"{self._rank.files[place.file].name} at {place.offset}", "dim"


# -- for programs ------------------------------------------------------------------------------


def _as_json(leaves: StepLeaves, ranks: Sequence[RankManifest]) -> dict[str, Any]:
    step, manifest = leaves.step, leaves.step.manifest
    several = manifest.world_size > 1
    return {
        "path": str(step.path),
        "step": manifest.step,
        "attempt": manifest.attempt,
        "created_unix_s": manifest.created_unix_s,
        "world_size": manifest.world_size,
        "state_bytes": manifest.state_bytes,
        "file_bytes": file_bytes(step),
        "shared": shared_json(leaves, _paths(ranks[0])) if several else [],
        "ranks": [_rank_json(rank, leaves) for rank in ranks],
    }


def _paths(rank: RankManifest) -> dict[str, list[str]]:
    """Places of a rank's tree, by the leaf that they show."""
    paths: dict[str, list[str]] = {}
    for item in walk(read_tree(rank.skeleton)):
        if item.tensor is not None:
            paths.setdefault(item.tensor.leaf, []).append(item.path)
    return paths


def _rank_json(rank: RankManifest, step: StepLeaves) -> dict[str, Any]:
    top, paths = read_tree(rank.skeleton), _paths(rank)
    values = [
        {"path": item.path, "kind": item.kind, "value": item.value}
        for item in walk(top)
        if item.is_value
    ]
    return {
        "rank": rank.rank,
        "files": [
            {
                "name": entry.name,
                "nbytes": entry.nbytes,
                "chunks": len(entry.chunks),
                "unchecked_chunks": sum(chunk.xxh3 is None for chunk in entry.chunks),
            }
            for entry in rank.files
        ],
        "totals": totals(top, {**step.shared, **step.private[rank.rank]}),
        "leaves": [_leaf_json(leaf, rank, paths.get(leaf.spec.name, [])) for leaf in rank.leaves],
        "values": values,
    }


def _leaf_json(leaf: LeafEntry, rank: RankManifest, paths: list[str]) -> dict[str, Any]:
    return {
        "name": leaf.spec.name,
        "dtype": leaf.spec.dtype,
        "shape": list(leaf.spec.shape),
        "nbytes": leaf.nbytes,
        "file": rank.files[leaf.file].name,
        "offset": leaf.offset,
        "paths": paths,
    }
