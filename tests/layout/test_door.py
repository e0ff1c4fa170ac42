from __future__ import annotations

import subprocess
import sys

import pytest

import ckpt_core.layout
from ckpt_core.errors import ConfigError
from ckpt_core.layout import parse_shard_name, rank_manifest_name, shard_name


def test_the_layer_imports_without_torch_and_numpy() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import ckpt_core.layout.manifest, ckpt_core.layout.parse"
    )
    # The package's own door may import torch; the layer under it may not.
    stub = "import types, sys; m = types.ModuleType('ckpt_core'); m.__path__ = [sys.argv[1]]\n"
    root = ckpt_core.layout.__path__[0].removesuffix("/layout")
    whole = stub + "sys.modules['ckpt_core'] = m\n" + code
    subprocess.run([sys.executable, "-c", whole, root], check=True, timeout=60)


def test_every_name_of_the_door_is_there() -> None:
    assert all(hasattr(ckpt_core.layout, name) for name in ckpt_core.layout.__all__)
    assert len(set(ckpt_core.layout.__all__)) == len(ckpt_core.layout.__all__)


def test_file_names_have_a_fixed_form() -> None:
    assert shard_name(0, 0) == "shard-00000-0.safetensors"
    assert shard_name(99_999, 12) == "shard-99999-12.safetensors"
    assert rank_manifest_name(7) == "rank-00007.json"


@pytest.mark.parametrize(("rank", "index"), [(-1, 0), (100_000, 0), (0, -1), (0, 100)])
def test_names_out_of_range_are_refused(rank: int, index: int) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        shard_name(rank, index)


@pytest.mark.parametrize("rank", [-1, 100_000])
def test_rank_manifest_names_out_of_range_are_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        rank_manifest_name(rank)


def test_a_shard_name_is_read_back() -> None:
    assert parse_shard_name(shard_name(12, 34)) == (12, 34)


@pytest.mark.parametrize(
    "name",
    [
        "shard-00000-00.safetensors",
        "shard-00000-0.safetensors\n",
        "shard-00000-0.safetensors/..",
        "../shard-00000-0.safetensors",
        "shard-0-0.safetensors",
        "shard-٠٠٠٠٠-0.safetensors",
        "shard-00000-100.safetensors",
        "",
    ],
)
def test_any_other_name_is_no_shard(name: str) -> None:
    assert parse_shard_name(name) is None
