"""Checkpoints that somebody else wrote: whatever they say, a command answers with text."""

from __future__ import annotations

import json
import shutil
import sys
import tracemalloc
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
from tests.quick import drawn
from tests.restore.ranks import Job, write_ranks

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


@pytest.fixture(scope="module", params=["one rank", "two ranks"])
def victim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step whose skeleton can be replaced."""
    root = tmp_path_factory.mktemp("hostile") / "root"
    state = {"x": torch.ones(4), "y": torch.ones(3, dtype=torch.int64)}
    if request.param == "two ranks":
        step = write_ranks(root, 1, Job(world=2, boxed=state))
        # Leaves get the names that the skeletons use.
        _edit(step, lambda _, obj: [row.__setitem__(0, row[0][-1]) for row in obj["slices"]])
        return step
    with Checkpointer(root, Options()) as checkpointer:
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
    manifest["ranks"][0] = [0, "rank-00000.json", len(data), xxhash.xxh3_64_hexdigest(data)]
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=drawn(60))
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
        # The header of a shard still has the names of before: a finding.
        assert _run(*command) in (0, 1, 2)
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


# -- several ranks -----------------------------------------------------------------------------

WEIGHT, BOXED, OWN = "shared.weight", "boxed.b", "own.x"
JOB = Job(
    world=3,
    replicated={"weight": torch.arange(9000.0)},
    private=lambda rank: {"x": torch.ones(5) * rank},
    boxed={"b": torch.arange(24, dtype=torch.int16).view(4, 6)},
    dim=1,
)
HUGE = 2**55
READS = [["ls"], ["show"], ["show", "--offsets"], ["show", "--json"], ["show", "--rank", 0]]
READS += [["verify"], ["diff"], ["export", "out.pt"], ["export", "out.safetensors"]]

Rows = dict[str, list[Any]]


def _edit(step: Path, edit: Callable[[int, dict[str, Any]], object], **changes: Any) -> None:
    """Rewrite the manifests of all ranks as JSON, with checksums that are right."""
    manifest = json.loads((step / "manifest.json").read_text())
    rows = []
    for rank, name, _, _ in manifest["ranks"]:
        obj = json.loads((step / name).read_text())
        edit(rank, obj)
        data = _sealed(obj)
        (step / name).write_bytes(data)
        rows.append([rank, name, len(data), xxhash.xxh3_64_hexdigest(data)])
    (step / "manifest.json").write_bytes(_sealed({**manifest, "ranks": rows, **changes}))


def _slices(change: Callable[[int, Rows], object]) -> Spoil:
    """Change the rows of slices, by name: [name, dtype, shape, file, offset, nbytes, begin, block]."""

    def edit(rank: int, obj: dict[str, Any]) -> None:
        rows = {row[0]: row for row in obj["slices"]}
        change(rank, rows)
        obj["slices"] = list(rows.values())

    return lambda step: _edit(step, edit)


def _set(name: str, place: int, value: Any, *, of: int | None = None) -> Spoil:
    def change(rank: int, rows: Rows) -> None:
        if of in (None, rank) and name in rows:
            rows[name][place] = value

    return _slices(change)


def _manifest(**changes: Any) -> Spoil:
    return lambda step: _edit(step, lambda rank, obj: None, **changes)


def _few_ranks(step: Path) -> None:
    _edit(step, lambda rank, obj: None)
    ranks = json.loads((step / "manifest.json").read_text())["ranks"]
    _replace_json("manifest.json", ranks=ranks[:2], world_size=100_000)(step)


def _all_take_all(step: Path) -> None:
    # The same bytes of the leaf from every rank, at other offsets: allowed, and no reason to read more.
    _slices(lambda rank, rows: rows[WEIGHT].__setitem__(6, 0))(step)


SPOILT_RANKS: dict[str, tuple[Spoil, str]] = {
    "slices share bytes of a file": (
        _slices(lambda rank, rows: rows[BOXED].__setitem__(4, rows[WEIGHT][4])),
        "offset of leaf",
    ),
    "all slices are the first one": (_all_take_all, "nothing of bytes 12032 to 36000 of 36000"),
    "a huge leaf": (_set(WEIGHT, 2, [HUGE]), f"nothing of bytes 36000 to {HUGE * 4}"),
    "a huge leaf of boxes": (_set(BOXED, 2, [2**30, 2**20]), "nothing of elements"),
    "255 dimensions": (_set(WEIGHT, 2, [1] * 254 + [HUGE]), "nothing of bytes"),
    "256 dimensions": (_set(WEIGHT, 2, [1] * 256), "up to 255 dimensions"),
    "a size beyond integers": (_set(WEIGHT, 2, [10**30]), "shape of leaf"),
    "a shape of texts": (_set(WEIGHT, 2, ["9000"]), "shape of leaf"),
    "a block outside the leaf": (_set(BOXED, 7, [[0, 5], [4, 2]]), "block size"),
    "a block that is negative": (_set(BOXED, 7, [[0, -2], [4, 2]]), "block offset"),
    "a block of other dimensions": (_set(BOXED, 7, [[0], [4]]), "block"),
    "a block that is no list": (_set(BOXED, 7, "all"), "block"),
    "a huge block": (_set(BOXED, 7, [[0, 0], [HUGE, HUGE]]), "block size"),
    "a block smaller than its bytes": (_set(BOXED, 7, [[0, 0], [1, 1]]), "nbytes"),
    "all blocks in one place": (_set(BOXED, 7, [[0, 0], [4, 2]]), "nothing of elements [0:4, 2:6]"),
    "a slice before the leaf": (_set(WEIGHT, 6, -4), "begin"),
    "a slice after the leaf": (_set(WEIGHT, 6, HUGE), "begin"),
    "half an element": (_set(WEIGHT, 6, 2), "begin"),
    "no such file": (_set(WEIGHT, 3, 7), "file of leaf"),
    "ranks differ in the shape": (_set(WEIGHT, 2, [HUGE], of=1), f"[{HUGE}] (rank 1)"),
    "ranks differ in the dtype": (_set(WEIGHT, 1, "int32", of=2), "int32 [9000] (rank 2)"),
    "shared here and private there": (_set(WEIGHT, 0, OWN, of=1), "names"),
    "private of another rank": (
        lambda step: _edit(
            step,
            lambda rank, obj: (
                obj.update(slices=[["own.x", *row[1:]] for row in obj["slices"][:1]], leaves=[])
                if rank == 1
                else None
            ),
        ),
        "one of rank 0 alone",
    ),
    "slices are missing": (lambda step: _edit(step, lambda _, obj: obj.pop("slices")), "slices"),
    "slices are a number": (
        lambda step: _edit(step, lambda _, obj: obj.update(slices=5)),
        "slices",
    ),
    "version 1 with slices": (
        lambda step: _edit(step, lambda _, obj: obj.update(version=1)),
        "version",
    ),
    "a rank twice": (
        lambda step: _edit(step, lambda rank, obj: obj.update(rank=0)),
        "rank",
    ),
    "no ranks": (_manifest(ranks=[]), "number of ranks"),
    "too many ranks": (_manifest(world_size=10**9), "world_size"),
    "a rank manifest is gone": (lambda step: (step / "rank-00001.json").unlink(), "rank-00001"),
    "a shard is gone": (lambda step: (step / "shard-00002-0.safetensors").unlink(), "shard-00002"),
    "nearly all ranks are elsewhere": (_few_ranks, "ranks 0, 1 of 100000 wrote"),
}


@pytest.mark.parametrize("kind", SPOILT_RANKS)
def test_lies_of_several_ranks_are_told_in_a_line_and_take_no_memory(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    spoil, text = SPOILT_RANKS[kind]
    step = write_ranks(tmp_path / "root", 5, JOB)
    spoil(step)
    monkeypatch.chdir(tmp_path)
    told = []
    tracemalloc.start()
    for name, *rest in READS:
        where = {"ls": [step.parent], "diff": [step, step]}.get(name, [step])
        answer = cli(name, *where, *rest)
        told.append(" ".join((answer.out + answer.err).split()))
        assert answer.code in (0, 1, 2)
        assert "Traceback" not in answer.err
        if answer.code == 2:
            assert answer.out == ""
            assert answer.err.startswith("ckpt-core: ")
            assert answer.err.count("\n") == 1
        if name in ("diff", "export"):
            assert answer.code == 2, (name, answer)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text in told[-1], told[-1]
    assert peak_bytes < 32 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]
