"""What a configuration may say, and what is copied at once. DeepSpeed is imported in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ckpt_core import Level, Options

OURS = {"type": "ckpt_core"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"checkpoint_engine": "ckpt_core"}, "must be an object"),
    "another type": ({"checkpoint_engine": {"type": "torch"}}, "checkpoint_engine.type='torch'"),
    "no type": ({"checkpoint_engine": {"in_flight": 2}}, "checkpoint_engine.type=None"),
    "a typo": ({"checkpoint_engine": {**OURS, "inflight": 2}}, "checkpoint_engine.inflight is not"),
    "a wrong value": (
        {"checkpoint_engine": {**OURS, "in_flight": 0}},
        "checkpoint_engine.in_flight=0",
    ),
    "wait": ({"checkpoint_engine": {**OURS, "wait": "soon"}}, "wait='soon' is unknown"),
    "verify": ({"checkpoint_engine": {**OURS, "verify": 1}}, "verify=1 must be"),
    "a level without a place": (
        {"checkpoint_engine": {**OURS, "levels": [{"every": 100}]}},
        "checkpoint_engine.levels: number 1: url is missing",
    ),
    "blocking": (
        {"checkpoint_engine": {**OURS, "blocking": True}},
        'checkpoint_engine.blocking=true: use "wait": "persisted"',
    ),
    "not pipelined": (
        {"checkpoint_engine": {**OURS, "pipelined": False}},
        "checkpoint_engine.pipelined=false: the files",
    ),
    "frozen leaves": (
        {"checkpoint_engine": {**OURS, "share_unchanged": True, "frozen": ["module"]}},
        "checkpoint_engine.frozen=['module']: the files of a tag are shared whole",
    ),
    "an unknown preset": (
        {"checkpoint_engine": {**OURS, "preset": ["pccheck"]}},
        "checkpoint_engine.preset=['pccheck'] is unknown: choose one of default",
    ),
    "a preset of two phases": (
        {"checkpoint_engine": {**OURS, "preset": "checkfreq"}},
        "checkpoint_engine.preset='checkfreq' sets pipelined=false: the files",
    ),
    "a preset that maps files": (
        {"checkpoint_engine": {**OURS, "preset": "lightcheck"}},
        "checkpoint_engine.preset='lightcheck' sets mode=\"direct\": the files",
    ),
    "a preset that blocks": (
        {"checkpoint_engine": {**OURS, "preset": "gpm", "mode": "host"}},
        'checkpoint_engine.preset=\'gpm\' sets blocking=true: use "wait": "persisted"',
    ),
    "a writer": (
        {"checkpoint_engine": OURS, "checkpoint": {"writer": {"type": "fast"}}},
        "checkpoint.writer both select",
    ),
}
RIGHT: dict[str, tuple[dict[str, Any], Options]] = {
    "no preset": ({}, Options()),
    "a preset": ({"preset": "pccheck"}, Options.preset("pccheck")),
    "other keys win": (
        {"preset": "deepfreeze", "writers": 3, "checksum": True},
        Options.preset("deepfreeze", writers=3, checksum=True),
    ),
    "levels": (
        {"levels": [{"url": "/far", "every": 100}, "s3://bucket/run"]},
        Options(levels=[Level("/far", every=100), Level("s3://bucket/run")]),
    ),
    "what it cannot do is said anew": (
        {"preset": "gpm", "mode": "host", "blocking": False, "wait": "persisted"},
        Options.preset("gpm", mode="host", blocking=False),
    ),
    "the other one too": (
        {"preset": "checkfreq", "pipelined": True},
        Options.preset("checkfreq", pipelined=True),
    ),
}
PROGRAM = """
import json, os, sys, tempfile
from ckpt_deepspeed.engine import CkptCoreEngine
from ckpt_deepspeed.settings import EngineSettings, section_of
from ckpt_core import ConfigError
from ckpt_deepspeed.early import Early
import collections, torch
found = {}
for name, config in json.loads(sys.stdin.read()).items():
    try:
        section = section_of(config)
        found[name] = "none" if section is None else repr(EngineSettings.of(section))
    except ConfigError as exc:
        found[name] = str(exc)
class Holder:
    def __init__(self, tensor):
        self.tensor = tensor
class Wrapper(torch.Tensor):
    # Without memory of its own, as a DTensor is.
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)
    def __init__(self, inner):
        self.inner = inner
    def __reduce_ex__(self, protocol):
        return (Wrapper, (self.inner,))
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError
kept, slow, wrapped = [torch.ones(4) for _ in range(5)], torch.ones(4), torch.ones(4)
Pair = collections.namedtuple("Pair", "left right")
early = Early([
    kept[0], collections.defaultdict(list, a=[kept[1]]), Pair(kept[2].view(2, 2).t(), None),
    Holder(kept[3]), kept[4].to_sparse(), torch.empty(0), 1, Wrapper(wrapped),
])
found["early"] = [early(tensor.detach()) for tensor in [*kept[:4], wrapped, slow, torch.empty(0)]]
but = Early([kept[0], kept[1], slow], but=[slow])
found["early but"] = [but(kept[0]), but(slow), but.nbytes]
unpicklable = Early([kept[0], lambda: None])
found["unpicklable"] = [unpicklable(kept[0]), unpicklable(slow)]
assert unpicklable.nbytes == float("inf")
made = CkptCoreEngine(EngineSettings.of({"type": "ckpt_core"}))
with tempfile.TemporaryDirectory() as folder:
    for kind in (True, False):
        path = os.path.join(os.path.realpath(folder), f"{kind}.pt")
        torch.save({"n": 1, "w": kept[0]}, path, _use_new_zipfile_serialization=kind)
        with made.peeking():
            peeked = made.load(path, map_location=lambda storage, place: storage)
        mapped = [path in open("/proc/self/maps").read()]
        del peeked
        loaded = made.load(path, map_location="cpu")
        mapped.append(path in open("/proc/self/maps").read())
        found[f"peeked {kind}"] = [*mapped, torch.equal(loaded["w"], kept[0]) and loaded["n"] == 1]
import datetime, pathlib, pickle, types
from deepspeed.runtime import engine as runtime
from ckpt_core import Level, Mode
from ckpt_deepspeed import Wait
said = {
    "type": "ckpt_core", "wait": Wait.PERSISTED, "mode": Mode.HOST, "in_flight": 2,
    "timeout": datetime.timedelta(minutes=1), "events_file": pathlib.Path("/events"),
    "levels": (Level("/far", every=100), {"url": pathlib.Path("/near")}),
}
config = {"train_batch_size": 1, "checkpoint_engine": said}
zero = types.SimpleNamespace(offload_optimizer=None)
kept = types.SimpleNamespace(_param_dict=config, zero_config=zero, use_node_local_storage=False)
made = runtime.create_checkpoint_engine(config_params=kept)
assert made.settings.wait is Wait.PERSISTED and made.settings.options.mode is Mode.HOST
found["kept"] = [b"ckpt_core." in pickle.dumps(config), b"ckpt_deepspeed" in pickle.dumps(config)]
found["kept says"] = json.loads(json.dumps(config["checkpoint_engine"]))
assert EngineSettings.of(found["kept says"]) == EngineSettings.of(said) == made.settings
assert made.settings.options.further[0] == Level("/far", every=100)
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Case -> what is said of it."""
    cases = {name: config for name, (config, _) in WRONG.items()}
    cases |= {"without": {"train_batch_size": 1}}
    cases |= {
        f"right: {name}": {"checkpoint_engine": OURS | section}
        for name, (section, _) in RIGHT.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return found


@pytest.mark.parametrize("name", [name for name, (_, text) in WRONG.items() if text])
def test_a_wrong_configuration_is_named(told: dict[str, Any], name: str) -> None:
    assert WRONG[name][1] in told[name]


def test_a_configuration_without_the_key_is_left_alone(told: dict[str, Any]) -> None:
    assert told["without"] == "none"


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_one_gives_these_options(told: dict[str, Any], name: str) -> None:
    section, options = RIGHT[name]
    assert f"options={options!r}, " in told[f"right: {name}"]
    assert section.get("wait", "staged") in told[f"right: {name}"]


def test_what_must_be_copied_at_once_is_and_nothing_else(told: dict[str, Any]) -> None:
    assert told["early"] == [True] * 5 + [False] * 2
    assert told["early but"] == [True, False, 32]
    assert told["unpicklable"] == [True, False]


def test_what_is_loaded_for_a_look_is_mapped_and_everything_else_is_read(
    told: dict[str, Any],
) -> None:
    assert told["peeked True"] == [True, False, True]
    assert told["peeked False"] == [False, False, True], (
        "a file of torch's old kind cannot be mapped"
    )


def test_the_configuration_that_deepspeed_prints_and_pickles_is_plain(told: dict[str, Any]) -> None:
    assert told["kept"] == [False, False], "readers of a tag would need this package"
    assert told["kept says"] == {
        **OURS,
        "wait": "persisted",
        "mode": "host",
        "in_flight": 2,
        "timeout": 60.0,
        "events_file": "/events",
        "levels": [{"url": "/far", "every": 100}, {"url": "/near"}],
    }
