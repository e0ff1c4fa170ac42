"""Which random numbers the batches of an epoch are drawn with, so that the rest of it is drawn with the same.

Accelerate's loaders fetch one batch ahead. When a step is saved, the next batch has been fetched already:
what its dataset and its collator drew (masks of DataCollatorForLanguageModeling, augmentation) came from
generators as they were *before* the step that is saved. Trainer itself fetches that batch anew with whatever
the generators hold, and puts them back behind it.

So each fetch notes what it was drawn from, and a resumed epoch begins as the saved one went on:

    epoch begins    generators of the epoch's begin    order of data, seeds of workers
    fetch n + 1     those that it was drawn from
    fetch n + 2     those of the step that was saved

Where a loader has workers, or no sampler, only the first of these is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckpt_core import RngState


class Fetches:
    """Stands before the batch sampler of a loader without workers. Used on the training thread."""

    def __init__(self) -> None:
        self._inner: Any = None
        self._fetched = 0
        self._drawn_from: dict[str, Any] | None = None
        self._skip = 0
        self._due: list[dict[str, Any]] = []

    def watch(self, loader: Any) -> None:
        """Begin, if this is a loader that can be watched."""
        base = getattr(loader, "base_dataloader", loader)
        if type(base) is not DataLoader or base.num_workers or base.batch_sampler is None:
            return
        if isinstance(base.dataset, IterableDataset):
            return
        self._inner = base.batch_sampler
        # DataLoader lets nobody replace it, lest its other attributes say something else: here they do not.
        object.__setattr__(base, "batch_sampler", self)

    def state(self, *, yielded: int) -> dict[str, Any] | None:
        """What the batch was drawn from that has been fetched and not yet been used; None without one."""
        return self._drawn_from if self._fetched > yielded else None

    def resume(self, *, yielded: int, drawn_from: dict[str, Any] | None, saved: Any) -> None:
        """The next epoch begins behind `yielded` batches, whose generators were `saved` then."""
        self._skip = yielded
        self._due = ([drawn_from] if drawn_from is not None else []) + [saved]

    def put_back_rest(self) -> bool:
        """Put back what no fetch of the resumed epoch has asked for; whether there was any."""
        left, self._due = self._due, []
        if left:
            RngState().load_state_dict(left[-1])
        return bool(left)

    # -- as a batch sampler ----------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        self._fetched = 0
        for indices in self._inner:
            self._fetched += 1
            if self._fetched > skip:
                if self._due:
                    RngState().load_state_dict(self._due.pop(0))
                self._drawn_from = RngState().state_dict()
            yield indices

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)
