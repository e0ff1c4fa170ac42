"""A root that is, or was, a level of some run, and is saved to: agents of that run hear of it."""

from __future__ import annotations

import functools
import logging
import os
import socket
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.layout import RUN_NAME
from ckpt_core.levels.claiming import claim_word, parsed
from ckpt_core.levels.far.door import Conflict
from ckpt_core.levels.far.words import Words
from ckpt_core.system.files import Files

_log = logging.getLogger("ckpt_core")

_BUSY_S = 1.0
_TRIES = 3


def keep_agents_off(root: Path, *, files: Files) -> None:
    """Have agents that know a root as a level send, replace and retire nothing there any more.

    Called before each step is published, with the root locked, by the rank that leads it. The run of the
    level has it again with the next session that claims it. Returns within seconds, and never raises: where
    agents could not be told, a warning says why.
    """
    words = Words(root, files=files, busy_s=_BUSY_S)
    try:
        if not any(_is_told(words) for _ in range(_TRIES)):
            _warn(root, "it is claimed again and again")
    except OSError as exc:
        _warn(root, exc.strerror or str(exc))
    except CkptError as exc:
        _warn(root, str(exc))


def _is_told(words: Words) -> bool:
    """False: it was claimed in this very moment, and that one has to hear it, too."""
    word = words.read(RUN_NAME)
    there = parsed(word)
    if word is None or "run" not in there or there.get("first_root"):
        return True
    run, session = there["run"], there.get("session", 0) + 1
    mine = claim_word(run, session, host=socket.gethostname(), pid=os.getpid(), first_root=True)
    try:
        words.write(RUN_NAME, mine, over=word.tag)
    except Conflict:
        return False
    return True


@functools.cache  # said once, though each save finds it
def _warn(root: Path, problem: str) -> None:
    text = "%s is a level of some run, whose agent could not be told that it is a first root now (%s): "
    _log.warning(text + "end that agent, or it may retire steps here", root, problem)
