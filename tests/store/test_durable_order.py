"""Bytes before names, and names before bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_core.system.files import Files
from tests.store.harness import (
    NoExchange,
    OrderWatch,
    QuickFiles,
    fill,
    interrupted,
    make_store,
    save,
)


@pytest.mark.parametrize("base", [QuickFiles, NoExchange])
def test_bytes_are_durable_before_names_and_names_are_lost_before_bytes(
    root: Path, base: type[Files]
) -> None:
    watch = OrderWatch(root)
    store = make_store(root, interrupted(base, watch))
    store.open()
    for step in (1, 2, 3, 3, 4, 4, 5):
        save(store, step, mark=step)
        store.retire()
    store.suspect(5)
    store.quarantine_suspects()
    save(store, 6)
    store.remove([4])
    store.close()
    assert watch.renames > 15


def test_each_kind_of_rename_is_followed_by_a_sync_of_both_directories(root: Path) -> None:
    log: list[tuple[str, str]] = []

    def note(name: str, args: tuple[object, ...]) -> None:
        if name in ("rename", "exchange", "sync_dir"):
            log.append((name, Path(str(args[0])).name))

    store = make_store(root, interrupted(QuickFiles, note))
    store.open()
    attempt = store.begin(1)
    fill(store, attempt, mark=1)
    log.clear()
    store.publish(attempt)
    both = [("sync_dir", ".inflight"), ("sync_dir", root.name)]
    assert log == [("sync_dir", attempt.id), ("rename", attempt.id), *both]
    store.close()
