"""States to save and a model to train. Imported only by the contenders' processes: it needs torch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn

from ckpt_core.bench.contenders import State

_SHORT = 1024
_COLUMNS = 256


def large_state(*, state_bytes: int, leaves: int) -> State:
    """About `state_bytes` in float32: three quarters matrices of one size, one quarter vectors."""
    vectors = leaves // 4
    matrices = leaves - vectors
    rows = max(1, (state_bytes - 4 * _SHORT * vectors) // matrices // (4 * _COLUMNS))
    shapes: list[tuple[int, ...]] = [(rows, _COLUMNS)] * matrices + [(_SHORT,)] * vectors
    return _filled(shapes)


def small_leaves_state(*, leaves: int, leaf_bytes: int) -> State:
    """Many leaves of one small size."""
    return _filled([(leaf_bytes // 4,)] * leaves)


def still_state(*, state_bytes: int, leaves: int) -> State:
    """About `state_bytes`: a base of 99 % in so many tensors, and an adapter in a twentieth of them."""
    adapters = max(leaves // 20, 1)
    sizes = {"base": (state_bytes * 99 // 100, leaves), "adapter": (state_bytes // 100, adapters)}
    generator = torch.Generator().manual_seed(0)
    return {
        f"{part}.block{index:05d}": torch.rand(max(nbytes // count // 4, 1), generator=generator)
        for part, (nbytes, count) in sizes.items()
        for index in range(count)
    }


def untouched_state(*, state_bytes: int) -> State:
    """A size without content: its memory is never touched, so it takes none."""
    return {"raw": torch.empty(state_bytes // 4)}


def _filled(shapes: list[tuple[int, ...]]) -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        f"block{index:05d}.weight": torch.rand(shape, generator=generator)
        for index, shape in enumerate(shapes)
    }


def mark(state: State, step: int) -> None:
    """Make the state of one step differ from that of any other."""
    for tensor in (next(iter(state.values())), next(reversed(state.values()))):
        tensor.view(-1)[0] = step


def change(state: State, below: str) -> None:
    """Change every leaf whose name begins so, and no other."""
    for name, tensor in state.items():
        if name.startswith(below):
            tensor.add_(1)


def digest(state: State) -> str:
    """Checksum of all names and bytes."""
    total = xxhash.xxh3_64()
    for name, tensor in state.items():
        assert tensor.is_contiguous(), name
        total.update(name.encode())
        total.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return total.hexdigest()


def scramble(state: State) -> None:
    """Overwrite every leaf, so that nothing is equal by accident afterwards."""
    for tensor in state.values():
        tensor.fill_(-1.0)


@dataclass(slots=True)
class Training:
    """A small language model with AdamW on random tokens."""

    model: nn.Module
    optimizer: torch.optim.AdamW
    batches: itertools.cycle[torch.Tensor]

    @classmethod
    def start(cls, size: dict[str, Any]) -> Training:
        """Build it and take the first step, so that the optimizer has all its state.

        Args:
            size: fields of `ModelSize`.
        """
        torch.manual_seed(0)
        model = language_model(size["width"], size["layers"], size["vocabulary"])
        batches = token_batches(size, torch.default_generator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        training = cls(model, optimizer, itertools.cycle(batches))
        training.step(lambda: None)
        return training

    def step(self, before_update: Callable[[], None]) -> None:
        """One optimizer step; `before_update` runs after backward, before anything changes."""
        self._backward()
        before_update()
        self.optimizer.step()

    def _backward(self) -> None:
        batch = next(self.batches)
        loss = next_word_loss(self.model(batch[:, :-1]), batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]

    def state(self) -> State:
        """Aliases of every live parameter and optimizer tensor."""
        state: State = {}
        for name, parameter in self.model.named_parameters():
            state[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                state[f"optimizer.{name}.{key}"] = value
        return state


def token_batches(size: Mapping[str, Any], generator: torch.Generator) -> list[torch.Tensor]:
    """A few random batches, to be trained on over and over; `size` has fields of `ModelSize`."""
    shape = (size["batch"], size["tokens"] + 1)
    return [torch.randint(size["vocabulary"], shape, generator=generator) for _ in range(8)]


def next_word_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Of a model that was given all words of a batch but the last."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def language_model(width: int, layers: int, vocabulary: int) -> nn.Module:
    """A stack of transformer blocks, from words to scores of words."""
    blocks = [
        nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(layers)
    ]
    return nn.Sequential(
        nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary, bias=False)
    )
