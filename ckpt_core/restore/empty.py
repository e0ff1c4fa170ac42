"""What is said when there is nothing to restore: a root that was misspelt looks like a new run."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from ckpt_core.store import is_misspelt, roots_in

_log = logging.getLogger("ckpt_core")

_MOST_NAMED = 3


def tell_empty(root: Path) -> None:
    """Say in the log that a root has no step, and which roots near by have some.

    A warning where one of them has a name that looks like a slip of this one, or where they lie inside the
    root; else INFO, since this is how every run begins. Called by the first rank.
    """
    # Others beside it are not looked into: there may be hundreds, each with a directory to read.
    near = roots_in(root) or roots_in(root.parent, named=partial(is_misspelt, root.name))
    if not near:
        _log.info("%s holds no step yet: nothing is restored", root)
        return
    named = [f"{path} (up to step {step})" for path, step in list(near.items())[:_MOST_NAMED]]
    _log.warning(
        "%s holds no step: nothing is restored. There are steps in %s: give that root if they are meant",
        root,
        ", ".join(named),
    )
