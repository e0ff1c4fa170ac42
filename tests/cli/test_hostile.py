"""Checkpoints that somebody else wrote: whatever they say, a command answers with text."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_core import Checkpointer, Options
from ckpt_core.cli import main
from ckpt_core.cli.tree import read_tree, walk
from ckpt_core.cli.values import value_text

TAGS = (
    "tensor array composite list tuple set frozenset deque Size slice dict OrderedDict defaultdict"
    " Counter dataclass namedtuple object enum opaque int float str complex bytes bytearray range"
    " ellipsis dtype device layout memory_format path date datetime time timedelta timezone uuid"
    " ndarray npscalar npdtype versions meta nonsense"
).split()
FIELDS = (
    "! v items leaf view flags parts meta kind type state fields attrs name value maxlen".split()
)

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["x", "y", "", "7ff0000000000000", "eHk=", "m:T", "float32", "\x1b[2J"])
    | st.text(max_size=4)
)


def _objects(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tagged = st.builds(
        lambda tag, rest: {**rest, "!": tag},
        st.sampled_from(TAGS),
        st.dictionaries(st.sampled_from(FIELDS), children, max_size=4),
    )
    rows = st.lists(st.lists(children, min_size=2, max_size=2), max_size=3)
    tensor = st.builds(
        lambda name, view: {"!": "tensor", "leaf": name, "view": view},
        st.sampled_from(["x", "y", "gone"]),
        children | st.just(["float32", 0, [2], [1]]) | st.just(["int64", 4, [2**40], [0]]),
    )
    maps = st.builds(lambda held: {"!": "dict", "v": held}, st.dictionaries(st.text(), children))
    return st.lists(children, max_size=3) | tagged | rows | tensor | maps


skeletons = st.recursive(leaves, _objects, max_leaves=20)


@given(skeletons)
def test_any_json_has_a_tree_and_texts(skeleton: Any) -> None:
    for item in walk(read_tree({"tree": skeleton})):
        assert isinstance(value_text(item.value), str)
    assert isinstance(value_text(skeleton), str)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step whose skeleton can be replaced."""
    root = tmp_path_factory.mktemp("hostile") / "root"
    with Checkpointer(root, Options()) as checkpointer:
        state = {"x": torch.ones(4), "y": torch.ones(3, dtype=torch.int64)}
        return checkpointer.save(1, state).committed.result(60)


def _sealed(obj: dict[str, Any]) -> bytes:
    obj.pop("xxh3", None)
    body = json.dumps(obj, separators=(",", ":"))[:-1].encode()
    return b'%s,"xxh3":"%s"}\n' % (body, xxhash.xxh3_64_hexdigest(body).encode())


def _plant(step: Path, skeleton: Any) -> None:
    """Give the step another skeleton, with checksums that are right."""
    rank = json.loads((step / "rank-00000.json").read_text())
    data = _sealed({**rank, "skeleton": skeleton})
    (step / "rank-00000.json").write_bytes(data)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["ranks"] = [[0, "rank-00000.json", len(data), xxhash.xxh3_64_hexdigest(data)]]
    (step / "manifest.json").write_bytes(_sealed(manifest))


def _run(*arguments: object) -> int:
    before, sys.argv = sys.argv, ["ckpt-core", *map(str, arguments)]
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.argv = before
    raise AssertionError("main always ends the process")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(tree=skeletons, pools=skeletons)
def test_no_skeleton_brings_a_command_down(
    victim: Path, capsys: pytest.CaptureFixture[str], tree: Any, pools: Any
) -> None:
    _plant(victim, {"tree": tree, "pools": pools})
    out = victim.parent / "out"
    commands: list[tuple[Any, ...]] = [("show", victim), ("show", victim, "--json")]
    commands += [("verify", victim), ("diff", victim, victim)]
    commands += [
        ("export", victim, out, "--to", kind, "--force") for kind in ("torch", "safetensors")
    ]
    for command in commands:
        assert _run(*command) in (0, 2)
        text, errors = capsys.readouterr()
        assert "\x1b" not in text
        assert "Traceback" not in errors


Spoil = Callable[[Path], object]


def _replace_json(name: str, **changes: Any) -> Spoil:
    def spoil(step: Path) -> None:
        obj = json.loads((step / name).read_text())
        (step / name).write_bytes(_sealed({**obj, **changes}))

    return spoil


def _deep(step: Path) -> None:
    tree: Any = 1
    for _ in range(250):
        tree = [tree, 1]
    _plant(step, {"tree": tree})


SPOILT: dict[str, Spoil] = {
    "empty manifest": lambda step: (step / "manifest.json").write_bytes(b""),
    "no JSON": lambda step: (step / "manifest.json").write_bytes(b"\xff" * 5000),
    "newer format": _replace_json("manifest.json", version=99),
    "huge step": _replace_json("manifest.json", step=10**30),
    "no rank manifest": lambda step: (step / "rank-00000.json").unlink(),
    "rank manifest is a link": lambda step: (
        (step / "rank-00000.json").rename(step / "other"),
        (step / "rank-00000.json").symlink_to("other"),
    ),
    "shard is a directory": lambda step: (
        (step / "shard-00000-0.safetensors").unlink(),
        (step / "shard-00000-0.safetensors").mkdir(),
    ),
    "no shard": lambda step: (step / "shard-00000-0.safetensors").unlink(),
    "nested deeply": _deep,
    "skeleton is a number": lambda step: _plant(step, 5),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_damage_of_every_kind_is_told_in_a_line(
    cli: Callable[..., Any], ckpts: Path, tmp_path: Path, kind: str
) -> None:
    step = ckpts / "step-000000000030"
    SPOILT[kind](step)
    for command in (
        ["ls", ckpts],
        ["show", ckpts],
        ["show", ckpts, "--json"],
        ["verify", ckpts],
        ["diff", ckpts, step],
        ["export", ckpts, tmp_path / "out.pt"],
        ["export", ckpts, tmp_path / "out.safetensors"],
    ):
        answer = cli(*command)
        assert answer.code in (0, 1, 2)
        if answer.code == 2:
            assert answer.out == ""
            assert answer.err.startswith("ckpt-core: ")
            assert answer.err.count("\n") == 1
    shutil.rmtree(step)
    assert cli("show", ckpts).out.startswith("step 20 ")
