"""ckpt_core where files of what has not changed are links to those of an earlier step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from ckpt_core.bench.contenders.ours import CkptCore

if TYPE_CHECKING:
    from ckpt_core.options import Options


class Shared(CkptCore):
    """What stays the same is found by itself."""

    name: ClassVar[str] = "ckpt_core_shared"
    title: ClassVar[str] = "ckpt-core, share_unchanged"
    frozen: ClassVar[tuple[str, ...]] = ()

    def _options(self) -> Options:
        return dataclasses.replace(super()._options(), share_unchanged=True, frozen=self.frozen)

    @property
    def settings(self) -> str:
        """What is not the default."""
        declared = f", frozen={list(self.frozen)}" if self.frozen else ""
        return f"{super().settings}, share_unchanged=True{declared}"


class Frozen(Shared):
    """It is declared."""

    name: ClassVar[str] = "ckpt_core_frozen"
    title: ClassVar[str] = "ckpt-core, frozen"
    frozen: ClassVar[tuple[str, ...]] = ("base",)
