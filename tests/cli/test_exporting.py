"""`export`."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt_core
from ckpt_core.cli import elsewhere, exported
from ckpt_core.system.interrupts import Terminated
from tests.cli.conftest import Heard, Tied, make_state

Cli = Callable[..., Any]
Save = Callable[..., Path]
TOP = Path(__file__).parents[2]
point = collections.namedtuple("point", "x y")
BOTH = pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])


def _equal(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of the time that looking at sparse tensors takes
        return torch.load(path, weights_only=True)


# -- safetensors -------------------------------------------------------------------------------


def test_safetensors_has_every_tensor_under_its_path(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    answer = cli("export", ckpts, tmp_path / "out.safetensors")
    assert answer.code == 0
    assert "epoch (3)" in answer.err or "more" in answer.err
    loaded, tree = load_file(tmp_path / "out.safetensors"), ckpt_core.load(ckpts)
    for name, tensor in tree["model"].items():
        assert _equal(loaded[f"model.{name}"], tensor)
    for number, row in tree["optimizer"]["state"].items():
        assert _equal(loaded[f"optimizer.state.{number}.exp_avg"], row["exp_avg"])
    assert not any(name.startswith("__") for name in loaded)


def test_safetensors_is_no_longer_than_header_and_tensors(
    cli: Cli, ckpts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.safetensors"
    cli("export", ckpts, path)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    tensors = sum(tensor.nbytes for tensor in load_file(path).values())
    assert header % 8 == 0
    assert path.stat().st_size == header + tensors


def test_tied_weights_are_written_for_each_name(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert cli("export", ckpts, path, "--only", "model", "--strip").code == 0
    loaded = load_file(path)
    assert _equal(loaded["embed.weight"], loaded["head.weight"])
    assert set(loaded) == set(ckpt_core.load(ckpts)["model"])


def test_a_model_loads_what_was_exported_of_it(cli: Cli, save: Save, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    step = save({"model": model, "epoch": 1})
    for name, load in (("m.safetensors", load_file), ("m.pt", _load)):
        path = tmp_path / name
        assert cli("export", step, path, "--only", "model", "--strip").code == 0
        other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        other.load_state_dict(load(path), strict=True)
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_views_conjugates_and_odd_strides_become_plain_tensors(
    cli: Cli, save: Save, tmp_path: Path
) -> None:
    x = torch.arange(24.0).view(4, 6)
    state = {
        "x": x,
        "row": x[1],
        "column": x[:, 2],
        "expanded": torch.ones(3, 1).expand(3, 5),
        "transposed": torch.arange(6).view(2, 3).t(),
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "array": np.arange(4),
    }
    path = tmp_path / "out.safetensors"
    assert cli("export", save(state), path).code == 0
    loaded = load_file(path)
    assert set(loaded) == set(state)
    for name, value in state.items():
        expected = torch.as_tensor(value)
        assert _equal(loaded[name], expected.resolve_conj().resolve_neg()), name


def test_a_view_of_a_leaf_of_many_chunks_is_whole(cli: Cli, save: Save, tmp_path: Path) -> None:
    x = torch.arange(12_000.0).view(100, 120)
    step = save({"x": x, "column": x[:, 7]}, chunk_bytes=4096)
    assert cli("export", step, tmp_path / "out.safetensors").code == 0
    loaded = load_file(tmp_path / "out.safetensors")
    assert _equal(loaded["x"], x)
    assert _equal(loaded["column"], x[:, 7])


def test_views_of_one_buffer_are_read_by_what_they_show(
    cli: Cli, save: Save, tmp_path: Path, heard: Heard
) -> None:
    count, size = 200, 500
    flat = torch.arange(float(count * size))
    parts = {f"p{at}": flat[at * size : (at + 1) * size] for at in range(count)}
    step = save({"flat": flat, **parts}, chunk_bytes=4096)
    heard.nbytes = 0
    assert cli("export", step, tmp_path / "out.safetensors").code == 0
    # Its sums, the leaf, and each view.
    assert heard.nbytes <= 3 * flat.nbytes + count * 4096
    loaded = load_file(tmp_path / "out.safetensors")
    assert all(_equal(loaded[name], part) for name, part in parts.items())


def test_complex_and_sparse_tensors_become_parts_and_are_named(
    cli: Cli, save: Save, tmp_path: Path
) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    path = tmp_path / "out.safetensors"
    step = save({"z": z, "conj": z.clone().conj(), "s": torch.eye(3).to_sparse()})
    answer = cli("export", step, path, "--json")
    loaded, told = load_file(path), json.loads(answer.out)
    assert _equal(loaded["z"], torch.view_as_real(z))
    assert _equal(loaded["conj"], torch.view_as_real(z.conj().resolve_conj()))
    assert _equal(loaded["s.values"], torch.ones(3))
    assert loaded["s.indices"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert told["changed"] == {
        "z": "complex64 as F32 parts",
        "conj": "complex64 as F32 parts",
        "s": "coo tensor, as its parts",
    }


def test_names_that_collide_get_numbers(cli: Cli, save: Save, tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2)}
    assert cli("export", save(state), path).code == 0
    assert set(load_file(path)) == {"a.b", "a.b~1", "__metadata__~1"}


def test_chunks_of_any_size_give_the_same_file(cli: Cli, save: Save, tmp_path: Path) -> None:
    state = {"x": torch.arange(100_000), "y": torch.arange(33, dtype=torch.int8)}
    for number, size in enumerate((4096, 1 << 24)):
        step = save(state, str(number), chunk_bytes=size)
        assert cli("export", step, tmp_path / f"{number}.safetensors").code == 0
    files = [(tmp_path / f"{number}.safetensors").read_bytes() for number in (0, 1)]
    assert files[0] == files[1]


# -- torch -------------------------------------------------------------------------------------


def test_torch_keeps_the_tree_the_values_and_the_sharing(
    cli: Cli, ckpts: Path, tmp_path: Path
) -> None:
    assert cli("export", ckpts, tmp_path / "out.pt").code == 0
    loaded, tree = _load(tmp_path / "out.pt"), ckpt_core.load(ckpts)
    assert list(loaded) == list(tree)
    assert loaded["epoch"] == 3
    assert loaded["config"] == tree["config"]
    assert loaded["optimizer"]["param_groups"] == tree["optimizer"]["param_groups"]
    for name, tensor in tree["model"].items():
        assert _equal(loaded["model"][name], tensor)
    model = loaded["model"]
    assert model["embed.weight"].data_ptr() == model["head.weight"].data_ptr()
    assert model._metadata == tree["model"]._metadata


def test_values_that_weights_only_refuses_change_or_stay_out(
    cli: Cli, save: Save, tmp_path: Path
) -> None:
    state = {
        "point": point(1, torch.ones(2)),
        "deque": collections.deque([1, 2]),
        "default": collections.defaultdict(int, a=1),
        "frozen": frozenset({1}),
        "array": np.arange(3),
        "namespace": argparse.Namespace(a=1),
        "list": [1, argparse.Namespace(a=1), 3],
        "path": Path("/x"),
        "bytes": b"ab",
        "no bytes": b"",
        "complex": 1j,
        "dtype": torch.float16,
        "size": torch.Size([1]),
        "counter": collections.Counter("aab"),
        ("a", 1): {2: 3},
        "sparse": torch.eye(2).to_sparse(),
        "z": torch.tensor([1j]),
        "view": torch.arange(4.0).expand(2, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    answer = cli("export", save(state), tmp_path / "out.pt", "--json")
    assert answer.code == 0
    loaded, told = _load(tmp_path / "out.pt"), json.loads(answer.out)
    assert loaded["point"]["x"] == 1
    assert loaded["deque"] == [1, 2]
    assert loaded["default"] == {"a": 1}
    assert loaded["frozen"] == {1}
    assert _equal(loaded["array"], torch.arange(3))
    assert loaded["list"] == [1, None, 3]
    assert loaded["counter"] == {"a": 2, "b": 1}
    for key in ("bytes", "complex", "dtype", "size", ("a", 1)):
        assert loaded[key] == state[key]
    for key in ("sparse", "z", "view"):
        assert torch.equal(loaded[key].to_dense(), state[key].to_dense())
    assert set(told["left_out"]) == {"namespace", "list.1", "path", "no bytes"}
    assert told["changed"]["deque"] == "deque as list"


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("held", "left", "paths"),
    [
        ({point(1, 2): 1, 5: 6}, {5: 6}, 1),
        ({(point(1, 2), 3): 1, (1, (2, None)): 6}, {(1, (2, None)): 6}, 1),
        ({(frozenset({1}), 3): 1, torch.Size([1]): 6}, {torch.Size([1]): 6}, 1),
        ({(Color.RED, 1): 1, (Color.BLUE, 1): 2}, {}, 2),
        ({("a" * 99, Color.RED): 1, ("a" * 99, Color.BLUE): 2}, {}, 2),
        ({point(1, 2), 5}, {5}, 1),
        ({frozenset({1}), (5, b"x")}, {(5, b"x")}, 1),
        ({(Color.RED, 1), (Color.BLUE, 1)}, set(), 2),
    ],
)
def test_keys_that_weights_only_refuses_are_left_out_one_by_one(
    cli: Cli, save: Save, tmp_path: Path, held: Any, left: Any, paths: int
) -> None:
    step = save({"held": held, "w": torch.ones(2)})
    answer = cli("export", step, tmp_path / "out.pt", "--json")
    assert answer.code == 0, answer.err
    assert _load(tmp_path / "out.pt")["held"] == left
    told = json.loads(answer.out)["left_out"]
    assert len(told) == paths and all(path.startswith("held.") for path in told)


def test_places_of_one_name_are_all_there_where_names_are_stripped(
    cli: Cli, save: Save, tmp_path: Path
) -> None:
    step = save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    path = tmp_path / "out.pt"
    assert cli("export", step, path, "--only", "a.b", "--strip").code == 0
    assert _load(path) == {"b": torch.ones(1), "b~1": torch.zeros(1)}
    assert cli("export", step, path, "--prefix", "a.", "--strip", "--force").code == 0
    assert _load(path) == {"b": torch.ones(1), "a": {"b": torch.zeros(1)}}


@dataclasses.dataclass
class Progress:
    """Of training."""

    epoch: int
    best: torch.Tensor


def test_a_dtype_that_a_file_of_torch_cannot_hold_is_told_in_words(
    cli: Cli, save: Save, tmp_path: Path
) -> None:
    step = save({"q": torch.arange(8, dtype=torch.uint8).view(torch.int4)})
    found = cli("export", step, tmp_path / "o.pt")
    assert found.code == 2 and "torch cannot hold this step in one file" in found.err


def test_a_dataclass_becomes_a_dict(cli: Cli, save: Save, tmp_path: Path) -> None:
    step = save({"progress": Progress(3, torch.ones(2))})
    assert cli("export", step, tmp_path / "out.pt").code == 0
    assert _load(tmp_path / "out.pt")["progress"]["epoch"] == 3


def test_views_of_one_storage_stay_views(cli: Cli, save: Save, tmp_path: Path) -> None:
    x = torch.arange(12.0)
    step = save({"a": x[:6], "b": x[6:], "c": x[2:8]})
    cli("export", step, tmp_path / "out.pt")
    loaded = _load(tmp_path / "out.pt")
    loaded["a"][2] = 100.0
    assert loaded["c"][0] == 100.0
    assert cli("export", step, tmp_path / "a.pt", "--only", "a", "--strip").code == 0
    assert _equal(_load(tmp_path / "a.pt"), x[:6])


# -- parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--only", "model.norm"], []),
        (["--prefix", "model.norm."], ["model.norm.weight", "model.norm.bias"]),
        (["--prefix", "model.norm.", "--strip"], ["weight", "bias"]),
        (["--prefix", "model.norm.w", "--strip"], ["eight"]),
        (["--only", "optimizer.state.0.exp_avg"], ["optimizer.state.0.exp_avg"]),
        (["--only", "optimizer.state", "--strip"], ["0.exp_avg", "1.exp_avg"]),
        (["--prefix", "optimizer.state.1"], ["optimizer.state.1.exp_avg"]),
    ],
)
def test_parts_are_chosen_by_path(
    cli: Cli, ckpts: Path, tmp_path: Path, options: list[str], names: list[str]
) -> None:
    path = tmp_path / "out.safetensors"
    answer = cli("export", ckpts, path, *options)
    if not names:  # "norm.weight" is one key of the model's state: nothing is called "norm"
        assert answer.code == 0
        assert all(name.startswith("model.norm.") for name in load_file(path))
        return
    loaded = load_file(path)
    assert set(names) <= set(loaded)
    if "--strip" not in options:
        start = options[1]
        assert all(name.startswith(start) for name in loaded)


def test_a_part_for_torch_keeps_its_place_or_is_the_whole(
    cli: Cli, ckpts: Path, tmp_path: Path
) -> None:
    for number, (options, look) in enumerate(
        [
            (["--only", "model"], lambda tree: tree["model"]["norm.weight"]),
            (["--only", "model", "--strip"], lambda tree: tree["norm.weight"]),
            (["--prefix", "model.", "--strip"], lambda tree: tree["norm.weight"]),
            (["--prefix", "model.norm.", "--strip"], lambda tree: tree["weight"]),
            (["--prefix", "model.norm."], lambda tree: tree["model"]["norm.weight"]),
            (["--only", "model.norm.weight", "--strip"], lambda tree: tree),
        ]
    ):
        path = tmp_path / f"{number}.pt"
        assert cli("export", ckpts, path, *options).code == 0
        assert look(_load(path)).shape == (16,)
    path = tmp_path / "state.pt"
    assert cli("export", ckpts, path, "--only", "optimizer.state.1").code == 0
    assert list(_load(path)["optimizer"]["state"]) == [1]


# -- weights -----------------------------------------------------------------------------------


def _load_weights(path: Path) -> Any:
    return load_file(path) if path.suffix == ".safetensors" else _load(path)


@BOTH
@pytest.mark.parametrize("as_what", ["module", "state_dict", "alone"])
def test_weights_go_into_a_fresh_module(
    cli: Cli, save: Save, tmp_path: Path, name: str, as_what: str
) -> None:
    state = make_state()
    model = state["model"]
    if as_what == "state_dict":
        state["model"] = model.state_dict()
    step = save(model if as_what == "alone" else state)
    answer = cli("export", step, tmp_path / name, "--weights")
    assert answer.code == 0
    assert ("weights: the step itself," if as_what == "alone" else "weights: model,") in answer.err
    fresh = Tied()
    fresh.load_state_dict(_load_weights(tmp_path / name), strict=True)
    assert all(_equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


def test_which_of_several_models_is_not_guessed(cli: Cli, save: Save, tmp_path: Path) -> None:
    step = save({"model": Tied(), "ema": Tied(), "rest": {"a": torch.ones(2)}})
    for options, text in (
        ([], "several modules, model, ema: name one with --only"),
        (["--only", "rest"], "rest holds no module"),
        (["--only", "mod"], "mod holds no module"),
        (["--prefix", "model."], "--only"),
    ):
        answer = cli("export", step, tmp_path / "out.pt", "--weights", *options)
        assert answer.code == 2 and text in answer.err
        assert not (tmp_path / "out.pt").exists()
    assert cli("export", step, tmp_path / "out.pt", "--weights", "--only", "ema").code == 0
    Tied().load_state_dict(_load(tmp_path / "out.pt"), strict=True)


@BOTH
def test_a_part_that_is_not_there_writes_nothing(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str
) -> None:
    answer = cli("export", ckpts, tmp_path / name, "--only", "mode")
    assert answer.code == 2
    assert "--only mode" in answer.err
    assert os.listdir(tmp_path) == ["ckpts"]


@pytest.mark.parametrize(
    "options",
    [["--only", "a", "--prefix", "b"], ["--strip"], ["--only", ""], ["--to", "numpy"]],
)
def test_options_that_make_no_sense_are_refused(
    cli: Cli, ckpts: Path, tmp_path: Path, options: list[str]
) -> None:
    assert cli("export", ckpts, tmp_path / "out.pt", *options).code == 2
    assert os.listdir(tmp_path) == ["ckpts"]


# -- files -------------------------------------------------------------------------------------


@BOTH
def test_a_file_that_is_there_is_replaced_only_by_force(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_text("precious")
    answer = cli("export", ckpts, path)
    assert answer.code == 2
    assert "--force" in answer.err
    assert path.read_text() == "precious"
    assert cli("export", ckpts, path, "--force").code == 0
    assert path.stat().st_size > 1000


_KILLED = """
import os, sys
from pathlib import Path
from ckpt_core.cli.exported import replacing

with replacing(Path(sys.argv[1]), force=False) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), 9)
"""


@BOTH
def test_what_a_killed_export_has_left_goes_with_the_next_one_to_that_name(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "here" / name
    path.parent.mkdir()
    command = [sys.executable, "-c", _KILLED, str(path)]
    assert subprocess.run(command, cwd=TOP, timeout=120, check=False).returncode == -9
    (left,) = path.parent.iterdir()
    other = left.with_name(left.name.replace("out", "other", 1))
    other.write_bytes(b"of an export to another name")
    with exported.replacing(path, force=True) as file:  # still at work beside the next one
        assert not left.exists()
        file.write(b"mine")
        assert cli("export", ckpts, path).code == 0
    assert path.read_bytes() == b"mine"
    assert {*path.parent.iterdir()} == {other, path}


def test_a_layout_that_builds_no_objects_says_so_of_trusted(
    cli: Cli, ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = elsewhere.Target("hf", "", write_directory=_into_a_directory)
    monkeypatch.setattr("ckpt_core.cli.exporting.targets", lambda: ["hf"])
    monkeypatch.setattr("ckpt_core.system.plugins.load", lambda group, name: made)
    answer = cli("export", ckpts, tmp_path / "hf", "--to", "hf", "--trusted")
    assert answer.code == 2 and "--trusted: the layout of hf has no objects to build" in answer.err


def _into_a_directory(step: str, folder: Path) -> None:
    folder.mkdir(parents=True)


@pytest.mark.parametrize("name", ["model.safetensors", "shard-00000-0.safetensors", "out.pt", "hf"])
def test_nothing_is_written_into_a_step(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = elsewhere.Target("hf", "", write_directory=_into_a_directory)
    monkeypatch.setattr(elsewhere, "targets", lambda: ["hf"])
    monkeypatch.setattr("ckpt_core.cli.exporting.targets", lambda: ["hf"])
    monkeypatch.setattr("ckpt_core.system.plugins.load", lambda group, name: made)
    step = ckpts / "step-000000000030"
    (tmp_path / "link").symlink_to(step)
    (step / "deeper").mkdir()
    before = {path: path.stat().st_ino for path in step.rglob("*")}
    more = ["--to", "hf"] if name == "hf" else ["--force"]
    for folder in (step, tmp_path / "link", step / "deeper", step / "new" / "new"):
        answer = cli("export", ckpts, folder / name, *more)
        assert answer.code == 2 and "is in a committed step" in answer.err
    assert {path: path.stat().st_ino for path in step.rglob("*")} == before
    assert ckpt_core.verify(ckpts).ok


@pytest.mark.parametrize("name", ["模" * 82 + ".pt", "é" * 120 + ".safetensors"], ids=[".pt", "."])
def test_a_name_may_be_as_long_as_the_filesystem_takes(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str
) -> None:
    answer = cli("export", ckpts, tmp_path / name)
    assert answer.code == 0, answer.err
    assert (tmp_path / name).is_file()


def test_the_format_follows_the_name_or_is_asked_for(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    answer = cli("export", ckpts, tmp_path / "out")
    assert answer.code == 2
    assert "--to" in answer.err
    assert cli("export", ckpts, tmp_path / "out", "--to", "torch").code == 0
    assert _load(tmp_path / "out")["epoch"] == 3


@BOTH
def test_a_corrupt_step_leaves_no_file_behind(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str, damage: Callable[[Path, int], None]
) -> None:
    damage(ckpts / "step-000000000030" / "shard-00000-0.safetensors", 9000)
    (tmp_path / name).write_text("precious")
    answer = cli("export", ckpts, tmp_path / name, "--force")
    assert answer.code == 2
    assert "expected xxh3" in answer.err
    assert (tmp_path / name).read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == sorted(["ckpts", name])


@BOTH
def test_a_disk_that_is_too_small_is_told_before_writing(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported.Files, "free_bytes", lambda self, path: 100)
    answer = cli("export", ckpts, tmp_path / name)
    assert answer.code == 2
    assert "100 B free" in answer.err
    assert os.listdir(tmp_path) == ["ckpts"]


def test_a_directory_that_is_not_there_is_no_place_for_a_file(
    cli: Cli, ckpts: Path, tmp_path: Path
) -> None:
    assert cli("export", ckpts, tmp_path / "no" / "out.pt").code == 2
    assert cli("export", ckpts, ckpts, "--to", "torch").code == 2


@BOTH
def test_a_file_that_cannot_grow_is_one_clear_line(ckpts: Path, tmp_path: Path, name: str) -> None:
    # What the limit cuts off of a compiled module would fail each later start.
    script = (
        "export PYTHONDONTWRITEBYTECODE=1; ulimit -f 2;"
        f' exec "{sys.executable}" -m ckpt_core export "{ckpts}" "{tmp_path / name}"'
    )
    made = subprocess.run(
        ["bash", "-c", script], cwd=TOP, capture_output=True, text=True, check=False, timeout=60
    )
    assert made.returncode == 2, made.stderr
    # torch may tell of itself, with a prefix of its own.
    (line,) = [line for line in made.stderr.splitlines() if ".py:" not in line]
    assert line == f"ckpt-core: {tmp_path / name}: File too large"
    assert os.listdir(tmp_path) == ["ckpts"]


@BOTH
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_what_interrupts_a_write_ends_the_export_as_what_it_is(
    cli: Cli,
    ckpts: Path,
    tmp_path: Path,
    name: str,
    error: type[BaseException],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(exported._Named):
        def write(self, data: Any) -> int:
            raise error

    monkeypatch.setattr(exported, "_Named", Interrupted)
    assert cli("export", ckpts, tmp_path / name).code == code
    assert os.listdir(tmp_path) == ["ckpts"]


@BOTH
def test_a_name_that_is_no_text_is_written_to(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / f"\udcff{name}"
    assert cli("export", ckpts, path).code == 0
    assert path.stat().st_size > 1000


@BOTH
@pytest.mark.parametrize("how", [[], ["--force"]])
def test_what_is_no_file_is_not_replaced(
    cli: Cli, ckpts: Path, tmp_path: Path, name: str, how: list[str]
) -> None:
    os.mkfifo(tmp_path / name)
    answer = cli("export", ckpts, tmp_path / name, *how)
    assert answer.code == 2 and "is no file: name the file to write" in answer.err
    assert (tmp_path / name).is_fifo()


def test_where_no_file_can_be_made_the_one_that_was_asked_for_is_named(
    cli: Callable[..., Any], ckpts: Path
) -> None:
    answer = cli("export", ckpts, "/proc/x.safetensors")
    assert answer.code == 2
    assert answer.err.startswith("ckpt-core: /proc/x.safetensors: ")
