"""Each run strikes at a part of the places, and all runs together at all of them."""

from __future__ import annotations

import pytest

from tests import places


@pytest.mark.parametrize(("count", "most"), [(100, 7), (8, 7), (1000, 30), (3, 2)])
def test_many_runs_together_strike_everywhere(
    monkeypatch: pytest.MonkeyPatch, count: int, most: int
) -> None:
    struck: set[int] = set()
    for number in range(300):
        monkeypatch.setenv(places.VARIABLE, str(number))
        found = places.some(range(count), most, of="it")
        assert 0 < len(found) <= most
        assert found == places.some(range(count), most, of="it"), "not the same places again"
        struck |= set(found)
    assert struck == set(range(count))


@pytest.mark.parametrize("number", ["5", "all"])
def test_few_places_are_all_struck(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv(places.VARIABLE, number)
    assert places.some("abc", 3, of="it") == ["a", "b", "c"]
    assert places.some("", 3, of="it") == []


def test_all_means_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(places.VARIABLE, "all")
    assert places.some(range(99), 3, of="it") == list(range(99))


def test_what_is_not_told_is_drawn_once_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(places.VARIABLE)
    drawn = places.run_number()
    assert drawn == places.run_number() and int(drawn) >= 0
    assert places.header().startswith(f"{places.VARIABLE}={drawn} ")


def test_all_can_be_struck_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[int] = []
    for part in range(1, 5):
        monkeypatch.setenv(places.VARIABLE, f"{part}/4")
        struck += places.some(range(99), 3, of="it")
    assert sorted(struck) == list(range(99))
