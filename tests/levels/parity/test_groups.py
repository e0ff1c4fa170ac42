"""Groups: who is together, and who keeps what of whom."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.levels.parity.groups import Shape, grouped, worst_domain
from ckpt_core.levels.trainer.ring import Member

shapes = st.builds(Shape, st.integers(2, 16), st.integers(1, 2))


@given(shapes)
def test_all_nodes_keep_as_much_and_every_block_of_each_is_in_one_stripe(shape: Shape) -> None:
    kept: Counter[int] = Counter()
    for stripe in shape.stripes:
        data, parity = shape.data(stripe), shape.parity(stripe)
        assert sorted(data + parity) == list(range(shape.nodes))
        assert (len(data), len(parity)) == (shape.k, shape.m)
        kept.update(parity)
    assert set(kept.values()) == {shape.m}
    for node in range(shape.nodes):
        assert len(shape.covering(node)) == shape.k and len(shape.kept(node)) == shape.m
        assert all(node in shape.data(stripe) for stripe in shape.covering(node))


@given(shapes, st.integers(1, 4), st.data())
def test_no_group_has_more_of_a_domain_than_it_must(
    shape: Shape, count: int, data: st.DataObject
) -> None:
    names = st.sampled_from(["a", "b", "c", None])
    domains = data.draw(st.lists(names, min_size=count * shape.nodes, max_size=count * shape.nodes))
    nodes = [Member(rank, f"host:{rank}", domain) for rank, domain in enumerate(domains)]
    groups = grouped(nodes, shape)
    assert sorted(one.rank for group in groups for one in group) == list(range(len(nodes)))
    assert all(len(group) == shape.nodes for group in groups)
    largest = max(Counter(one.domain or one.rank for one in nodes).values())
    assert worst_domain(groups) == -(-largest // count)


@pytest.mark.parametrize("text", ["", "4", "1+1", "17+1", "4+0", "4+3", "4+1 ", "٤+1", "-4+1"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Shape.parse(text)


def test_a_shape_says_how_many_nodes_it_takes() -> None:
    assert Shape.parse("4+2") == Shape(4, 2) and Shape(4, 2).nodes == 6
