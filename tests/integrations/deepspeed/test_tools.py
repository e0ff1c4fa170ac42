"""DeepSpeed's own tools on tags that 2 ranks saved: they make of them what they make of DeepSpeed's own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed.launch import Job, run, torchrun

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class State:
    """What is saved; in a folder of its own, by both engines."""

    zero: int
    dtype: str
    tied: bool = True

    def __str__(self) -> str:
        return f"ZeRO-{self.zero} {self.dtype}{'' if self.tied else ' untied'}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a job that makes engines."""
        return {"zero": self.zero, "dtype": self.dtype, "tied": self.tied}


STATES = [
    State(1, "bf16"),
    State(2, "bf16"),
    State(3, "bf16"),
    State(1, "fp32", tied=False),
    State(3, "fp32", tied=False),
]
ELASTIC = [(1, True), (2, True), (2, False)]
INSIDE: dict[str, dict[str, Any]] = {
    "readers": {},
    "persisted": {},
    "collected": {},
    "weights_of_a_tag": {},
    "damaged": {"seeds": 24},
}
LOADS = {1: ["all", "no optimizer", "module"], 2: ["all", "no optimizer", "module"], 4: ["all"]}
TAG = "global_step2"

each_state = pytest.mark.parametrize("state", STATES, ids=str)
hub = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None
    and not os.environ.get("REQUIRE_INTEGRATIONS"),
    reason="zero_to_fp32.py needs huggingface_hub: pip install huggingface_hub",
)

Results = dict[Any, list[Any]]
"""Key of a job -> what each rank found."""


def _run(jobs: dict[Any, Job], place: Path, *, ranks: int = 2, **how: Any) -> Results:
    found = run(list(jobs.values()), ranks=ranks, place=place, **how)
    return dict(zip(jobs, found, strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a folder for each state."""
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def written(place: Path) -> Results:
    """What 2 ranks saved, and what they found in their own process."""
    jobs: dict[Any, Job] = {
        state: Job("tools.written", place / str(state), state.arguments) for state in STATES
    }
    for zero, elastic in ELASTIC:
        arguments = {"zero": zero, "elastic": elastic}
        folder = place / f"elastic {zero} {elastic}"
        jobs[zero, elastic] = Job("tools.elastic_written", folder, arguments)
    for name, arguments in INSIDE.items():
        jobs[name] = Job(f"inside.{name}", place / name, arguments)
    return _run(jobs, place / "writing")


@pytest.fixture(scope="module")
def read(place: Path, written: Results) -> Results:
    """What DeepSpeed alone makes of it, on 2 ranks that have not imported this package."""
    jobs: dict[Any, Job] = {}
    for state in STATES:
        folder, zero = place / str(state), {"zero": state.zero}
        jobs["resumed", state] = Job("plain.resumed", folder, state.arguments)
        if state.zero == 3:
            how = {"dtype": state.dtype, "tied": state.tied}
            jobs["inference", state] = Job("plain.inference", folder, how)
        jobs["inspected", state] = Job("plain.inspected", folder, zero)
        jobs["opened", state] = Job("plain.opened", folder)
        jobs["converted", state] = Job("plain.converted", folder, {"tied": state.tied})
        jobs["universal", state] = Job("plain.universal", folder)
    return _run(jobs, place / "reading", start=torchrun)


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{} ranks".format)
def loaded(request: pytest.FixtureRequest, place: Path, read: Results) -> tuple[int, Results]:
    """What other numbers of ranks load."""
    ranks: int = request.param
    jobs: dict[Any, Job] = {}
    for state in STATES:
        arguments = state.arguments | {"loads": LOADS[ranks]}
        jobs[state] = Job("tools.from_universal", place / str(state), arguments)
    for zero, elastic in ELASTIC:
        folder = place / f"elastic {zero} {elastic}"
        jobs[zero, elastic] = Job("tools.elastic_loaded", folder, {"zero": zero})
    if ranks == 2:
        jobs["beside"] = Job("tools.saved_beside_universal", place / str(STATES[0]))
    return ranks, _run(jobs, place / f"loading {ranks}", ranks=ranks)


# -- DeepSpeed alone -------------------------------------------------------------------------------


@each_state
def test_the_directory_holds_what_deepspeed_puts_there(
    place: Path, written: Results, state: State
) -> None:
    root, tag = written[state][0]["names"]
    plain = place / str(state) / "plain"
    assert {name for name in root if name[0] != "."} == {path.name for path in plain.iterdir()}
    assert {"zero_to_fp32.py", "zero_to_torch.py", "latest", "pytorch_model.bin"} < set(root)
    ours = {name for name in tag if name != "manifest.json" and not name.startswith("rank-")}
    assert ours == {path.name for path in (plain / TAG).iterdir()}


@each_state
def test_deepspeed_without_this_package_goes_on_from_it(
    written: Results, read: Results, state: State
) -> None:
    for rank, found in enumerate(read["resumed", state]):
        saved = written[state][rank]
        for tag in ("None", TAG):
            assert found[tag] == [TAG, 2, saved["saved"], saved["end"]]


@pytest.mark.parametrize("state", [state for state in STATES if state.zero == 3], ids=str)
def test_an_engine_for_inference_loads_its_weights(
    written: Results, read: Results, state: State
) -> None:
    for rank, found in enumerate(read["inference", state]):
        assert found["ours"] == found["plain"]
        # In fp32, 0.19.8 gives such an engine other weights, of its own tags too.
        assert state.dtype == "fp32" or found["ours"] == written[state][rank]["weights"]


@each_state
def test_every_file_opens_in_every_way_as_deepspeeds_own_does(read: Results, state: State) -> None:
    for found in read["opened", state]:
        assert len(found["files"]) >= 6
        assert found["differ"] == []


@pytest.mark.parametrize("state", [state for state in STATES if state.zero < 3], ids=str)
def test_classes_that_walk_a_tag_are_not_confused_by_manifests(read: Results, state: State) -> None:
    for found in read["inspected", state]:
        assert found["ours"] == found["plain"]
        assert found["ours"]["degrees"] == [1, 1, 2, 2]
        assert found["differ"] == []


@hub
@each_state
def test_the_scripts_beside_the_tags_give_the_same_weights(read: Results, state: State) -> None:
    for name, found in read["converted", state][0].items():
        assert found["said"] == {"ours": "", "plain": ""}, name
        assert found["files"] and found["differ"] == [], name


@each_state
def test_universal_directories_hold_the_same(read: Results, state: State) -> None:
    found = read["universal", state][0]
    assert found["said of ours"] == found["said of plain"] == ""
    assert found["latest"] == f"{TAG}_universal"
    assert found["files"] > 10 and found["differ"] == []


@hub
@pytest.mark.parametrize("script", ["the copy", "the module"])
def test_zero_to_fp32_runs_as_a_command(
    place: Path, read: Results, tmp_path: Path, script: str
) -> None:
    folder = place / str(STATES[1])
    start = ["-m", "deepspeed.utils.zero_to_fp32"]
    if script == "the copy":
        start = [str(folder / "ours" / "zero_to_fp32.py")]
    _command([*start, str(folder / "ours"), str(tmp_path / "out")], tmp_path)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin")
    expected = torch.load(folder / "converted" / "whole" / "plain" / "pytorch_model.bin")
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_ds_to_universal_runs_as_a_command(place: Path, read: Results, tmp_path: Path) -> None:
    folder = place / str(STATES[2])
    arguments = ["--input_folder", str(folder / "ours" / TAG)]
    arguments += ["--output_folder", str(tmp_path / "out")]
    _command(["-m", "deepspeed.checkpoint.ds_to_universal", *arguments], tmp_path)
    expected = folder / "plain" / f"{TAG}_universal"
    names = {path.relative_to(expected) for path in expected.rglob("*")}
    assert names == {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")}
    found = [torch.load(root / "zero/last.weight/fp32.pt") for root in (tmp_path / "out", expected)]
    assert torch.equal(*found)


def _command(arguments: list[str], folder: Path) -> None:
    # What DeepSpeed must not import, it cannot: a module of that name, found first, raises.
    (folder / "ckpt_deepspeed.py").write_text("raise ImportError('not for plain DeepSpeed')\n")
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(folder), "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr


# -- other numbers of ranks ------------------------------------------------------------------------


@each_state
def test_universal_directories_load_as_plain_deepspeed_loads_them(
    written: Results, loaded: tuple[int, Results], state: State
) -> None:
    ranks, results = loaded
    for rank, found in enumerate(results[state]):
        for what in LOADS[ranks]:
            assert found[f"{what} ours"] == found[f"{what} plain"]
            assert found[f"{what} ours"][1] == 2
        if state.zero < 3 or ranks == 2:
            assert found["weights"] == written[state][rank if ranks == 2 else 0]["weights"]


@pytest.mark.parametrize(("zero", "elastic"), ELASTIC)
def test_elastic_checkpoints_load_as_plain_deepspeed_loads_them(
    written: Results, loaded: tuple[int, Results], zero: int, elastic: bool
) -> None:
    ranks, results = loaded
    for rank, found in enumerate(results[zero, elastic]):
        for what in {name.removesuffix(" ours").removesuffix(" plain") for name in found}:
            assert found[f"{what} ours"] == found[f"{what} plain"]
        changed = found["elastic all ours"]
        if ranks == 2:
            assert changed[2] == written[zero, elastic][rank]["saved"]
        else:
            assert "not currently supported" in changed[0]
        assert found["elastic no optimizer ours"][1] == 2


def test_a_job_goes_on_beside_universal_directories(loaded: tuple[int, Results]) -> None:
    ranks, results = loaded
    for found in results.get("beside", []):
        assert found == {
            "from": TAG,
            "latest": "global_step4",
            "universal": f"{TAG}_universal",
            "durable": True,
        }
    assert ("beside" in results) == (ranks == 2)


# -- in the process that saves ---------------------------------------------------------------------


def test_readers_of_the_same_process_wait_for_the_save(written: Results) -> None:
    for found in written["readers"]:
        assert found and all(result == [True, "read"] for result in found.values()), found


def test_with_persisted_the_tag_is_there_when_the_save_returns(written: Results) -> None:
    for found in written["persisted"]:
        assert found["there"] == [[f"global_step{step}", True] for step in (1, 2, 3)]


def test_with_persisted_a_bad_disk_raises_at_once_on_all_ranks_and_only_once(
    written: Results,
) -> None:
    for found in written["persisted"]:
        assert "Input/output error" in found["raised"]
        assert found["kept"] == ["global_step3", False]
        assert found["mended"] == "global_step5"


def test_an_engine_that_is_collected_in_the_middle_of_a_save_does_not_wait_for_it(
    written: Results,
) -> None:
    for found in written["collected"]:
        assert found["held"] and found["gone"], "the collector did not meet it"
        assert found["whole"] == [True, True]


def test_zero_3_takes_the_weights_of_the_tag_that_it_loads(written: Results) -> None:
    for found in written["weights_of_a_tag"]:
        assert found["asked"] == found["fallen back"] == found["saved"][0] != found["saved"][1]


def test_damaged_tags_are_refused_whichever_byte_it_is(written: Results) -> None:
    for found in written["damaged"]:
        assert found["loaded"] == [] and found["strange"] == []


def test_files_of_others_in_a_tag_do_not_matter(written: Results) -> None:
    for found in written["damaged"]:
        assert found["foreign"] == "t"
