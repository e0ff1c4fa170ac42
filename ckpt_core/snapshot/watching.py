"""Finds leaves that change between their hand-over and their copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
import xxhash

from ckpt_core.errors import BarrierError
from ckpt_core.snapshot.items import StageItem
from ckpt_core.snapshot.sampling import Look, Sampler, look
from ckpt_core.state import is_freed, memory_of
from ckpt_core.system.devices import Devices
from ckpt_core.units import count_text


class LeafWatch:
    """Finds leaves that change between their hand-over and the end of their copy.

    By a sample of their bytes; with `debug_barrier` by all of them, at the cost of a pass over the leaves at
    either end. One for each shard file: offsets tell leaves apart.

    Args:
        step: for the error.
        sampler: chooses the sample; None: every byte counts.
    """

    def __init__(self, step: int, sampler: Sampler | None, *, devices: Devices) -> None:
        self._step = step
        self._sampler = sampler
        self._devices = devices
        self._handed: list[tuple[Iterable[str], Sequence[StageItem]]] = []
        self._before: dict[int, tuple[int, bytes]] = {}
        self._changed: set[int] = set()

    def begin(self, names: Iterable[str], items: Sequence[StageItem]) -> None:
        """Leaves as they are handed over. Called on the training thread before the stager has them."""
        self.keep(names, items, self.look(items))

    def look(self, items: Sequence[StageItem]) -> list[Look]:
        """What `begin` sees of leaves, for a later `keep`; changes nothing."""
        return self._every_byte(items) if self._sampler is None else self._sampler.take(items)

    def keep(self, names: Iterable[str], items: Sequence[StageItem], looks: Sequence[Look]) -> None:
        """Note what `look` has seen of leaves that are handed over; `names` are read for an error alone.

        May be called twice.
        """
        self._handed.append((names, items))
        self._before.update(looks)

    def end(self, items: Sequence[StageItem]) -> None:
        """Their copy has ended. Called by the stager before training may change them."""
        for tensor, offset, nbytes in items if self._before else ():
            # Once: what comes again later is a clone of it.
            place, before = self._before.pop(offset, (0, b"")) if nbytes else (0, b"")
            if before and before != self._now(tensor, place, len(before)):
                self._changed.add(offset)

    def raise_if_changed(self) -> None:
        """End the snapshot if a leaf changed too early.

        Raises:
            BarrierError: names the leaves.
        """
        if not self._changed:
            return
        changed = {
            name: None
            for names, items in self._handed
            for name, (_, offset, nbytes) in zip(names, items, strict=True)
            if nbytes and offset in self._changed
        }
        raise BarrierError(
            f"step {self._step} was not saved: {count_text(len(changed), 'leaf')} changed during "
            f"staging: {_some(changed)}. Steps of torch optimizers wait by themselves; call wait_staged() "
            f"before whatever else changes these. A buffer is copied inside save() if its module is passed, "
            f"and not the module's state_dict()",
            step=self._step,
        )

    def raise_if_lost(self) -> None:
        """End the snapshot if a leaf that was handed over has no memory any more.

        Raises:
            BarrierError: names the leaves.
        """
        lost = {
            name: None
            for names, items in self._handed
            for name, (tensor, _, _) in zip(names, items, strict=True)
            if is_freed(tensor)
        }
        if lost:
            raise BarrierError(
                f"step {self._step} was not saved: {count_text(len(lost), 'leaf')} had memory that was taken "
                f"away during staging: {_some(lost)}. Call wait_staged() before what takes it away, such "
                f"as the end of FSDP.summon_full_params()",
                step=self._step,
            )

    def _every_byte(self, items: Sequence[StageItem]) -> list[Look]:
        return [(at, (0, self._now(tensor, 0, 0))) for tensor, at, nbytes in items if nbytes]

    def _now(self, tensor: torch.Tensor, place: int, size: int) -> bytes:
        if self._sampler is not None:
            return look(tensor, place, size)
        if is_freed(tensor):
            return b""
        return fingerprint(self._devices.to_host(tensor))


def _some(names: Iterable[str]) -> str:
    first = list(islice(names, 11))
    return ", ".join(first[:10]) + (" ..." if len(first) > 10 else "")


def fingerprint(tensor: torch.Tensor) -> bytes:
    """xxh3 of the row-major bytes of a tensor on the host, which has some."""
    flat = tensor.contiguous()  # of one with other strides a copy: alive until it has been read
    return xxhash.xxh3_64(memory_of(flat)).digest()
