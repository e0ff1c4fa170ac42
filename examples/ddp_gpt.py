"""The GPT of train_gpt.py on several processes: each writes its share, one commit, any number restores.

torchrun --nproc-per-node 2 examples/ddp_gpt.py --root ckpts --steps 200 --every 20 --result result.json
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import batch, load_corpus, make_deterministic, parse_args, write_result
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from train_gpt import BATCH, CONTEXT, GPT

from ckpt_core import Checkpointer, EveryNSteps, LastStep, Options, RngState, TorchStore


def main() -> None:
    args = parse_args(__doc__)
    dist.init_process_group("gloo")  # for any device, and for ranks that share one
    rank, ranks = dist.get_rank(), dist.get_world_size()
    make_deterministic(args.seed)
    corpus = load_corpus().to(args.device)
    model = DistributedDataParallel(GPT().to(args.device))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
    torch.manual_seed(args.seed + 1000 * rank)  # dropout differs from rank to rank
    losses: list[float] = []
    # Model and optimizer are equal on all ranks: each stores a slice. RNG and losses are each rank's own.
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"rng": RngState(), "losses": losses}
    policy = EveryNSteps(args.every) | LastStep(args.steps)

    options = Options.from_env(in_flight=2)
    with Checkpointer(args.root, options, coordination=TorchStore.from_env()) as ck:
        restored = ck.restore(state)  # all ranks restore the same step
        if restored is not None:
            losses[:] = restored.state["losses"]
            print(f"resumed from step {restored.step}", flush=True)
        print("training", flush=True)
        for step in range(restored.step if restored else 0, args.steps):
            seed = args.seed + 1000 * rank  # each rank its own text
            window = batch(corpus, seed=seed, step=step, size=BATCH, length=CONTEXT)
            logits = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            done = step + 1
            if policy.should_save(done):
                ck.save(done, state)
                print(f"step {done}: loss {losses[-1]:.4f} on rank {rank} of {ranks}", flush=True)
    if rank == 0:
        objects = [model, optimizer, scheduler]
        write_result(args.result, step=len(losses), losses=losses, objects=objects)
        print(f"done, fingerprint in {args.result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
