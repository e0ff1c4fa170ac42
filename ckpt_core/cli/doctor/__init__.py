"""`doctor`: would a job of this environment, root and configuration be checkpointed, and well?

    diagnosing -> scripts, deepspeed_config, selection    what files say    (settings_code)
               -> trials                                  processes that import what a job would import
               -> environment, machine                    (versions)
               -> root                                    (mounts, storage, contents)
               -> findings                                a table, or JSON

Call order: files are read first, since one that is missing ends the command; then the trials are started, the
root is tried meanwhile, and what the trials tell comes last. Every part gives `Finding`s and prints nothing.

Idea: what fails loudly by itself needs no doctor. It looks for what would go on silently: a key that
DeepSpeed ignores, a filesystem that forgets, more staging memory than there is. Where the engine has code
that meets the question, that code is asked: the store commits a trial step, DeepSpeed's section goes through
the settings of `ckpt_deepspeed`. Frameworks are imported in processes of their own: a broken one breaks no
check.
"""

from __future__ import annotations

from ckpt_core.cli.doctor.diagnosing import diagnose

__all__ = ["diagnose"]
