"""A root in the hands of a tool, beside the training jobs that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_core.store.store import StepStore
from ckpt_core.system.files import Files


def store_by_hand(root: Path, *, files: Files) -> StepStore:
    """A store that retires nothing by itself, leaves every slot and makes none. Not open yet."""
    return StepStore(root, files=files, keep_last=None, keep_every=None, spare_slots=None)


@contextmanager
def opened_by_hand(root: Path, *, files: Files) -> Iterator[StepStore]:
    """The same, open for the body.

    Raises:
        As `StepStore.open`.
    """
    store = store_by_hand(root, files=files)
    store.open()
    try:
        yield store
    finally:
        store.close()
