"""Parts of distributed leaves are told at length when they are new, and compared with the whole by rank 0."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_core.share import Cut, Cuts
from ckpt_core.types import Block, LeafSpec, Slice

Rows = list[tuple[LeafSpec, Slice | None]]


def run(begin: int, end: int, name: str = "w") -> Rows:
    """Elements of a leaf of ten."""
    return [(LeafSpec(name, "float32", (10,)), Slice(4 * begin, 4 * (end - begin)))]


def box(row: int, rows: int) -> Rows:
    """Rows of a leaf of four by three."""
    block = Block((row, 0), (rows, 3))
    return [(LeafSpec("b", "float32", (4, 3)), Slice(0, 12 * rows, block))]


def column(index: int) -> Rows:
    """The first column of it, or the other two."""
    block = Block((0, index), (4, 1 + index))
    return [(LeafSpec("b", "float32", (4, 3)), Slice(0, 16 * (1 + index), block))]


class Job:
    """Ranks that save together."""

    def __init__(self, ranks: int) -> None:
        self.ranks = [Cuts(2) for _ in range(ranks)]

    def save(self, *rows: Rows) -> tuple[list[bool], str | None]:
        """Which ranks told where their parts lie, and what rank 0 found to be lacking."""
        votes = [cuts.vote(Cut.of(one)) for cuts, one in zip(self.ranks, rows, strict=True)]
        said: list[Any] = [vote.say() for vote in votes if vote is not None]
        lack = self.ranks[0].lack(said)
        for cuts, vote in zip(self.ranks, votes, strict=True):
            assert vote is not None
            if lack is None:
                vote.agreed()
            else:
                cuts.forget()
        return [text != "" for _, text in said], lack


def test_only_a_rank_whose_parts_are_others_than_at_the_last_commit_tells_them() -> None:
    job = Job(2)
    assert job.save(run(0, 5), run(5, 10)) == ([True, True], None)
    assert job.save(run(0, 5), run(5, 10)) == ([False, False], None)
    assert job.save(run(0, 6), run(5, 10)) == ([True, False], None)
    assert job.save(run(0, 6), run(5, 10)) == ([False, False], None)
    told, lack = job.save(run(0, 6), run(7, 10))
    assert told == [False, True]
    assert lack is not None and "'w'" in lack and "bytes 24 to 28 of 40" in lack
    assert job.save(run(0, 5), run(5, 10)) == ([True, True], None), "after a failure all tell"


def test_what_rank_0_does_not_know_is_told_with_the_next_save() -> None:
    job = Job(2)
    assert job.save(run(0, 5), run(5, 10)) == ([True, True], None)
    # As if this one had told it to nobody.
    job.ranks[0] = Cuts(2)
    told, lack = job.save(run(0, 5), run(5, 10))
    assert told == [True, False] and lack is not None and "rank 1" in lack
    assert job.save(run(0, 5), run(5, 10)) == ([True, True], None)


def halves(cut: int, name: str = "w") -> list[Rows]:
    return [run(0, cut, name), run(cut, 10, name)]


def test_what_a_rank_has_told_is_known_behind_as_many_saves_as_may_be_under_way() -> None:
    ranks = [Cuts(40), Cuts(40)]
    first = [cuts.vote(Cut.of(rows)) for cuts, rows in zip(ranks, halves(5), strict=True)]
    assert ranks[0].lack([vote.say() for vote in first if vote]) is None
    for vote in first:
        assert vote is not None
        vote.agreed()
    for turn in range(80):  # voted on, and not committed yet
        said = [Cut.of(rows) for rows in halves(5, f"w{turn}")]
        assert ranks[0].lack([[cut.digest, cut.text] for cut in said]) is None
    assert ranks[0].lack([vote.say() for vote in first if vote]) is None


def test_cuts_that_change_with_each_save_are_not_kept_for_ever() -> None:
    job = Job(2)
    for turn in range(200):
        cut = turn % 50 % 11
        assert job.save(run(0, cut), run(cut, 10))[1] is None
        job.save(run(0, 10, f"w{turn}"), run(0, 0, f"w{turn}"))
    assert max(len(job.ranks[0]._whole), *map(len, job.ranks[0]._texts.values())) <= 16


@pytest.mark.parametrize(
    ("rows", "lack"),
    [
        ((box(0, 2), box(2, 2)), None),
        ((box(0, 3), box(1, 3)), None),
        ((column(0), column(1)), None),
        ((column(0), column(0)), "elements [0:4, 1:3] of [4, 3]"),
        ((box(0, 2), column(1)), "elements [2:4, 0:1] of [4, 3]"),
        ((box(0, 2), box(3, 1)), "elements [2:3, 0:3] of [4, 3]"),
        ((box(0, 2), [(box(0, 2)[0][0], None)]), "elements [2:4, 0:3] of [4, 3]"),
        (([(box(0, 2)[0][0], None)], [(box(0, 2)[0][0], None)]), "nothing of it"),
        (([(LeafSpec("n", "int64", ()), Slice(0, 0))],) * 2, "bytes 0 to 8 of 8"),
        (([(LeafSpec("n", "int64", ()), Slice(0, 8))],) * 2, None),
        (([(LeafSpec("e", "int64", (0, 3)), Slice(0, 0))],) * 2, None),
        (([(LeafSpec("e", "int64", (0, 3)), None)],) * 2, "nothing of it"),
    ],
)
def test_what_no_rank_stores_is_named(rows: tuple[Rows, Rows], lack: str | None) -> None:
    found = Job(2).save(*rows)[1]
    assert found is None if lack is None else found is not None and lack in found


def test_the_leaf_that_lacks_something_is_named_among_others_of_its_shape() -> None:
    whole, short = [run(0, 5, f"w{i}")[0] for i in range(9)], run(0, 5, "w9")
    rest = [run(5, 10, f"w{i}")[0] for i in range(9)]
    found = Job(2).save(whole + short, rest + run(6, 10, "w9"))[1]
    assert found is not None and "'w9'" in found and "bytes 20 to 24 of 40" in found
