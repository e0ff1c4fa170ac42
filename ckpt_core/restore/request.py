"""What one restore is asked for: from the face of the engine to what searches for the step."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from ckpt_core.state import Selection
from ckpt_core.types import check_step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Which step, how much of it, and what is allowed on the way; the same on every rank.

    Attributes:
        step: this one and no other; None: the newest.
        strict: a corrupt step ends it, instead of being passed over.
        trusted: objects that could run code may be loaded.
        broadcast: ranks that read leaves which all of them take whole only once, each its share, and
            send them to one another; True for all ranks.
        part: what of the step is wanted; None: all of it.
    """

    step: int | None = None
    _: KW_ONLY
    strict: bool = False
    trusted: bool = False
    broadcast: ProcessGroup | bool = False
    part: Selection | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError: `step` is no number of one."""
        if self.step is not None:
            object.__setattr__(self, "step", check_step(self.step))
