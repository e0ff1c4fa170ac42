"""Write the golden step of the current format version: `python tests/compat/make_golden.py`.

Run once for each format version; the result is committed and never written again, so that every
later release proves that it still reads what this one wrote.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import OrderedDict
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


def main() -> None:
    """Save the state with the public API and keep the three files of its step."""
    from ckpt_core import Checkpointer
    from ckpt_core.layout import FORMAT_VERSION
    from ckpt_core.types import step_dir_name

    target = HERE / f"golden-v{FORMAT_VERSION}"
    if target.exists():
        sys.exit(f"{target} exists: a golden step is written once")
    with tempfile.TemporaryDirectory() as scratch:
        with Checkpointer(scratch) as checkpointer:
            path = checkpointer.save(STEP, golden_state()).committed.result(timeout=60)
        assert Path(path).name == step_dir_name(STEP)
        shutil.copytree(path, target / step_dir_name(STEP))


if __name__ == "__main__":
    main()
