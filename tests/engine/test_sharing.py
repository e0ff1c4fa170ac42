"""What of a state each rank stores follows the state from save to save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ckpt_core import FlatPart
from ckpt_core.share import Scope, Share, Sharer
from ckpt_core.state import RngState, SpecMemo, flatten
from ckpt_core.types import Block, Placement, RankInfo


def share_of(sharer: Sharer, state: Any, memo: SpecMemo) -> Share:
    return sharer.share(flatten(state, eager_leaf_bytes=65536, memo=memo), Scope())


def stored_as_buffers(share: Share) -> list[str]:
    return [row.name for row in share.rows if row.kind == "buffer"]


def test_buffers_are_known_again_when_a_module_is_given_behind_its_state_dict() -> None:
    net, memo = torch.nn.BatchNorm1d(4), SpecMemo()
    sharer = Sharer(RankInfo(0, 2))
    plain = share_of(sharer, {"model": net.state_dict()}, memo)
    assert stored_as_buffers(plain) == []
    known = share_of(sharer, {"model": net}, memo)
    assert stored_as_buffers(known)
    assert stored_as_buffers(share_of(sharer, {"model": net.state_dict()}, memo)) == []


def test_an_rng_state_is_private_behind_its_state_dict_too() -> None:
    rng, memo = RngState(), SpecMemo()
    sharer = Sharer(RankInfo(0, 2))
    plain = share_of(sharer, {"rng": rng.state_dict()}, memo)
    known = share_of(sharer, {"rng": rng}, memo)
    assert plain.rows and not known.rows


def test_a_share_stays_the_same_object_while_the_state_does() -> None:
    net, memo = torch.nn.BatchNorm1d(4), SpecMemo()
    sharer = Sharer(RankInfo(0, 2))
    state = {"model": net, "rng": RngState()}
    assert share_of(sharer, state, memo) is share_of(sharer, state, memo)


def test_a_leaf_without_elements_is_stored_in_its_whole_shape() -> None:
    flat = flatten({"w": torch.zeros(0, 3)}, eager_leaf_bytes=65536)
    place = Placement((0, 5), Block((0, 0), (0, 3)), 0, 1, "columns", ranks=2)
    flat = replace(flat, placements={"w": place})
    (part,) = Sharer(RankInfo(0, 2)).share(flat, Scope()).parts
    assert part.stored == part.whole and part.stored.shape == (0, 5)


@pytest.mark.parametrize(
    ("ranks", "mesh", "stored"), [(4, 4, 80000), (4, 2, 80000), (2, 4, 160000)]
)
def test_a_box_is_cut_among_replicas_only_where_all_ranks_of_the_mesh_save_together(
    ranks: int, mesh: int, stored: int
) -> None:
    flat = flatten({"w": FlatPart(torch.zeros(40000), (40000,), 0)}, eager_leaf_bytes=65536)
    place = replace(flat.placements["w"], replica=0, replicas=2, ranks=mesh)
    flat = replace(flat, placements={"w": place})
    (part,) = Sharer(RankInfo(0, ranks)).share(flat, Scope()).parts
    assert part.slice is not None and part.slice.nbytes == stored
