"""Costs for property tests: multiples of an eighth of a second, so that sums are exact."""

from __future__ import annotations

from hypothesis import strategies as st

from ckpt_core.simulate import Costs, Sharing

ITERATION_S = 1.0


def eighths(most: int) -> st.SearchStrategy[float]:
    """Seconds from 0 to `most`."""
    return st.integers(0, most * 8).map(lambda number: number / 8)


@st.composite
def costs(draw: st.DrawFn, sharing: Sharing | None = None) -> Costs:
    """Any costs for iterations of one second."""
    return Costs(
        stall_s=draw(eighths(4)),
        snapshot_s=draw(eighths(4)),
        window_s=draw(eighths(1)),
        persist_s=draw(eighths(24)),
        pipelined=draw(st.booleans()),
        in_flight=draw(st.integers(1, 4)),
        sharing=draw(st.sampled_from(Sharing)) if sharing is None else sharing,
        load_s=draw(eighths(8)),
    )
