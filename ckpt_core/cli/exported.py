"""What an export has made, whatever its format; and whether there is room for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ckpt_core.errors import ConfigError
from ckpt_core.system.files import Files
from ckpt_core.units import size_text


@dataclass
class Exported:
    """What was written, and what was not as it was.

    Attributes:
        tensors: how many entries the file has.
        nbytes: size of the file.
        left_out: paths that the format cannot hold, with what they are.
        changed: paths that are there in another form, and which.
        show: told bytes done and bytes in all.
    """

    tensors: int = 0
    nbytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    show: Callable[[int, int], None] = lambda done, total: None
    _taken: int = 0

    def told(self, blocks: Iterable[memoryview], *, of_bytes: int) -> Iterator[memoryview]:
        """The same blocks, while `show` is told what has been taken of `of_bytes`."""
        for block in blocks:
            yield block
            self._taken += len(block)
            self.show(self._taken, of_bytes)


def check_room(file: IO[bytes], nbytes: int) -> None:
    """Refuse before anything is written when the disk is too small.

    Raises:
        ConfigError: it is; nothing was written.
    """
    free = Files().free_bytes(Path(file.name).parent)
    if nbytes > free:
        raise ConfigError(
            f"the exported file takes {size_text(nbytes)} and {Path(file.name).parent} has "
            f"{size_text(free)} free: nothing was written"
        )
