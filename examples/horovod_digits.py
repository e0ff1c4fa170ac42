"""Handwritten digits on two processes under Horovod: snapshots layer by layer, right after each all-reduce.

horovodrun -np 2 python examples/horovod_digits.py --root ckpts --steps 200 --every 20 --result result.json
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from common import make_deterministic, parse_args, write_result
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import ckpt_horovod
from ckpt_core import Checkpointer, Options
from ckpt_core.data import ResumableLoader, ResumableSampler


def make_model() -> nn.Module:
    """BatchNorm and dropout, so that buffers and the RNG matter too."""
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(64 * 16, 10))


def main() -> None:
    args = parse_args(__doc__)
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    make_deterministic(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[300:], labels[300:])  # the first 300 are held out
    sampler = ResumableSampler(train, seed=args.seed, rank=rank, world_size=ranks)
    loader = ResumableLoader(train, batch_size=30, sampler=sampler)
    model = make_model().to(args.device)
    torch.manual_seed(args.seed + 1000 * rank)  # dropout differs from rank to rank
    losses: list[float] = []
    world = ckpt_horovod.coordination()
    with Checkpointer(args.root, Options.from_env(), coordination=world) as ck:
        optimizer = ckpt_horovod.DistributedOptimizer(
            AdamW(model.parameters(), lr=2e-3),
            named_parameters=model.named_parameters(),
            checkpointer=ck,
            every_n_steps=args.every,
            layerwise="in_step",
        )
        scheduler = CosineAnnealingLR(optimizer, args.steps)
        optimizer.attach(model=model, scheduler=scheduler, data=loader)
        restored = optimizer.restore(losses=losses)  # the same step on every rank
        if restored is not None:
            print(f"resumed from step {restored.step}", flush=True)
        print("training", flush=True)
        while optimizer.iterations < args.steps:
            for image, label in loader:
                with optimizer.iteration(losses=losses):  # ends, and is saved where it is due
                    loss = F.cross_entropy(model(image.to(args.device)), label.to(args.device))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                    losses.append(loss.item())
                if (step := optimizer.iterations) % 5 == 0:
                    print(f"step {step}: loss {loss.item():.4f} on rank {rank}", flush=True)
                if step == args.steps:
                    break
    if rank == 0:
        objects = [model, optimizer, scheduler]
        write_result(args.result, step=len(losses), losses=losses, objects=objects)
        print(f"done, fingerprint in {args.result}")


if __name__ == "__main__":
    main()
