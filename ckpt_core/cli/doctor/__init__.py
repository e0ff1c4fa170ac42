"""`doctor`: would a job of this environment, root and configuration be checkpointed, and well?

    diagnosing -> framework              torch, and what the integrations bring: found by entry points
               -> trials                 processes that import what a job would import (importing)
               -> environment, machine   (versions)
               -> root, far_root, levels (mounts, storage, contents)
               -> findings               a table, or JSON

Call order: files of a job are read first, since one that is missing ends the command; then the trials are
started, the root is tried meanwhile, and what the trials tell comes last. Every part gives `Finding`s and
prints nothing.

Idea: what fails loudly by itself needs no doctor. It looks for what would go on silently: a key that
DeepSpeed ignores, a filesystem that forgets, more staging memory than there is. Where the engine has code
that meets the question, that code is asked: the store commits a trial step, a framework's configuration goes
to the `Framework` of its integration. Frameworks are imported in processes of their own: a broken one breaks
no check.
"""

from __future__ import annotations

from ckpt_core.cli.doctor.diagnosing import diagnose
from ckpt_core.cli.doctor.finding import Finding, Level, note, ok, problem, warning
from ckpt_core.cli.doctor.framework import Framework
from ckpt_core.cli.doctor.versions import is_there

__all__ = [
    "Finding",
    "Framework",
    "Level",
    "diagnose",
    "is_there",
    "note",
    "ok",
    "problem",
    "warning",
]
