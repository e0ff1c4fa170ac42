"""Several real processes save one step together: sliced, agreed, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_core import load, verify
from tests.crash.warm import Warm
from tests.faults.mounts import mounted
from tests.multirank.crew import all_well
from tests.multirank.jobs import make_state, same

JOBS = "tests.multirank.jobs:"


def run(warm: Warm, name: str, world: int, *, nodes: list[str] | None = None, **more: Any) -> Any:
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call=JOBS + name,
        world_size=world,
        nodes=nodes,
        arguments=more,
    )
    return outcomes


def run_well(warm: Warm, name: str, world: int, **more: Any) -> list[Any]:
    return all_well(run(warm, name, world, **more))


def run_several(
    warm: Warm,
    name: str,
    world: int,
    several: list[dict[str, Any]],
    *,
    nodes: list[str] | None = None,
) -> Any:
    return warm.call(
        "tests.multirank.crew:run_several",
        call=JOBS + name,
        world_size=world,
        several=several,
        nodes=nodes,
    )


def _bytes_of(root: Path, rank: int) -> int:
    return sum(p.stat().st_size for p in root.glob(f"step-*2/shard-{rank:05d}-*"))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_rank_writes_its_share_and_all_restore_every_bit(
    warm: Warm, tmp_path: Path, world: int
) -> None:
    names = ["step-000000000001", "step-000000000002"]
    assert run_well(warm, "save_steps", world, root=str(tmp_path), steps=[1, 2]) == [names] * world
    for found in run_well(warm, "restore_newest", world, root=str(tmp_path)):
        assert found["step"] == 2 and found["same"] and found["borrowed_from"] is None
        assert found["world_size"] == world
    assert verify(tmp_path).ok
    tree = load(tmp_path / names[1])
    assert same(tree, make_state(0, 2))


def test_a_rank_writes_one_share_of_the_replicated_bytes(warm: Warm, tmp_path: Path) -> None:
    world, rows = 4, 1000
    run_well(warm, "save_large", world, root=str(tmp_path), rows=rows)
    state = make_state(0, 1, rows=rows)
    replicated = sum(t.nbytes for t in state["model"].values())
    private = state["sampler"]["order"].nbytes
    for rank in range(world):
        written = sum(p.stat().st_size for p in tmp_path.glob(f"step-*/*-{rank:05d}*"))
        assert written <= (1 / world + 0.01) * replicated + private


@pytest.mark.parametrize(("saved", "restored"), [(1, 2), (2, 1), (4, 2), (2, 4), (3, 4)])
def test_any_number_of_ranks_restores(
    warm: Warm, tmp_path: Path, saved: int, restored: int
) -> None:
    run_well(warm, "save_steps", saved, root=str(tmp_path), steps=[1, 2])
    results = run_well(warm, "restore_newest", restored, root=str(tmp_path))
    for rank, found in enumerate(results):
        assert found["step"] == 2 and found["same"]
        assert found["borrowed_from"] == (None if rank < saved else rank % saved)


@pytest.mark.parametrize("good", [0, 2], ids=["at first", "later"])
@pytest.mark.parametrize("how", ["shape", "name", "contents"])
def test_a_rank_with_another_state_is_named_with_the_leaf(
    warm: Warm, tmp_path: Path, how: str, good: int
) -> None:
    leaf = {"shape": "layer1.bias", "name": "extra", "contents": "layer2.bias"}[how]
    found = run_well(warm, "structures_differ", 2, root=str(tmp_path), how=how, good=good)
    for said in found:
        assert all(one.startswith("step-") for one in [*said[:good], said[good + 1]]), said
        assert "rank 1" in said[good] and leaf in said[good], said


WHOLE, SHORT, OTHER = (
    [[0, 1500], [1500, 3000]],
    [[0, 1000], [1500, 2500]],
    [[0, 2000], [2000, 3000]],
)
GAPS = {
    "both ranks": (SHORT, "bytes 4000 to 6000 of 12000"),
    "one rank": ([[0, 1500], [1600, 3000]], "bytes 6000 to 6400 of 12000"),
    "a part is empty": ([[0, 1500], [1500, 1500]], "bytes 6000 to 12000 of 12000"),
}


@pytest.mark.parametrize("changes", [{}, {"share_unchanged": True}], ids=["plain", "shared"])
@pytest.mark.parametrize("nodes", [None, ["a", "b"]], ids=["one root", "nodes"])
@pytest.mark.parametrize("how", list(GAPS))
def test_no_step_is_published_whose_parts_leave_a_gap_and_the_good_ones_stay(
    warm: Warm, tmp_path: Path, how: str, nodes: list[str] | None, changes: dict[str, Any]
) -> None:
    wrong, gap = GAPS[how]
    cuts = [WHOLE, WHOLE, wrong, wrong, WHOLE, OTHER, WHOLE, wrong]
    more = {"root": str(tmp_path), "cuts": cuts, "keep_last": 1}
    found = run_well(warm, "cut_otherwise", 2, nodes=nodes, **more, **changes)
    for outcomes, left in found:
        for step, (cut, text) in enumerate(zip(cuts, outcomes, strict=True), 1):
            if cut is wrong:
                assert (
                    text.startswith("CommitError")
                    and f"of 'w' do not make it up: nothing of {gap}" in text
                )
                assert "rank 0" in text and "step-" not in text
            else:
                assert text == f"step-{step:012d}"
        assert left == ["step-000000000007"]


def test_the_first_step_of_parts_that_leave_a_gap_is_not_published(
    warm: Warm, tmp_path: Path
) -> None:
    found = run_well(warm, "cut_otherwise", 2, root=str(tmp_path), cuts=[SHORT, WHOLE, SHORT])
    for outcomes, left in found:
        assert ["'w'" in text for text in outcomes] == [True, False, True]
        assert left == ["step-000000000002"]


def test_parts_that_overlap_make_up_a_leaf(warm: Warm, tmp_path: Path) -> None:
    cuts = [[[0, 2000], [1000, 3000], [0, 3000]], [[0, 1000], [0, 0], [500, 3000]]]
    for outcomes, _ in run_well(warm, "cut_otherwise", 3, root=str(tmp_path), cuts=cuts):
        assert outcomes == ["step-000000000001", "step-000000000002"]
    assert verify(tmp_path).ok
    tree = load(tmp_path)
    assert tree["w"].tolist() == list(range(3000)) and tree["number"].item() == 1
    assert tree["nothing"].shape == (0, 4)


def test_parts_that_leave_a_gap_at_the_end_of_a_layer_wise_save_are_not_published(
    warm: Warm, tmp_path: Path
) -> None:
    for outcomes in run_well(warm, "gap_at_seal", 2, root=str(tmp_path)):
        assert [outcomes[0], outcomes[2]] == ["step-000000000001", "step-000000000003"]
        assert "'part'" in outcomes[1] and "bytes 360 to 400 of 800" in outcomes[1]


def test_ranks_that_save_different_steps_are_told_so_and_go_on(warm: Warm, tmp_path: Path) -> None:
    for said in run_well(warm, "steps_differ", 2, root=str(tmp_path)):
        assert said[0].startswith("step-") and said[2].startswith("step-")
        assert said[1].startswith("CommitError")
        assert "rank 1" in said[1] and "it saves step 12 while rank 0 saves step 11" in said[1]


def test_training_never_waits_for_the_commit_of_a_slow_rank(warm: Warm, tmp_path: Path) -> None:
    pending = run_well(
        warm, "slow_rank", 3, root=str(tmp_path / "root"), gate=str(tmp_path / "gate")
    )
    # Rank 0 had staged two steps and could train on while the last rank had written nothing.
    assert pending[0] == [True, True]


@pytest.mark.parametrize(
    "changes",
    [{}, {"blocking": True, "pipelined": False, "on_error": "raise"}],
    ids=["behind training", "blocking"],
)
def test_a_full_disk_of_one_rank_fails_the_step_on_all_and_the_next_one_works(
    warm: Warm, tmp_path: Path, changes: dict[str, Any]
) -> None:
    for rank, found in enumerate(run_well(warm, "full_disk", 3, root=str(tmp_path), **changes)):
        assert found[0] == "step-000000000001" and found[2] == "step-000000000003"
        assert "No space left" in found[1], found
        assert rank == 1 or "rank 1" in found[1]
    assert not (tmp_path / "step-000000000002").exists()
    # A rank may write into the failed attempt after the leader has removed it: the next start clears that.
    found = run_well(warm, "restore_newest", 3, root=str(tmp_path))
    assert all(one["step"] == 3 and one["same"] for one in found)
    assert not list(tmp_path.glob(".inflight/*"))


def test_a_rank_that_cannot_start_a_save_fails_it_for_all_and_once(
    warm: Warm, tmp_path: Path
) -> None:
    first, second = run_well(warm, "refuses_to_start", 2, root=str(tmp_path))
    assert second[0].startswith("ConfigError") and "odd" in second[0]
    assert "rank 1" in first[0]
    assert first[1:] == second[1:] == ["step-000000000002", "step-000000000003"]


def test_an_interrupt_on_one_rank_fails_the_step_on_all_at_once_and_the_next_one_works(
    warm: Warm, tmp_path: Path
) -> None:
    first, second = run_well(warm, "interrupted", 2, root=str(tmp_path))
    assert second[1] == "KeyboardInterrupt"
    assert "rank 1" in first[1] and "KeyboardInterrupt" in first[1]
    assert [first[0], first[2]] == [second[0], second[2]]
    assert first[2] == "step-000000000003"


@pytest.mark.parametrize("world", [2, 3])
def test_layers_may_become_final_in_another_order_on_each_rank(
    warm: Warm, tmp_path: Path, world: int
) -> None:
    expected = [{"same": True, "step": 2}] * world
    assert run_well(warm, "layerwise", world, root=str(tmp_path)) == expected


def test_buffers_of_a_module_are_those_of_the_first_rank(warm: Warm, tmp_path: Path) -> None:
    found = run_well(warm, "buffers_are_the_first_ranks", 3, root=str(tmp_path))
    assert found == [[1.0, 1.0]] * 3


def test_a_root_that_is_not_shared_is_refused_before_training(warm: Warm, tmp_path: Path) -> None:
    first, second = run_well(warm, "wrong_root", 2, root=str(tmp_path))
    assert "is not the directory that rank 0 has opened" in second
    assert "rank 1 could not open its root" in first


def test_storage_stays_bounded_with_several_writers(warm: Warm, tmp_path: Path) -> None:
    few = run_well(warm, "storage_after_many", 2, root=str(tmp_path / "few"), count=6)
    many = run_well(warm, "storage_after_many", 2, root=str(tmp_path / "many"), count=30)
    assert many[0] <= few[0] * 1.05


@pytest.mark.parametrize("nodes", [None, ["a", "a", "b"]], ids=["shared", "nodes"])
def test_each_rank_overwrites_in_memory_what_it_has_mapped(
    warm: Warm, tmp_path: Path, nodes: list[str] | None
) -> None:
    with mounted("tmpfs", tmp_path) as where:
        for found in run_well(warm, "save_in_memory", 3, nodes=nodes, root=str(where), steps=14):
            assert found == [["direct", 0]] * 6
        # Whoever comes next has nothing mapped, and takes what is there all the same.
        if nodes is None:
            slots = list((where / ".slots").iterdir())
            assert slots and all(slot.name.startswith("for-") for slot in slots)
            run_well(warm, "save_in_memory", 2, root=str(where), steps=10)
            assert verify(where).ok
        for found in run_well(warm, "restore_newest", 3, nodes=nodes, root=str(where)):
            assert found["same"]
