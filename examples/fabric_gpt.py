"""The GPT of train_gpt.py in a loop of Fabric's: kill it at any instant, run it again, and it goes on."""

from __future__ import annotations

import torch
from common import batch, load_corpus, make_deterministic, parse_args, write_result
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from train_gpt import BATCH, CONTEXT, GPT

from ckpt_lightning import FabricCheckpoint


def main() -> None:
    args = parse_args(__doc__)
    make_deterministic(args.seed)
    saving = FabricCheckpoint(args.root, every_n_steps=args.every)
    fabric = Fabric(accelerator=args.device.type, devices=1, callbacks=[saving])
    fabric.launch()
    corpus = load_corpus().to(fabric.device)
    module = GPT()
    model, optimizer = fabric.setup(module, AdamW(module.parameters(), lr=1e-3))
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "losses": []}
    state["step"] = 0
    torch.manual_seed(args.seed)

    saving.attach(fabric)
    if saving.restore(state) is not None:  # the newest whole step, in place
        print(f"resumed from step {state['step']}", flush=True)
    print("training", flush=True)
    while state["step"] < args.steps:
        window = batch(corpus, seed=args.seed, step=state["step"], size=BATCH, length=CONTEXT)
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        scheduler.step()
        state["losses"].append(loss.item())
        state["step"] += 1
        if state["step"] % 5 == 0:
            print(f"step {state['step']}: loss {loss.item():.4f}", flush=True)
        fabric.call("on_train_batch_end", state=state)  # saves when one is due
    fabric.call("on_train_end", state=state)  # saves the last one; all is durable
    objects = [module, optimizer, scheduler]
    write_result(args.result, step=state["step"], losses=state["losses"], objects=objects)
    print(f"done, fingerprint in {args.result}")


if __name__ == "__main__":
    main()
