"""A small GPT that may be killed at any instant: run it again and it goes on, bit for bit."""

from __future__ import annotations

import sys

import torch
from common import batch, load_corpus, make_deterministic, parse_args, write_result
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from ckpt_core import Checkpointer, EveryNSteps, LastStep, Options, RngState

CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 64, 4, 256, 4, 8
STOPPED = 143  # what a shell reports for a process that SIGTERM ended


class GPT(nn.Module):
    """Bytes in, the next byte out; 3.3 million parameters. Dropout makes the RNG matter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.places.weight[:length]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def main() -> None:
    args = parse_args(__doc__)
    make_deterministic(args.seed)
    corpus = load_corpus().to(args.device)
    model = GPT().to(args.device)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"rng": RngState(), "losses": losses}
    policy = EveryNSteps(args.every) | LastStep(args.steps)

    with Checkpointer(args.root, Options.from_env(), on_sigterm="save") as ck:
        restored = ck.restore(state)  # the newest valid step, in place
        if restored is not None:
            losses[:] = restored.state["losses"]
            print(f"resumed from step {restored.step}", flush=True)
        print("training", flush=True)
        for step in range(restored.step if restored else 0, args.steps):
            window = batch(corpus, seed=args.seed, step=step, size=BATCH, length=CONTEXT)
            loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # waits by itself while a snapshot still reads what it changes
            scheduler.step()
            losses.append(loss.item())
            stop, done = ck.stop_requested, step + 1
            if stop or policy.should_save(done):
                ck.save(done, state)
                print(f"step {done}: loss {losses[-1]:.4f}", flush=True)
            if stop:
                ck.wait()
                print(f"stopped at step {done}", flush=True)
                sys.exit(STOPPED)
    done, objects = len(losses), [model, optimizer, scheduler]
    write_result(args.result, step=done, losses=losses, objects=objects)
    print(f"done, fingerprint in {args.result}")


if __name__ == "__main__":
    main()
