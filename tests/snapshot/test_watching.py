"""With `debug_barrier` every byte of a leaf counts, however the leaf lies in memory."""

from __future__ import annotations

import pytest
import torch

from ckpt_core.errors import BarrierError
from ckpt_core.snapshot import LeafWatch
from ckpt_core.system.devices import Devices

SMALL, LARGE = 100_000, 16_000_000
"""Bytes: malloc keeps what is freed of the first, and gives the second back to the system."""


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_of_a_leaf_that_is_not_contiguous_a_change_is_found_and_nothing_else(nbytes: int) -> None:
    leaf = torch.randn(nbytes // 8, 2).t()
    others = [torch.randn(nbytes // 4) for _ in range(2)]
    for changes in (False, True):
        watch = LeafWatch(1, None, devices=Devices())
        items = [(leaf, 0, leaf.nbytes)]
        watch.begin(["leaf"], items)
        others.append(others[0] + others[1])  # takes what has been freed
        if changes:
            leaf[1, -1] += 1
        watch.end(items)
        if changes:
            with pytest.raises(BarrierError, match="1 leaf changed during staging: leaf"):
                watch.raise_if_changed()
        else:
            watch.raise_if_changed()
