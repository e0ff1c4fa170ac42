"""torch_checkpointing: staging into shared memory, written by a process of its own."""

from __future__ import annotations

import resource
from concurrent.futures import Future
from importlib import import_module
from typing import Any, ClassVar

from ckpt_core.bench.contenders.base import (
    Contender,
    Handle,
    Profile,
    State,
)

_ITEMS = 4
_OTHER_DESCRIPTORS = 512


class TorchCheckpointing(Contender):
    """`CheckpointManager` with asynchronous staging, shared memory and one writer for each item.

    Direct I/O is off: its stream writes unaligned buffers, which ext4 refuses with EINVAL after the
    file was opened, too late for its own fallback.
    """

    name: ClassVar[str] = "torch_checkpointing"
    title: ClassVar[str] = "torch_checkpointing"
    fsyncs: ClassVar[str] = "no"
    modules: ClassVar[tuple[str, ...]] = (
        "torch_checkpointing",
        "torch_checkpointing.storage.filesystem",
    )
    distribution: ClassVar[str] = "torch_checkpointing"
    memory_states: ClassVar[int] = 2
    setup: ClassVar[str] = (
        f"shared memory, async staging, {_ITEMS} items and writers, use_direct_io=False"
    )

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        library: Any = import_module("torch_checkpointing")
        storage: Any = import_module("torch_checkpointing.storage.filesystem")
        writer = library.CheckpointWriterConfig(file_write_max_threads=_ITEMS)
        config = library.CheckpointManager.Config(
            save=library.AsyncCheckpointSaverConfig(writer_config=writer),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager: Any = config.build()

    def save(self, state: State, step: int) -> Handle:
        """Start a save; the library itself waits for the previous one."""
        _choose_sharing(len(state))
        write = self._manager.save(str(self._paths.next(step)), _items(state))
        return _Pending(self._manager, write, self._profile.timeout_s)

    def load_into(self, state: State) -> None:
        """Load into the live tensors."""
        self._manager.load(str(self._paths.current()), into=_items(state), strict=True)

    def close(self) -> None:
        """End the writer process."""
        self._manager.close()


class _Pending:
    persist_s: float | None = None

    def __init__(self, manager: Any, write: Future[Any], timeout_s: float) -> None:
        self._manager = manager
        self._write = write
        self._timeout_s = timeout_s

    def barrier(self) -> None:
        """Its documented guard of `optimizer.step()`."""
        with self._manager.lock():
            pass

    def wait_durable(self) -> None:
        """Wait until the writer process has renamed the directory."""
        self._write.result(self._timeout_s)


def _choose_sharing(leaves: int) -> None:
    """Name shared memory by files where descriptors, two for each tensor, would run out."""
    sharing: Any = import_module("torch.multiprocessing")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 2 * leaves + _OTHER_DESCRIPTORS > limit:
        sharing.set_sharing_strategy("file_system")


def _items(state: State) -> dict[str, State]:
    """The state dealt out to items of nearly equal size, which are written in parallel."""
    items: dict[str, State] = {f"part{index}": {} for index in range(min(_ITEMS, len(state)))}
    sizes = dict.fromkeys(items, 0)
    for name, tensor in state.items():
        part = min(sizes, key=lambda item: sizes[item])
        items[part][name] = tensor
        sizes[part] += tensor.nbytes
    return items
