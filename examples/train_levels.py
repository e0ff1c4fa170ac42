"""The GPT of train_gpt.py, which survives the loss of its disk: steps go on to further roots (levels).

python examples/train_levels.py --root ckpts --steps 200 --every 10 --result result.json \\
    --level /backup/run --level-every 50         or --level s3://bucket/run, with ckpt-core[remote]

Run it again after its root was deleted, and it goes on from the level, bit for bit.
"""

from __future__ import annotations

from common import batch, load_corpus, make_deterministic, parse_args, write_result
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from train_gpt import BATCH, CONTEXT, GPT

from ckpt_core import Checkpointer, EveryNSteps, LastStep, Level, Options, RngState


def main() -> None:
    args = parse_args(__doc__, levels=True)
    make_deterministic(args.seed)
    corpus = load_corpus().to(args.device)
    model = GPT().to(args.device)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"rng": RngState(), "losses": losses}
    policy = EveryNSteps(args.every) | LastStep(args.steps)
    levels = [Level(url, every=args.level_every) for url in args.level]  # all that there is to do

    with Checkpointer(args.root, Options(levels=levels)) as ck:
        restored = ck.restore(state)  # the newest step that is whole anywhere
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
            scheduler.step()
            losses.append(loss.item())
            done = step + 1
            if policy.should_save(done):
                ck.save(done, state)
                print(f"step {done}: loss {losses[-1]:.4f}", flush=True)
    write_result(
        args.result, step=len(losses), losses=losses, objects=[model, optimizer, scheduler]
    )
    print(f"done, fingerprint in {args.result}")


if __name__ == "__main__":
    main()
