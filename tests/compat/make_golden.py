"""Write the golden steps that are not there yet: `python tests/compat/make_golden.py`.

Run once for each format version; the result is committed and never written again, so that every
later release proves that it still reads what this one wrote.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
STEP = 7
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)


def ramp(dtype: str, *shape: int) -> torch.Tensor:
    """A tensor whose bytes count up from 1 and start over after 120: no NaN in any dtype.

    Arithmetic, not random numbers: torch does not promise the same ones for ever.
    """
    kind: torch.dtype = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    raw = torch.arange(size, dtype=torch.int64) % (2 if kind is torch.bool else 120)
    raw = raw if kind is torch.bool else raw + 1
    return raw.to(torch.uint8).view(kind).reshape(shape)


def golden_state() -> dict[str, Any]:
    """The state that every golden step holds. Never changes: a new one goes into a new version."""
    tied = ramp("float32", 48, 96)
    return {
        "dtypes": {name: ramp(name, 3, 5) for name in DTYPES},
        "shapes": {
            "scalar": ramp("float32"),
            "empty": ramp("float32", 0, 4),
            "transposed": ramp("int32", 6, 2).t(),
            "strided": ramp("int16", 5, 4)[::2],
            "large, of odd size": ramp("bfloat16", 8193),
            "large, after a gap": ramp("float64", 40, 60),
        },
        "model": OrderedDict(embedding=tied, head=tied, bias=ramp("float32", 96)),
        "optimizer": {
            "state": {0: {"step": ramp("float32"), "exp_avg": ramp("float32", 48, 96) * 2}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0], "foreach": None}],
        },
        "plain": {
            "step": STEP,
            "large": 2**100,
            "negative zero": -0.0,
            "infinity": float("inf"),
            "text": 'naïve "重み" \U0001f9e0\n',
            "bytes": bytes(range(256)),
            "complex": 1.5 - 2j,
            "flags": (True, False, None),
            "set": {1, 2, 3},
            "nested": [[], {}, (), [[{"deep": [1]}]]],
            ("a", 1): "a key that is no text",
        },
    }


RANKS = 2
BOXES = {
    "boxed.rows": (((0, 0), (3, 8)), ((3, 0), (2, 8))),
    "boxed.columns": (((0, 0), (4, 6)), ((0, 6), (4, 4))),
    "boxed.held by both": (((0, 0), (16, 20)), ((0, 0), (16, 20))),
}
"""Which box of a distributed leaf each rank of the second golden step holds: offsets, sizes."""


def golden_state_2(rank: int) -> dict[str, Any]:
    """What each of the ranks holds of the golden step of version 2, distributed leaves whole."""
    tied = ramp("bfloat16", 343, 205)
    return {
        "model": OrderedDict(embedding=tied, head=tied, bias=ramp("float32", 205)),
        "dtypes": {name: ramp(name, 3, 5) for name in DTYPES},
        "shapes": {
            "scalar": ramp("float32"),
            "empty": ramp("float32", 0, 4),
            "medium, cut where it must be": ramp("int64", 1200),
        },
        "after it": {"a": ramp("int32", 300), "b": ramp("float16", 7, 9)},
        "boxed": {
            "rows": ramp("float32", 5, 8),
            "columns": ramp("int16", 4, 10),
            "held by both": ramp("float32", 16, 20),
        },
        "own": {"rng": ramp("uint8", 16) + rank, "position": 100 + rank},
        "plain": {"step": STEP, "rank": rank},
    }


DIRECTORY, POINTER = f"global_step{STEP}", "latest"


def golden_files() -> dict[str, Any]:
    """The files of the golden directory of version 3, by name."""
    flat = ramp("bfloat16", 9000)
    tied = flat[:8192].view(64, 128)
    return {
        "mp_rank_00_model_states.pt": {
            "module": OrderedDict(embedding=tied, head=tied, bias=flat[8192:8200]),
            "buffers": {"running_mean": ramp("float32", 7), "empty": ramp("float32", 0, 3)},
            "global_steps": STEP,
            "ds_config": {"zero_optimization": {"stage": 1}, "lr": 0.1, "text": "重み"},
        },
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": {
            "single_partition_of_fp32_groups": [ramp("float32", 4500)[:4467]],
            "state": {0: {"step": ramp("float32"), "exp_avg": ramp("float32", 9000)}},
            "dtypes": {name: ramp(name, 3, 5) for name in DTYPES if name != "complex32"},
        },
        "layers/layer_01-model_states.pt": {"strided": ramp("int16", 5, 4)[::2].t()},
    }


def write_version_3(path: Path) -> None:
    """Save the files with the public API."""
    from ckpt_core import Checkpointer, Options

    with tempfile.TemporaryDirectory() as scratch:
        with Checkpointer(scratch, Options(chunk_bytes=16384)) as checkpointer:
            save = checkpointer.begin_files(STEP, DIRECTORY, pointer=POINTER)
            for name, tree in golden_files().items():
                save.add(name, tree)
            written = save.seal().committed.result(timeout=60)
        assert Path(written).name == path.name
        shutil.copytree(written, path)
        shutil.copy(Path(scratch) / POINTER, path.parent)


def write_version_1(step_dir: Path) -> None:
    """Save the first state with the public API."""
    from ckpt_core import Checkpointer

    with tempfile.TemporaryDirectory() as scratch:
        with Checkpointer(scratch) as checkpointer:
            path = checkpointer.save(STEP, golden_state()).committed.result(timeout=60)
        assert Path(path).name == step_dir.name
        shutil.copytree(path, step_dir)


def write_version_2(step_dir: Path) -> None:
    """Lay the second state out by hand, as the ranks of a job would."""
    import xxhash

    from ckpt_core.layout import MANIFEST_NAME, Manifest, RankEntry, rank_manifest_name

    step_dir.mkdir(parents=True)
    rows, state_bytes = [], 0
    for rank in range(RANKS):
        manifest = write_rank(step_dir, rank)
        data, name = manifest.encode(), rank_manifest_name(rank)
        (step_dir / name).write_bytes(data)
        rows.append(RankEntry(rank, name, len(data), xxhash.xxh3_64_hexdigest(data)))
        state_bytes += sum(leaf.nbytes for leaf in manifest.leaves)
        state_bytes += sum(entry.slice.nbytes for entry in manifest.slices)
    step = Manifest(
        step=STEP,
        attempt=f"{STEP:012d}-02c0ffee",
        created_unix_s=1_800_000_000.0,
        ranks=tuple(rows),
        state_bytes=state_bytes,
        world_size=RANKS,
    )
    (step_dir / MANIFEST_NAME).write_bytes(step.encode())


def write_rank(step_dir: Path, rank: int) -> Any:
    """Write one rank's shard; its rank manifest."""
    from ckpt_core.layout import FileEntry, LeafEntry, RankManifest, SliceEntry, shard_name
    from ckpt_core.state import flatten

    flat = flatten(golden_state_2(rank), eager_leaf_bytes=0)
    leaves = {leaf.spec.name: leaf for leaf in flat.leaves}
    parts = shares(leaves, rank)
    layout, image = shard_image(leaves, parts)
    (step_dir / shard_name(rank, 0)).write_bytes(image)
    own, shared = [], []
    for extent in layout.extents:
        spec, part = leaves[extent.name].spec, parts[extent.name]
        if part is None:
            own.append(LeafEntry(spec, 0, extent.offset, extent.nbytes))
        else:
            shared.append(SliceEntry(spec, part, 0, extent.offset))
    return RankManifest(
        rank=rank,
        files=(FileEntry(shard_name(rank, 0), len(image), chunk_sums(image)),),
        leaves=tuple(own),
        skeleton=flat.skeleton.to_json(),
        slices=tuple(shared),
        version=2,
    )


def shard_image(leaves: Mapping[str, Any], parts: Mapping[str, Any]) -> tuple[Any, bytes]:
    """The layout of a shard of these parts, and the bytes of the file."""
    from ckpt_core.layout import ShardLayout, itemsize
    from ckpt_core.types import LeafSpec

    stored, contents = [], {}
    for name, part in parts.items():
        spec, data = leaves[name].spec, part_bytes(leaves[name].tensor, part)
        whole = len(data) == leaves[name].nbytes
        shape = spec.shape if whole else (len(data) // itemsize(spec.dtype),)
        stored.append(LeafSpec(name, spec.dtype, shape))
        contents[name] = data
    layout = ShardLayout.plan((), stored)
    image = bytearray(layout.file_bytes)
    image[: len(layout.header)] = layout.header
    for extent in layout.extents:
        image[extent.offset : extent.offset + extent.nbytes] = contents[extent.name]
    return layout, bytes(image)


def chunk_sums(image: bytes) -> tuple[Any, ...]:
    """Checksums of a file, for every 16 KiB of it."""
    import xxhash

    from ckpt_core.layout import ChunkSum

    pieces = [image[start : start + 2**14] for start in range(0, len(image), 2**14)]
    return tuple(ChunkSum(len(piece), xxhash.xxh3_64_hexdigest(piece)) for piece in pieces)


def shares(leaves: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Leaf name -> the slice that this rank stores; None for a leaf of its own."""
    from ckpt_core.layout import itemsize, share_leaves
    from ckpt_core.types import Block, Slice

    def size(name: str, count: int) -> tuple[int, int]:
        return count * itemsize(leaves[name].spec.dtype), itemsize(leaves[name].spec.dtype)

    found: dict[str, Any] = {name: None for name in leaves if name.startswith("own.")}
    names = [name for name in leaves if name not in found and name not in BOXES]
    sizes = [size(name, leaves[name].tensor.numel()) for name in names]
    dealt = share_leaves(sizes, members=RANKS, member=rank)
    for name, share in zip(names, dealt, strict=True):
        if share is not None:
            found[name] = Slice(*share)
    for name, boxes in BOXES.items():
        block = Block(*boxes[rank])
        alike, number = (RANKS, rank) if boxes[0] == boxes[1] else (1, 0)
        count = torch.Size(block.sizes).numel()
        (share,) = share_leaves([size(name, count)], members=alike, member=number)
        assert share is not None
        found[name] = Slice(*share, block)
    return found


def part_bytes(tensor: torch.Tensor, part: Any) -> bytes:
    """The bytes of a slice of a tensor; None: of all of it."""
    if part is not None and part.block is not None:
        for dim, (offset, size) in enumerate(
            zip(part.block.offsets, part.block.sizes, strict=True)
        ):
            tensor = tensor.narrow(dim, offset, size)
    flat = tensor.contiguous().reshape(-1)
    raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    return raw if part is None else raw[part.begin : part.begin + part.nbytes]


def main() -> None:
    """Write the steps whose directory is missing; one that exists is never written again."""
    from ckpt_core.types import step_dir_name

    for version, name, write in (
        (1, step_dir_name(STEP), write_version_1),
        (2, step_dir_name(STEP), write_version_2),
        (3, DIRECTORY, write_version_3),
    ):
        target = HERE / f"golden-v{version}" / name
        if target.exists():
            print(f"{target} exists: a golden step is written once")
        else:
            write(target)


if __name__ == "__main__":
    main()
