"""A model under a DeepSpeed engine on one rank, from the same seed each time. Needs torch and DeepSpeed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ckpt_core.bench import workloads


class Training:
    """The language model of the other suites in bf16, with AdamW.

    Attributes:
        engine: DeepSpeed's.
    """

    def __init__(self, size: Mapping[str, Any], *, stage: int, config: Mapping[str, Any]) -> None:
        """Build it anew; every rank calls it.

        Args:
            size: fields of `ModelSize`.
            stage: of ZeRO.
            config: more keys of DeepSpeed's configuration: the way to save.
        """
        torch.manual_seed(0)
        model = workloads.language_model(size["width"], size["layers"], size["vocabulary"])
        # torch's AdamW: DeepSpeed's own is compiled on a machine's first run, which takes minutes.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        base = {
            "train_micro_batch_size_per_gpu": size["batch"],
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config={**base, **config}
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._batches = itertools.cycle(workloads.token_batches(size, generator))

    def step(self) -> None:
        """One optimizer step."""
        batch = next(self._batches)
        logits = self.engine(batch[:, :-1]).float()
        self.engine.backward(workloads.next_word_loss(logits, batch))
        self.engine.step()

    def digest(self) -> str:
        """Checksum of this rank's parameters and optimizer state."""
        total = xxhash.xxh3_64()
        for tensor in self._state():
            total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def scramble(self) -> None:
        """Overwrite all of it, so that nothing is equal by accident afterwards."""
        for tensor in self._state():
            tensor.fill_(-1.0)

    def _state(self) -> list[Tensor]:
        params = list(self.engine.module.parameters())
        # At ZeRO 3 a rank holds its part of a parameter.
        held = [getattr(param, "ds_tensor", param) for param in params]
        found = [*held, *tensors_in(self.engine.optimizer.state_dict())]
        return [tensor.detach().reshape(tensor.shape or (1,)) for tensor in found if tensor.numel()]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, in an order that is the same each time."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from tensors_in(tree[key])
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)


def held_by(tag: Path) -> tuple[int, int]:
    """Tensors in the files of a tag, shared ones once: their bytes, and how many they are."""
    sizes: dict[Any, int] = {}
    for path in sorted(tag.rglob("*.pt")):
        tree = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        for tensor in tensors_in(tree):
            if tensor.numel():
                sizes[path.name, tensor.data_ptr(), tensor.shape] = tensor.nbytes
    return sum(sizes.values()), len(sizes)
