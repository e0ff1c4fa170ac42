"""What the code of each page finds when it begins: names that the page speaks of and does not make.

A page's blocks run in its order, in one namespace and one empty directory; a page that needs a framework
runs with the tests of that framework, and the README's program in a process of its own (tests/test_docs.py).
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from ckpt_core.bench.meeting import free_port
from ckpt_core.cli.app import app
from tests.docs.snippets import EXCERPT, TOP, blocks_of, words_of

COMMAND: Any = typer.main.get_command(app)


def _nothing() -> dict[str, Any]:
    return {}


def _training() -> dict[str, Any]:
    """A model, its optimizer and what a loop needs."""
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()

    def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
        return model(torch.full((3, 4), float(step))).square().mean()

    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100),
        "StepLR": torch.optim.lr_scheduler.StepLR,
        "state": {"model": model, "optimizer": optimizer},
        "loss_of": loss_of,
        "total_steps": 200,
    }


def _one_rank() -> dict[str, Any]:
    """What torchrun tells a job of one rank, beside the above."""
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return _training() | {"residual": torch.zeros(2048)}


def _deepspeed() -> dict[str, Any]:
    names = _training()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": False},
    }
    # A page that changes over goes on behind the end of the run before.
    total_steps = 300 if Path("ckpts/latest").exists() else 200
    return names | {"config": config, "total_steps": total_steps}


def _lightning() -> dict[str, Any]:
    from tests.integrations.lightning import models

    torch.manual_seed(7)
    return {
        "MyModule": models.Net,
        "model": models.Net(),
        "dataset": models.Noisy(),
        "train_loader": models.train_loader(),
        "val_loader": models.val_loader(),
    }


def _transformers() -> dict[str, Any]:
    from tests.integrations.transformers import jobs

    return {"model": jobs.gpt(), "dataset": jobs.Words()}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a page finds, the framework that it needs, whether each of its blocks begins anew, and the warning
    that it speaks of."""

    names: Callable[[], dict[str, Any]] = _nothing
    framework: str = ""
    apart: bool = False
    warning: str = ""


PREPARED = {
    "docs/data.md": Prepared(),
    "docs/deepspeed.md": Prepared(_deepspeed, "deepspeed"),
    "docs/from-dcp.md": Prepared(_one_rank, apart=True),
    "docs/from-deepspeed.md": Prepared(_deepspeed, "deepspeed", apart=True),
    "docs/from-model-checkpoint.md": Prepared(
        _lightning, "lightning", apart=True, warning="Be aware that when using `ckpt_path`"
    ),
    "docs/from-torch-save.md": Prepared(_training, apart=True),
    "docs/horovod.md": Prepared(_training, "horovod"),
    "docs/lightning.md": Prepared(_lightning, "lightning"),
    "docs/metrics.md": Prepared(),
    "docs/parts.md": Prepared(_training, warning="step 100 fits the state in part"),
    "docs/policy.md": Prepared(_training),
    "docs/presets.md": Prepared(),
    "docs/ranks.md": Prepared(_one_rank),
    "docs/start.md": Prepared(),
    "docs/transformers.md": Prepared(_transformers, "transformers"),
    "docs/unchanged.md": Prepared(),
}


def pages_of(framework: str) -> list[str]:
    """The pages whose code needs this framework; "" for none."""
    return [page for page, prepared in PREPARED.items() if prepared.framework == framework]


def run_page(page: str) -> dict[str, Any]:
    """Run all blocks of a page but its excerpts, and its imports and exports; the names that they leave."""
    prepared = PREPARED[page]
    names = prepared.names()
    for block in blocks_of(Path(TOP, page)):
        if block.language == "sh" and re.match("ckpt-core (import|export) ", block.text):
            assert COMMAND.main(words_of(block.text), standalone_mode=False) is None
        if block.language == "python" and block.kind != EXCERPT:
            names = prepared.names() if prepared.apart else names
            # As many lines down as in the page, so that an error names the line there.
            code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
            with warnings.catch_warnings():
                if prepared.warning:
                    warnings.filterwarnings("ignore", prepared.warning)
                exec(code, names)
    return names
