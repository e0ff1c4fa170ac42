"""What an export has made, whatever its format; and whether there is room for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ckpt_core.cli.text import size_text
from ckpt_core.errors import ConfigError
from ckpt_core.system.files import Files


@dataclass
class Exported:
    """What was written, and what was not as it was.

    Attributes:
        tensors: how many entries the file has.
        nbytes: size of the file.
        left_out: paths that the format cannot hold, with what they are.
        changed: paths that are there in another form, and which.
    """

    tensors: int = 0
    nbytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)


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
