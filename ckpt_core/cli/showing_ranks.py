"""`show` for a step of several ranks: one table of what they store together, one of what each has alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_core.cli.steps import elsewhere_text, held_text
from ckpt_core.cli.text import ranks_text, say, say_rich, table
from ckpt_core.cli.tree import read_tree, walk
from ckpt_core.layout import RankManifest
from ckpt_core.restore import LeafPlace, StepLeaves, StoredLeaf
from ckpt_core.units import count_text, size_text

_SHARED = ("stored together", "dtype", "shape", "size", "slices", "ranks")
_PIECES = ("slice of", "rank", "what", "size", "file", "offset")
_OWN = ("rank", "leaf of its own", "dtype", "shape", "size")


def say_tables(leaves: StepLeaves, *, offsets: bool) -> None:
    """What a step of several ranks holds, for people."""
    gaps = gaps_of(leaves)
    if leaves.shared:
        lacking = "not here" if leaves.is_partial else "missing"
        headings = (*_SHARED, lacking) if gaps else _SHARED
        rows = [_shared_cells(leaf, gaps) for leaf in in_order(leaves)]
        say_rich("", table(headings, rows, right=("size", "slices")))
    if offsets and leaves.shared:
        pieces = _piece_rows(leaves)
        say_rich("", table(_PIECES, pieces, right=("rank", "size", "offset")))
    own = list(_own_rows(leaves, offsets=offsets))
    if own:
        columns = (*_OWN, "file", "offset") if offsets else _OWN
        say_rich("", table(columns, own, right=("rank", "size", "offset")))
    else:
        say("")
        say("no rank has leaves of its own")
    say("")
    say("--rank N shows the tree and the plain values of one rank")


def partial_text(leaves: StepLeaves) -> str:
    """That this is the root of one node, in words."""
    here = [rank.rank for rank in leaves.step.ranks]
    others = elsewhere_text(here, leaves.step.manifest.world_size)
    return f"the root of one node: what {others} wrote lies in other roots"


def counts_text(leaves: StepLeaves) -> str:
    """How many leaves there are of either kind."""
    own = sum(map(len, leaves.private.values()))
    return f"{count_text(len(leaves.shared), 'leaf')} stored together and {own:,} of single ranks"


def gaps_of(leaves: StepLeaves) -> dict[str, str]:
    """What is missing of leaves that ranks store together, in words."""
    gaps = {name: leaves.gap(leaf) for name, leaf in leaves.shared.items()}
    return {name: gap for name, gap in gaps.items() if gap is not None}


def holders_text(leaf: StoredLeaf) -> str:
    """The ranks that have stored parts of a leaf, in words: `ranks 0-3`."""
    ranks = _holders(leaf)
    return held_text(ranks, len(ranks))


def in_order(leaves: StepLeaves) -> list[StoredLeaf]:
    """What ranks store together, in the order in which the tree of the first of them shows it."""
    items = walk(read_tree(leaves.step.ranks[0].skeleton))
    names = dict.fromkeys(item.tensor.leaf for item in items if item.tensor is not None)
    shown = {name: number for number, name in enumerate(names)}
    return sorted(leaves.shared.values(), key=lambda leaf: shown.get(leaf.spec.name, len(shown)))


def _holders(leaf: StoredLeaf) -> list[int]:
    return sorted({place.rank for place in leaf.places})


def _shared_cells(leaf: StoredLeaf, gaps: Mapping[str, str]) -> list[str]:
    spec = leaf.spec
    cells = [spec.name, spec.dtype, str(list(spec.shape)), size_text(leaf.nbytes)]
    cells += [str(len(leaf.places)), ranks_text(_holders(leaf))]
    return [*cells, gaps.get(spec.name, "")] if gaps else cells


def _piece_rows(leaves: StepLeaves) -> Iterator[list[str]]:
    files = {rank.rank: rank.files for rank in leaves.step.ranks}
    for leaf in in_order(leaves):
        for place in leaf.places:
            size = leaf.nbytes if place.part is None else place.part.nbytes
            name = files[place.rank][place.file].name
            cells = [leaf.spec.name, str(place.rank), _what(place, leaf), size_text(size)]
            yield [*cells, name, str(place.offset)]


def _what(place: LeafPlace, leaf: StoredLeaf) -> str:
    part = place.part
    if part is None or (part.block is None and part.nbytes == leaf.nbytes):
        return "all of it"
    span = f"bytes {part.begin}..{part.begin + part.nbytes}"
    if part.block is None:
        return span
    pairs = zip(part.block.offsets, part.block.sizes, strict=True)
    box = f"[{', '.join(f'{low}:{low + size}' for low, size in pairs)}]"
    return f"{span} of {box}"


def _own_rows(leaves: StepLeaves, *, offsets: bool) -> Iterator[list[str]]:
    files = {rank.rank: rank.files for rank in leaves.step.ranks}
    for rank, own in leaves.private.items():
        for leaf in own.values():
            spec, place = leaf.spec, leaf.places[0]
            cells = [
                str(rank),
                spec.name,
                spec.dtype,
                str(list(spec.shape)),
                size_text(leaf.nbytes),
            ]
            if offsets:
                cells += [files[rank][place.file].name, str(place.offset)]
            yield cells


# -- for programs ------------------------------------------------------------------------------


def shared_json(leaves: StepLeaves, paths: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """The leaves that ranks store together; `paths` are the places of a tree by leaf."""
    ranks, gaps = {rank.rank: rank for rank in leaves.step.ranks}, gaps_of(leaves)
    return [
        {
            "name": leaf.spec.name,
            "dtype": leaf.spec.dtype,
            "shape": list(leaf.spec.shape),
            "nbytes": leaf.nbytes,
            "missing": gaps.get(leaf.spec.name),
            "slices": [_place_json(place, ranks[place.rank]) for place in leaf.places],
            "paths": paths.get(leaf.spec.name, []),
        }
        for leaf in in_order(leaves)
    ]


def _place_json(place: LeafPlace, rank: RankManifest) -> dict[str, Any]:
    part = place.part
    assert part is not None, "only a step of one rank stores shared leaves otherwise"
    block = None if part.block is None else [list(part.block.offsets), list(part.block.sizes)]
    return {
        "rank": place.rank,
        "file": rank.files[place.file].name,
        "offset": place.offset,
        "nbytes": part.nbytes,
        "begin": part.begin,
        "block": block,
    }
