"""What may be tried within the limits, and what is said when nothing may."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.errors import ConfigError
from ckpt_core.policy.tuning import AXES, Axes, Candidate, Limits, space_of

MIB = 2**20


def limits(
    state: int = 100 * MIB, *, memory: int = 400 * MIB, storage: int = 10_000 * MIB, keep: int = 2
) -> Limits:
    return Limits(state, state, memory, storage, keep)


@given(
    state=st.integers(1, 4000 * MIB),
    memory=st.integers(16 * MIB, 8000 * MIB),
    storage=st.integers(0, 40_000 * MIB),
    keep=st.integers(1, 5),
)
@settings(deadline=None)
def test_every_candidate_keeps_every_limit(
    state: int, memory: int, storage: int, keep: int
) -> None:
    given_limits = limits(state, memory=memory, storage=storage, keep=keep)
    if storage < (2 + keep) * state:
        with pytest.raises(ConfigError, match="max_storage"):
            space_of(given_limits)
        return
    space = space_of(given_limits)
    for candidate in space.candidates():
        assert candidate.staging_bytes <= memory
        assert (candidate.in_flight + keep + 1) * state <= storage
        assert candidate.staging_bytes >= 2 * candidate.in_flight * candidate.chunk_bytes
    start = space.nearest(Candidate(2, 8, 8 * MIB, 2 * state))
    assert space.holds(start)
    for axis in AXES:
        assert start in space.line(start, axis)
        assert start in space.beside(start, axis)
        assert all(space.holds(candidate) for candidate in space.line(start, axis))


def test_storage_bounds_how_many_are_in_flight() -> None:
    space = space_of(limits(storage=550 * MIB))
    assert {candidate.in_flight for candidate in space.candidates()} == {1, 2}


def test_memory_below_the_state_is_used_to_the_full() -> None:
    space = space_of(limits(memory=70 * MIB))
    assert max(candidate.staging_bytes for candidate in space.candidates()) == 70 * MIB


def test_memory_that_one_save_could_never_fill_is_not_tried() -> None:
    found = space_of(limits()).candidates()
    alone = [c for c in found if c.in_flight == 1 and c.chunk_bytes <= 50 * MIB]
    assert max(candidate.staging_bytes for candidate in alone) == 100 * MIB


def test_given_values_are_the_only_ones() -> None:
    axes = Axes((3,), (5, 6), (100_000,), (50 * MIB,), ("off",))
    found = space_of(limits(), axes).candidates()
    assert found == [Candidate(3, writers, 102_400, 50 * MIB, "off") for writers in (5, 6)]


def test_direct_writes_are_tried_beside_buffered_ones_unless_told() -> None:
    assert {candidate.direct_io for candidate in space_of(limits()).candidates()} == {"auto", "off"}
    told = space_of(limits(), Axes(direct_io=("off", "on", "off")))
    assert told.axes.direct_io == ("on", "off")


def test_of_otherwise_equal_ones_direct_writes_are_cheaper_than_a_full_page_cache() -> None:
    prices = [Candidate(2, 8, MIB, 64 * MIB, direct).price for direct in ("auto", "on", "off")]
    assert prices == sorted(prices)
    assert len(set(prices)) == 3
    fewer = Candidate(2, 1, MIB, 64 * MIB, "off")
    assert Candidate(2, 8, MIB, 64 * MIB, "auto").price < fewer.price


@pytest.mark.parametrize(
    ("given_values", "nearest"), [((), "auto"), (("off",), "off"), (("off", "on"), "on")]
)
def test_the_nearest_to_the_defaults_writes_as_they_do_if_it_may(
    given_values: tuple[str, ...], nearest: str
) -> None:
    space = space_of(limits(), Axes(direct_io=given_values))
    wished = Candidate(2, 8, 8 * MIB, 200 * MIB, "auto")
    assert space.nearest(wished).direct_io == nearest


def test_a_line_along_chunks_takes_the_memory_with_it() -> None:
    space = space_of(limits(800 * MIB, memory=1600 * MIB))
    origin = Candidate(2, 4, MIB, 100 * MIB)
    longest = space.line(origin, "chunk_bytes")[-1]
    assert (longest.chunk_bytes, longest.staging_bytes) == (64 * MIB, 400 * MIB)


@pytest.mark.parametrize(
    ("wrong", "axes", "texts"),
    [
        (
            limits(storage=300 * MIB),
            Axes(),
            ["max_storage=314.58MB", "1 in flight + 2 kept + 1", "at least 419.44MB", "314.58MB)"],
        ),
        (
            limits(storage=500 * MIB),
            Axes(in_flight=(4,)),
            ["max_storage", "4 in flight", "at least 734.01MB"],
        ),
        (limits(memory=MIB), Axes(), ["max_memory=1.05MB", "need 2.1MB", "--chunk-bytes"]),
        (
            limits(memory=64 * MIB),
            Axes(staging_bytes=(128 * MIB,)),
            ["max_memory=67.11MB", "134.22MB"],
        ),
        (
            limits(),
            Axes(chunk_bytes=(32 * MIB,), staging_bytes=(32 * MIB,)),
            ["staging_bytes=33.56MB must hold two chunks (33.56MB)", "at least 67.11MB"],
        ),
    ],
)
def test_nothing_left_is_explained_with_the_nearest_possible(
    wrong: Limits, axes: Axes, texts: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        space_of(wrong, axes)
    for text in texts:
        assert text in str(raised.value)


def test_what_the_message_asks_for_is_enough() -> None:
    with pytest.raises(ConfigError, match=r"give at least 419\.44MB"):
        space_of(limits(storage=419 * MIB // 2))
    assert space_of(limits(storage=419_440_000)).candidates()
