"""What the nodes of a group tell one another: a small file of each, beside the parity that it keeps.

The first node of a group decides which step is next, and says which have been reached: those whose parity all
nodes keep. The others follow, and say what they cannot do.

Invariant: nobody lets parity go, or a step that it rests on, before the first node has said that a newer
one is reached; and that it says only when all nodes keep it. So there is always a step that all still have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from ckpt_core.levels.far.door import Copy
from ckpt_core.system.files import Files

FILE = "agreed.json"


@dataclass(frozen=True)
class Said:
    """What a node of a group says.

    Attributes:
        group: a mark of the group that it is said in; what is said in another one does not count.
        reached: by the first node: steps whose parity all keep, with their attempts.
        next: by the first node: the attempt of which parity is to be made now; "": none.
        failed: attempts of which this node cannot make its own.
    """

    group: str = ""
    reached: tuple[tuple[int, str], ...] = ()
    next: str = ""
    failed: tuple[str, ...] = ()

    @property
    def steps(self) -> Mapping[int, str]:
        """Those that are reached."""
        return dict(self.reached)

    @property
    def save(self) -> Copy | None:
        """Of which parity is to be made now."""
        return Copy.of(self.next) if self.next else None

    def encode(self) -> bytes:
        """What `decode` takes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes | None, *, group: str) -> Self:
        """What was said in this group; nothing, where it is not there or cannot be understood."""
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            obj = json.loads(data or b"{}")
            if obj["group"] == group:
                reached = tuple((int(step), str(attempt)) for step, attempt in obj["reached"])
                failed = tuple(map(str, obj["failed"]))
                said = cls(group, reached, str(obj["next"]), failed)
                return said if said.save is None or said.save.step >= 0 else cls(group)
        return cls(group)


def say(folder: Path, said: Said, *, files: Files) -> None:
    """Say it from now on, durably. Lets `OSError` through."""
    # Of one name, so that there is never more than one that a kill has left: nobody else writes here.
    fresh = folder / f".{FILE}.part"
    with suppress(FileNotFoundError):
        files.unlink(fresh)
    try:
        files.write_new(fresh, said.encode())
        files.rename(fresh, folder / FILE)
    except BaseException:
        with suppress(OSError):
            files.unlink(fresh)
        raise
    files.sync_dir(folder)
