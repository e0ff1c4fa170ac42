"""Real DeepSpeed on CPU, 2 and 4 ranks: pipelines, experts, offloading, fp16, optimizers, partial loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.deepspeed.launch import Job, run

Results = dict[str, list[Any]]

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}
SHARED_WRITES = {"checkpoint": {"parallel_write": {"pipeline_stage": True}}}


def piped(**how: Any) -> dict[str, Any]:
    """Two stages, two micro-batches."""
    settings = {name: how.pop(name, False) for name in ("tied", "frozen")}
    return {
        "model": "pipe",
        "accumulate": 2,
        "model_settings": {"stages": 2, **settings},
        **how,
    }


def expert(ep_size: int, experts: int, **how: Any) -> dict[str, Any]:
    """A layer of experts."""
    return {"model": "experts", "model_settings": {"experts": experts, "ep_size": ep_size}, **how}


def offloaded(zero: int, *what: str, **how: Any) -> dict[str, Any]:
    """DeepSpeed's Adam for CPUs; `what` besides the optimizer is on the CPU."""
    sections = {f"offload_{name}": {"device": "cpu"} for name in ("optimizer", *what)}
    return {
        "zero": zero,
        "optimizer": "config",
        "settings": {**ADAM, "zero_optimization": sections},
        **how,
    }


BF16: dict[str, Any] = {"dtype": "bf16"}
# Groups of experts stay for the life of a process, and DeepSpeed names files by the largest: so 1 before 2.
PAIR: dict[str, dict[str, Any]] = {
    "pipeline": piped(),
    "pipeline, zero 1, bf16": piped(zero=1, **BF16),
    "pipeline, tied layers": piped(tied=True),
    "experts of each rank": expert(1, 2),
    "experts of each rank, zero 2, bf16": expert(1, 2, zero=2, **BF16),
    "experts shared out": expert(2, 4),
    "experts shared out, zero 2, bf16": expert(2, 4, zero=2, **BF16),
    "offload, zero 1, bf16": offloaded(1, **BF16),
    "offload, zero 2": offloaded(2),
    "offload, zero 3, bf16": offloaded(3, **BF16),
    "offload of parameters too, zero 3": offloaded(3, "param", init=True),
    "fp16, not fused": {"dtype": "fp16", "settings": FP16},
    "fp16, fused": {"dtype": "fp16", "optimizer": "config", "settings": FP16 | ADAM},
    "fp16, zero 2": {"zero": 2, "dtype": "fp16", "settings": FP16},
    "fp16, zero 3": {"zero": 3, "dtype": "fp16", "settings": FP16},
    "bf16 without zero": BF16,
    "fused Adam": {"optimizer": "config", "settings": ADAM},
    "SGD": {"optimizer": "SGD"},
    "RMSprop, zero 1": {"zero": 1, "optimizer": "RMSprop"},
    "two micro-batches, zero 2": {"zero": 2, "accumulate": 2, **BF16},
    "three micro-batches, zero 3": {"zero": 3, "accumulate": 3, **BF16},
    "zero.Init": {"zero": 3, "init": True, **BF16},
    "sparse gradients": {"model": "words", "optimizer": "SGD"},
    "DeepSpeed's scheduler": {"zero": 1, "settings": WARMUP, **BF16},
}
FOUR: dict[str, dict[str, Any]] = {
    "zero 1": {"zero": 1, **BF16},
    "zero 2": {"zero": 2, **BF16},
    "zero 3": {"zero": 3, **BF16},
    "pipeline and data": piped(),
    "pipeline and data, zero 1, bf16, shared writes": piped(zero=1, settings=SHARED_WRITES, **BF16),
    "experts shared out and data": expert(2, 4, zero=2, **BF16),
}
HALFWAY = {f"zero {zero}": {"zero": zero, "accumulate": 2, **BF16} for zero in (1, 2, 3)}
CHOICES = {f"zero {zero}": {"zero": zero, **BF16} for zero in range(4)} | {
    "experts": expert(2, 4, zero=2, **BF16),
    "pipeline": piped(zero=1, **BF16),
}
BARRIERS = {"data": {"zero": 2, **BF16}, "pipeline": piped(), "pipeline, zero 1": piped(zero=1)}
VALIDATIONS = ("Fail", "Warn", "Ignore")

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"barred {name}": ("modes.barred", way) for name, way in BARRIERS.items()},
    **{f"unbarred {name}": ("modes.unbarred", way) for name, way in BARRIERS.items()},
    **{f"halfway {name}": ("modes.halfway", way) for name, way in HALFWAY.items()},
    **{f"choices {name}": ("loads.choices", way) for name, way in CHOICES.items()},
    **{f"tags {name}": ("modes.tags", {"validation": name}) for name in VALIDATIONS},
    **{f"edges {zero}": ("loads.edges", {"zero": zero}) for zero in range(4)},
    **{f"frozen {zero}": ("loads.frozen", {"zero": zero}) for zero in (0, 2)},
    **{f"models {zero}": ("loads.models", {"zero": zero}) for zero in (0, 1)},
    "shared": ("modes.shared", piped(frozen=True)),
    "between": ("modes.between", {"zero": 3, **BF16}),
    "two": ("modes.two", {"zero": 1, **BF16}),
    "client state": ("modes.client_state", {}),
    "older": ("loads.older", {}),
    "inference": ("loads.inference", {}),
    "experts": ("loads.experts", expert(2, 4, zero=2, **BF16)),
}

pytestmark = pytest.mark.timeout(1000)  # the first test waits for compilers and both launches


@pytest.fixture(scope="module")
def kernels() -> None:
    """DeepSpeed's optimizers are compiled here, once, and not by several ranks that a deadline ends."""
    program = Path(__file__).parents[3] / ".ci" / "warm_deepspeed.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def pair(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank of two found, by the name of the job."""
    jobs = {name: ("modes.exact", way) for name, way in PAIR.items()} | OTHERS
    return launched(jobs, ranks=2, place=tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def four(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same, of four."""
    jobs = {name: ("modes.exact", way) for name, way in FOUR.items()}
    return launched(jobs, ranks=4, place=tmp_path_factory.mktemp("four"))


def launched(jobs: dict[str, tuple[str, dict[str, Any]]], *, ranks: int, place: Path) -> Results:
    """All jobs, in one launch."""
    planned = [
        Job(call, place / str(number), arguments)
        for number, (call, arguments) in enumerate(jobs.values())
    ]
    return dict(
        zip(jobs, run(planned, ranks=ranks, place=place / "jobs", limit_s=400), strict=True)
    )


def same(ends: dict[str, Any]) -> bool:
    """Whether all came to the same."""
    return len({str(end) for end in ends.values()}) == 1


def check_exact(found: list[Any]) -> None:
    """The ends are those of the uninterrupted run, and the tags have DeepSpeed's files and ours."""
    ranks = len(found)
    assert found[0]["behind"], "nothing was left to copy behind training"
    for rank in found:
        assert same(rank["ends"]), rank["ends"]
        assert rank["latest"] == "global_step5"
        assert rank["whole"] == [True] * 5
        ours, plain = rank["names"]
        assert ours == plain
        assert rank["own names"] == [
            ["manifest.json", *[f"rank-{number:05d}.json" for number in range(ranks)]],
            [],
        ]
        assert rank["outside"][0] == rank["outside"][1]


@pytest.mark.parametrize("name", PAIR)
def test_two_ranks_go_on_bit_for_bit_with_either_engine(pair: Results, name: str) -> None:
    check_exact(pair[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_go_on_bit_for_bit_with_either_engine(four: Results, name: str) -> None:
    check_exact(four[name])


def test_layers_of_a_pipeline_are_files_of_their_own_once_over_all_ranks(
    pair: Results, four: Results
) -> None:
    for found in (pair["pipeline"], four["pipeline and data, zero 1, bf16, shared writes"]):
        ours, _ = found[0]["names"]
        layers = [name for name in ours if name.startswith("layer_")]
        assert layers == [f"layer_{number:02d}-model_states.pt" for number in range(7)]


def test_the_file_of_a_frozen_layer_of_a_pipeline_is_linked_and_no_other(pair: Results) -> None:
    for found in pair["shared"]:
        still, *others = [name for name in found["names"] if name.startswith("layer_")]
        assert found["names"].pop(still) == 4, "the tags of all steps but the first"
        # Those of a layer without parameters hold nothing that changes either.
        assert {found["names"].pop(name) for name in others} == {1, 4}
        assert set(found["names"].values()) == {1}
        assert found["whole"] == [True] * 5
        assert same(found["ends"])


def test_files_of_experts_hold_them_alone(pair: Results) -> None:
    for found in pair["experts"]:
        assert len(found) == 4
        assert all(needed == stored > 0 for needed, stored in found.values())


@pytest.mark.parametrize("name", BARRIERS)
def test_an_update_waits_until_everything_is_copied(pair: Results, name: str) -> None:
    for found in pair[f"barred {name}"]:
        assert found == {"steps": 2, "same": True, "moved": True, "latest": "global_step2"}


@pytest.mark.parametrize("name", BARRIERS)
def test_a_missing_barrier_would_be_found(pair: Results, name: str) -> None:
    for found in pair[f"unbarred {name}"]:
        assert "changed during staging" in found["problem"]
        assert found["latest"] == "global_step1"


@pytest.mark.parametrize("name", HALFWAY)
def test_a_save_between_micro_batches_is_what_plain_deepspeed_saves(
    pair: Results, name: str
) -> None:
    for found in pair[f"halfway {name}"]:
        assert same(found["ends"])
        assert same(found["resumed"])


@pytest.mark.parametrize("name", CHOICES)
def test_a_part_that_is_not_loaded_is_left_alone_as_by_plain_deepspeed(
    pair: Results, name: str
) -> None:
    for found in pair[f"choices {name}"]:
        for choice, by in found.items():
            assert by["ours"] == by["plain"], choice
            assert by["ours"]["step"] == 3
        ends = [by["ours"]["at once"]["scheduler"] for by in found.values()]
        assert ends[0] != ends[1], "the scheduler was loaded, or not, whatever was asked for"


@pytest.mark.parametrize("validation", VALIDATIONS)
def test_tags_that_differ_between_ranks_are_refused_or_that_of_the_first_one_is_taken(
    pair: Results, validation: str
) -> None:
    for rank, found in enumerate(pair[f"tags {validation}"]):
        assert len(found["problems"]) == (validation == "Fail"), found
        assert found["there"] == ([] if validation == "Fail" else ["latest", "rank0"])
        assert found["latest"] == "same"
        warned = ["rank 1 passed the tag 'rank1' and rank 0 'rank0'"] if rank else []
        assert [text.partition(":")[0] for text in found["warned"]] == (
            warned if validation == "Warn" else []
        )


@pytest.mark.parametrize("zero", range(4))
def test_loading_right_after_a_save_and_saving_right_after_a_load(pair: Results, zero: int) -> None:
    for found in pair[f"edges {zero}"]:
        assert len({str(end) for end in found["ends"]}) == 1
        assert found["latest"] == "again"


@pytest.mark.parametrize("zero", [0, 2])
def test_frozen_parameters_are_left_out_when_asked(pair: Results, zero: int) -> None:
    for found in pair[f"frozen {zero}"]:
        assert found["ours"] == found["plain"]
        whole, trained = found["ours"]
        assert set(whole["module"]) - set(trained["module"]) == {"frozen.weight", "frozen.bias"}
        assert trained["fragments"] == []
        assert found["kept"]


@pytest.mark.parametrize("zero", [0, 1])
def test_another_model_takes_what_it_knows(pair: Results, zero: int) -> None:
    for found in pair[f"models {zero}"]:
        assert found["ours"] == found["plain"]
        assert found["ours"]["refused"] == "RuntimeError"
        assert "last.weight" in found["ours"]["taken"]


def test_weights_that_are_exported_between_two_saves_disturb_neither(pair: Results) -> None:
    for found in pair["between"]:
        assert found["there"] and found["beside"] and found["whole"]
        assert found["latest"] == "again"
        assert {"first.weight", "frozen.weight", "last.bias"} < set(found["weights"])


def test_two_engines_save_by_turns(pair: Results) -> None:
    for found in pair["two"]:
        first, second = found["ends"]
        assert first != second
        assert found["shared"] == found["ends"]
        assert found["own"] == found["ends"]
        assert found["latest"] == ["e1s3", "global_step3", "global_step3"]
        assert found["tags"] == [f"e{engine}s{step}" for engine in (0, 1) for step in (1, 2, 3)]


def test_tensors_anywhere_in_client_state_are_those_of_the_call(pair: Results) -> None:
    for found in pair["client state"]:
        assert found["values"] == [0, 1, 2, 3, 4, 5]
        assert found["kinds"] == ["defaultdict", "Pair"]
        assert found["left"] == 1


def test_weights_without_optimizer_states_are_those_of_the_tag_that_was_asked_for(
    pair: Results,
) -> None:
    for found in pair["older"]:
        (whole, expected), (older, weights), (newer, others) = found["loaded"]
        assert [whole, older, newer] == ["global_step1", "global_step1", "global_step3"]
        assert weights == expected != others


def test_an_engine_without_optimizer_waits_for_the_save_and_loads_it(pair: Results) -> None:
    for found in pair["inference"]:
        trained, loaded = found["weights"]
        assert loaded == trained
