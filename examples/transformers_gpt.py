"""GPT-2 with Hugging Face's Trainer: kill it at any instant, run it again, and it goes on, bit for bit."""

from __future__ import annotations

import os
from typing import Any

from common import load_corpus, make_deterministic, parse_args, write_result
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ckpt_transformers import AsyncCheckpoint

CONTEXT, WINDOWS = 64, 640


class Text(Dataset):
    """Windows of real text, byte by byte."""

    def __init__(self, corpus: Tensor) -> None:
        self.windows = corpus[: WINDOWS * CONTEXT].view(WINDOWS, CONTEXT).long()

    def __len__(self) -> int:
        return WINDOWS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[number], "labels": self.windows[number]}


class Tells(TrainerCallback):
    """What this program prints."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            print(f"resumed from step {state.global_step}", flush=True)
        print("training", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.4f}", flush=True)


def main() -> None:
    args = parse_args(__doc__)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make_deterministic(args.seed)
    size = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    settings = TrainingArguments(
        output_dir=f"{args.root}-out",
        max_steps=args.steps,
        save_steps=args.every,
        save_total_limit=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=5,
        seed=args.seed,
        use_cpu=args.device.type == "cpu",
        report_to=[],
        disable_tqdm=True,
    )
    callbacks = [AsyncCheckpoint(args.root), Tells()]  # the first is all that there is to do
    data = Text(load_corpus())
    trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=True)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    objects = [model, trainer.optimizer, trainer.lr_scheduler]
    write_result(args.result, step=trainer.state.global_step, losses=losses, objects=objects)
    print(f"done, fingerprint in {args.result}")


if __name__ == "__main__":
    main()
