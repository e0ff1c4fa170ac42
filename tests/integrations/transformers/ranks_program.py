"""Two steps of one of several ranks: `python -m ...ranks_program FOLDER`, KIND says of what.

Writes what was warned of into FOLDER/told-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from ckpt_transformers import AcceleratorCheckpoint
from tests.integrations.transformers.jobs import gpt, run
from tests.integrations.transformers.program import FSDP, allow_fsdp_on_cpus


def dispatched(folder: Path) -> None:
    """One rank reads for all."""
    run(folder, accelerator_config={"dispatch_batches": True}, max_steps=2)


def split(folder: Path) -> None:
    """And cuts a batch into one for each."""
    more = {"dispatch_batches": True, "split_batches": True}
    run(folder, accelerator_config=more, max_steps=2)


def thin_adapter(folder: Path) -> None:
    """Of one row, which one rank of FSDP holds alone."""
    from peft import LoraConfig, get_peft_model

    allow_fsdp_on_cpus()
    config = LoraConfig(
        r=1, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    run(folder, model=get_peft_model(gpt(), config), max_steps=2, **FSDP)


def skipping(folder: Path) -> None:
    """A loop of a user's own, in which one rank reads for all: four batches of each are done."""
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader: Any = accelerator.prepare(DataLoader(range(24), batch_size=2))  # type: ignore[arg-type]
    with AcceleratorCheckpoint(accelerator, folder / "ckpts"):
        rest = list(accelerator.skip_first_batches(loader, 4 * 2))
    assert len(rest) == 6 - 4


KINDS: dict[str, Callable[[Path], None]] = {
    "dispatched": dispatched,
    "split": split,
    "skipping": skipping,
    "thin adapter": thin_adapter,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        KINDS[os.environ["KIND"]](folder)
    texts: list[Any] = [str(one.message) for one in told]
    (folder / f"told-{os.environ['RANK']}.json").write_text(json.dumps(texts))
