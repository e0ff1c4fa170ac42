"""Handwritten digits with Lightning: kill it at any instant, run it again, and it goes on, bit for bit."""

from __future__ import annotations

import torch
from common import make_deterministic, parse_args, write_result
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

from ckpt_core.data import ResumableLoader
from ckpt_lightning import AsyncCheckpoint


class ShiftedDigits(Dataset):
    """Real digits, 8 x 8, each shifted by up to a pixel: the workers' random numbers matter."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return self.images[index].roll((down, right), (-2, -1)), self.labels[index]


class Digits(LightningModule):
    """BatchNorm and dropout, so that buffers and the RNG matter too."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten()]
        self.layers = nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(64 * 16, 10))

    def on_train_start(self) -> None:
        if self.global_step:
            print(f"resumed from step {self.global_step}", flush=True)
        print("training", flush=True)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        if self.global_step % 5 == 0:
            print(f"step {self.global_step}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = AdamW(self.parameters(), lr=2e-3)
        cosine = CosineAnnealingLR(optimizer, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def main() -> None:
    args = parse_args(__doc__)
    make_deterministic(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images).float().unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = ShiftedDigits(images[300:], labels[300:])  # the first 300 are held out
    loader = ResumableLoader(train, batch_size=60, shuffle=True, seed=args.seed, num_workers=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": args.device.type, "devices": 1}
    callbacks = [AsyncCheckpoint(args.root, every_n_steps=args.every)]  # all that there is to do
    trainer = Trainer(max_steps=args.steps, callbacks=callbacks, **quiet)
    trainer.fit(model := Digits(), loader)
    found = model.cpu().eval().layers(images[:300]).argmax(1) == labels[:300]
    share = found.float().mean().item()
    objects = [model, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler]
    write_result(args.result, step=trainer.global_step, losses=[share], objects=objects)
    print(f"done, {share:.0%} right, fingerprint in {args.result}")


if __name__ == "__main__":
    main()
