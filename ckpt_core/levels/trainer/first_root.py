"""A root that is, or was, a level of some run, and is saved to: agents of that run hear of it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.layout import RUN_NAME
from ckpt_core.levels.claiming import claim_word, parsed
from ckpt_core.levels.far.door import Conflict
from ckpt_core.levels.far.words import Words
from ckpt_core.system.files import Files

_BUSY_S = 1.0
_TRIES = 3


def keep_agents_off(root: Path, *, files: Files) -> str:
    """Have agents that know a root as a level send, replace and retire nothing there any more.

    Called before each step is published, with the root locked, by the rank that leads it. The run of the
    level has it again with the next session that claims it. Returns within seconds, and never raises.

    Returns:
        Why they could not be told; "": they were, or nobody has it as a level.
    """
    words = Words(root, files=files, busy_s=_BUSY_S)
    try:
        for _ in range(_TRIES):
            word = words.read(RUN_NAME)
            there = parsed(word)
            if word is None or "run" not in there or there.get("first_root"):
                return ""
            run, session = there["run"], there.get("session", 0) + 1
            mine = claim_word(
                run, session, host=socket.gethostname(), pid=os.getpid(), first_root=True
            )
            try:
                words.write(RUN_NAME, mine, over=word.tag)
                return ""
            except Conflict:
                continue  # claimed in this very moment: that one has to hear it, too
    except OSError as exc:
        return exc.strerror or str(exc)
    except CkptError as exc:
        return str(exc)
    return "it is claimed again and again"
