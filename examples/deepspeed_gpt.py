"""The GPT of train_gpt.py under DeepSpeed, ZeRO stage 2: one key of the configuration saves behind training.

torchrun --nproc-per-node 2 examples/deepspeed_gpt.py --root ckpts --steps 200 --every 20 --result result.json
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import batch, load_corpus, make_deterministic, parse_args, write_result
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from train_gpt import BATCH, CONTEXT, GPT

CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 1_000_000,
    "checkpoint_engine": {"type": "ckpt_core"},  # all that there is to do
}


def main() -> None:
    args = parse_args(__doc__)
    os.environ["DS_ACCELERATOR"] = args.device.type  # read where DeepSpeed is imported
    import deepspeed

    import ckpt_deepspeed  # before deepspeed.initialize: without it DeepSpeed ignores the key

    on_cpu = args.device.type == "cpu"
    deepspeed.init_distributed("gloo" if on_cpu else "nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    make_deterministic(args.seed)
    corpus = load_corpus().to(args.device)
    model = GPT()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG
    )
    torch.manual_seed(args.seed + 1000 * rank)  # dropout differs from rank to rank
    dropout = torch.random if on_cpu else torch.get_device_module(args.device)
    losses: list[float] = []
    path, client = engine.load_checkpoint(args.root)  # the newest tag that is whole
    if path is not None:
        # Rank 0 writes client_state, so what belongs to each rank is in it by rank.
        losses = client["losses"]
        dropout.set_rng_state(client["rng"][rank])
        print(f"resumed from step {engine.global_steps}", flush=True)
    print("training", flush=True)
    for step in range(engine.global_steps, args.steps):
        seed = args.seed + 1000 * rank  # each rank its own text
        window = batch(corpus, seed=seed, step=step, size=BATCH, length=CONTEXT)
        logits = engine(window[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        done = step + 1
        if done == args.steps or done % args.every == 0:
            generators: list[torch.Tensor] = [torch.empty(0)] * ranks
            dist.all_gather_object(generators, dropout.get_rng_state())
            engine.save_checkpoint(args.root, client_state={"losses": losses, "rng": generators})
            print(f"step {done}: loss {losses[-1]:.4f} on rank {rank} of {ranks}", flush=True)
    ckpt_deepspeed.close()  # the last tag is durable, and `latest` names it
    if rank == 0:
        objects = [engine.module, engine.optimizer, engine.lr_scheduler]
        write_result(args.result, step=len(losses), losses=losses, objects=objects)
        print(f"done, fingerprint in {args.result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
