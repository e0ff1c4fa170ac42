"""Tiny modules and loaders that between them use every part of Lightning that a resume has to get right."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

BATCHES, BATCH_SIZE, FEATURES = 5, 4, 6


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with random augmentation, drawn where they are fetched."""

    def __init__(self, *, augment: bool = True) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(BATCHES * BATCH_SIZE, FEATURES, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(FEATURES) * 0.1 if self.augment else torch.zeros(FEATURES)
        return self.x[index] + noise, self.y[index]


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __iter__(self) -> Iterator[Any]:
        data = Noisy()
        return (data[index] for index in torch.randperm(len(data)).tolist())


def train_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, **options)


def stream_loader() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=BATCH_SIZE)


def val_loader() -> DataLoader[Any]:
    return DataLoader(Noisy(augment=False), batch_size=BATCH_SIZE)


class Net(LightningModule):
    """Dropout (random numbers), BatchNorm (buffers that change in the forward pass), AdamW, a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


class StepPlateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        config = {"scheduler": schedule, "monitor": "val_loss", "interval": "step", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Weighing(Net):
    """Keeps a sum of validation's losses that tells in which order its batches came."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("validated", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.mul_(0.5).add_(self.loss(batch))


class Pair(Net):
    """Takes batches of several loaders at once."""

    def loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            return sum(super(Pair, self).loss(part) for part in batch.values() if part is not None)
        return super().loss(batch)


class MakesLoaders(Net):
    """Draws the samples that it trains with when it makes a loader."""

    def train_dataloader(self) -> DataLoader[Any]:
        chosen = torch.randperm(BATCHES * BATCH_SIZE)[: 4 * BATCH_SIZE].tolist()
        return DataLoader(Subset(Noisy(), chosen), batch_size=BATCH_SIZE, shuffle=True)


class Numbered(Net):
    """Weighs batches by their number."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * (1 + batch_idx)


class LeavesEpochs(Numbered):
    """Leaves the first epoch before its fourth batch, the third before its first."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == {0: 3, 2: 0}.get(self.current_epoch) else None


class TrainingPlateau(Net):
    """A plateau scheduler that goes by what each batch logs; every third batch logs nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if batch_idx % 3 < 2:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        schedule = plateau(optimizer, patience=0, threshold=0.3, factor=0.7)
        config = {"scheduler": schedule, "monitor": "train_loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Lbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)


class TwoManual(Net):
    """Two optimizers that the module steps itself; only one of them in odd batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            if number and batch_idx % 2:
                continue
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        if batch_idx == BATCHES - 1:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.net[:3].parameters(), lr=0.01)
        second = torch.optim.SGD(self.net[3:].parameters(), lr=0.01, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, 0.5)]


class AddsUpByHand(Net):
    """Steps one optimizer in each batch, and the other in the fourth of each epoch: gradients of that one
    are added up from the fifth batch on, across the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        often, seldom = self.optimizers()
        often.zero_grad()
        self.manual_backward(self.loss(batch) / 4)
        often.step()
        if (batch_idx + 1) % 4 == 0:
            seldom.step()
            seldom.zero_grad()

    def configure_optimizers(self) -> Any:
        often = torch.optim.AdamW(self.net[:3].parameters(), lr=0.01)
        return [often, torch.optim.SGD(self.net[3:].parameters(), lr=0.1, momentum=0.9)]


class OneByHand(AddsUpByHand):
    """One optimizer, which steps in the fourth batch of each epoch alone."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / 4)
        if (batch_idx + 1) % 4 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Free(torch.optim.SGD):
    """As schedule-free optimizers do, it has other weights in validation, made in place in `eval()`.

    Their averages are part of its state; whether they are swapped in is told by the groups.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        for group in self.param_groups:
            group["train_mode"] = True

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert all(group["train_mode"] for group in self.param_groups)
        loss = super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("average", param.clone()).lerp_(param, 0.3)
        return loss

    @torch.no_grad()
    def _swap(self, train: bool) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["train_mode"] is not train else ():
                if "average" in self.state[param]:
                    average = self.state[param]["average"]
                    kept = param.clone()
                    param.copy_(average)
                    average.copy_(kept)
            group["train_mode"] = train


class ScheduleFree(Net):
    """Swaps weights in its hooks, which come behind those of callbacks."""

    def on_validation_epoch_start(self) -> None:
        self.optimizers().optimizer.eval()

    def on_validation_end(self) -> None:
        self.optimizers().optimizer.train()

    def configure_optimizers(self) -> Any:
        return Free(self.parameters())


class OwnHook(Net):
    """Changes weights and buffers in its own on_train_batch_end, after every callback."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8, FEATURES))
        self.count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        weight = self.net[0].weight
        self.average.mul_(0.9).add_(weight.detach(), alpha=0.1)
        with torch.no_grad():
            weight.clamp_(-0.35, 0.35)
        self.count += 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        # The average takes part in training, so that a wrong one shows.
        return self.loss(batch) + 0.1 * (self.net[0].weight - self.average).pow(2).sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]


class DrawsInHook(OwnHook):
    """Draws there as well, as one does that samples from its model now and then."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        torch.rand(1 + self.count % 3)
        random.random()


class DrawsAsEpochsBegin(Net):
    """Draws in its own hook, which nobody calls where a run resumes within an epoch."""

    def on_train_epoch_start(self) -> None:
        torch.rand(3 + self.current_epoch)


class SwapsInHook(Weighing):
    """Validates with averaged weights, which it swaps in and out in its own hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.count = 0

    def on_before_optimizer_step(self, *args: Any) -> None:
        for average, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.1)

    def on_validation_start(self) -> None:
        for average, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
            kept = weight.detach().clone()
            weight.data.copy_(average)
            average.copy_(kept)

    def on_validation_end(self) -> None:
        self.on_validation_start()
        self.count += 1
        torch.rand(1 + self.count % 3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]


class SwapsForPlateau(SwapsInHook, StepPlateau):
    """The same with a scheduler that goes by what is validated, in a hook behind that."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        StepPlateau.validation_step(self, batch, batch_idx)

    def on_validation_end(self) -> None:
        """Left to the hook behind it."""

    def on_validation_model_train(self) -> None:
        self.train()
        super().on_validation_end()


class DrawsInHookOfPair(DrawsInHook, Pair):
    """The same with batches of several loaders."""
