"""Leaves that follow each other are found alike one by one and all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.snapshot import Items, runs
from ckpt_core.snapshot.runs import Run, runs_of

DTYPES = (torch.uint8, torch.int8)
SMALL, MOST = 6, 20


@st.composite
def leaves(draw: st.DrawFn, odd: float) -> tuple[Items, list[str | None]]:
    """Leaves of some bytes, and where each lies; `odd` of them are not like their neighbours."""
    items, on, offset = [], [], 8
    for _ in range(draw(st.integers(0, 12))):
        strange = draw(st.floats(0, 1)) < odd
        nbytes = draw(st.integers(0, 2 * SMALL) if strange else st.integers(1, SMALL))
        dtype = draw(st.sampled_from(DTYPES)) if strange else DTYPES[0]
        tensor = torch.zeros(2 * nbytes, dtype=dtype)[:: 2 if strange else 1][:nbytes]
        offset += draw(st.integers(0, 1)) if strange else 0
        items.append((tensor, offset, nbytes))
        on.append(draw(st.sampled_from([None, "first", "second"])) if strange else "first")
        offset += nbytes
    return Items.of(items), on


def partition(found: list[Run]) -> list[tuple[Any, int, int, list[int]]]:
    return [(run.device, run.offset, run.end, list(map(id, run.tensors))) for run in found]


@pytest.mark.parametrize("one_dtype", [False, True])
@pytest.mark.parametrize("odd", [0.0, 0.3])
def test_runs_are_the_same_whether_leaves_are_looked_at_one_by_one(
    one_dtype: bool, odd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    @given(leaves(odd))
    def check(given_: tuple[Items, list[str | None]]) -> None:
        items, on = given_
        bounds = {"small_bytes": SMALL, "most_bytes": MOST}
        found = list(runs_of(items, on, one_dtype=one_dtype, **bounds))
        with monkeypatch.context() as patch:
            patch.setattr(runs, "_is_one", lambda *_: False)
            one_by_one = list(runs_of(items, on, one_dtype=one_dtype, **bounds))
        assert partition(found) == partition(one_by_one)
        assert [id(one) for run in found for one in run.tensors] == list(map(id, items.tensors))
        for run in found:
            if len(run.tensors) > 1:
                assert run.device is not None and run.nbytes <= MOST
                assert run.nbytes == sum(one.nbytes for one in run.tensors)
                assert all(one.is_contiguous() for one in run.tensors)
                assert not one_dtype or len({one.dtype for one in run.tensors}) == 1

    check()


def test_items_are_what_a_list_of_them_would_be() -> None:
    listed = [(torch.zeros(2), 8 * number, 8) for number in range(5)]
    items = Items.of(listed)
    assert Items.of(items) is items and len(Items.of([])) == 0
    for found, wanted in ((items, listed), (items[1:3], listed[1:3])):
        assert len(found) == len(wanted)
        assert all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(found, wanted, strict=True))
    assert items[-1][0] is listed[-1][0]
