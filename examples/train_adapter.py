"""A low-rank adapter on a frozen GPT: each save writes the adapter, and links the rest.

Run it again after a kill and it goes on, bit for bit. `du -h ROOT` counts the frozen weights once.
"""

from __future__ import annotations

import torch
from common import batch, load_corpus, make_deterministic, parse_args, write_result
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from train_gpt import BATCH, CONTEXT, GPT

from ckpt_core import Checkpointer, EveryNSteps, LastStep, Options, RngState

RANK = 4


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + hidden @ self.down.T @ self.up.T


def adapted(model: GPT) -> GPT:
    """The model with all weights frozen, and adapters in its feed-forward layers."""
    model.requires_grad_(False)
    for layer in model.blocks.layers:
        layer.linear1, layer.linear2 = Adapted(layer.linear1), Adapted(layer.linear2)
    return model


def main() -> None:
    args = parse_args(__doc__)
    make_deterministic(args.seed)
    corpus = load_corpus().to(args.device)
    model = adapted(GPT()).to(args.device)  # pretrained weights, in a real job
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [f"model.{name}" for name, one in model.named_parameters() if not one.requires_grad]
    optimizer = AdamW(trained, lr=1e-3)
    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "rng": RngState(), "losses": losses}
    policy = EveryNSteps(args.every) | LastStep(args.steps)
    options = Options.from_env(share_unchanged=True, frozen=frozen)

    with Checkpointer(args.root, options) as ck:
        restored = ck.restore(state)
        if restored is not None:
            losses[:] = restored.state["losses"]
            print(f"resumed from step {restored.step}", flush=True)
        print("training", flush=True)
        for step in range(restored.step if restored else 0, args.steps):
            window = batch(corpus, seed=args.seed, step=step, size=BATCH, length=CONTEXT)
            loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if policy.should_save(step + 1):
                ck.save(step + 1, state)
                print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    write_result(args.result, step=len(losses), losses=losses, objects=[model, optimizer])
    print(f"done, fingerprint in {args.result}")


if __name__ == "__main__":
    main()
