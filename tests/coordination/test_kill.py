"""`kill -9` of any rank before each of its writes: nothing half is published, nobody hangs, all know who."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.bench.meeting import free_port
from ckpt_core.coordination import Ballot
from ckpt_core.coordination.client import serve
from tests.coordination.crew import Crew, Said, Seat

WORLD = 3
NODES = ("a", "a", "b")
LEADERS = (0, 2)
WRITES = {0: 13, 1: 6, 2: 8}
"""One more than each rank makes in one attempt, so that with the last number it is not killed at all."""


def save_once(seat: Seat) -> str:
    store = seat.join()
    attempt = store.attempt_id(7)
    seat.leave_file(f"shard-{seat.rank}")
    ranks = store.agree(attempt, 7, Ballot("plan", seat.rank), 20.0)
    if store.info.leads:
        assert ranks == store.info.members
        seat.leave_file(f"published-{seat.rank}")
    store.settle(attempt, 7, None, 20.0)
    store.close()
    return "committed"


@contextlib.contextmanager
def _crews(tmp_path: Path, victim: int, elsewhere: bool) -> Iterator[list[tuple[Path, Crew]]]:
    """One crew for each write before which the victim can be killed, all at once."""
    with contextlib.ExitStack() as stack:
        crews = []
        for number in range(1, WRITES[victim] + 1):
            folder = tmp_path / str(number)
            folder.mkdir()
            port = free_port()
            if elsewhere:
                server = serve("127.0.0.1", 0)
                stack.callback(lambda kept: None, server)
                port = server.port
            seats = [
                Seat(
                    rank,
                    WORLD,
                    "127.0.0.1",
                    port,
                    str(folder),
                    hosted=not elsewhere,
                    node=NODES[rank],
                    dead_after=2.0,
                    die_before_write=number if rank == victim else None,
                )
                for rank in range(WORLD)
            ]
            crews.append((folder, stack.enter_context(Crew(save_once, seats))))
        yield crews


def _check(folder: Path, said: list[Said | None], victim: int) -> None:
    published = [rank for rank in LEADERS if (folder / f"published-{rank}").exists()]
    shards = [rank for rank in range(WORLD) if (folder / f"shard-{rank}").exists()]
    assert not published or len(shards) == WORLD, "published without a shard"
    survivors = [one for rank, one in enumerate(said) if rank != victim]
    for one in survivors:
        assert one is not None
        assert one.ok or one.kind in ("CommitError", "CoordinationTimeout"), one
        if not one.ok and said[victim] is None:
            assert victim in one.blamed or f"rank {victim}" in one.text, one
    texts = [one.text for one in survivors if one is not None and not one.ok]
    if any(one is not None and one.ok for one in survivors):
        assert set(published) >= set(LEADERS) - {victim}
        assert not any("is not committed:" in text for text in texts), said
    if said[victim] is not None:
        assert all(one is not None and one.ok for one in said), said


@pytest.mark.parametrize("kept", ["by rank 0", "elsewhere"])
@pytest.mark.parametrize("victim", range(WORLD))
def test_a_rank_killed_before_any_of_its_writes_leaves_no_half_step_and_no_hang(
    tmp_path: Path, victim: int, kept: str
) -> None:
    with _crews(tmp_path, victim, kept == "elsewhere") as crews:
        endings = [(folder, crew.said()) for folder, crew in crews]
    for folder, said in endings:
        _check(folder, said, victim)
    assert any(said[victim] is None for _, said in endings)
    assert any(said[victim] is not None for _, said in endings), "more writes than were tried"
