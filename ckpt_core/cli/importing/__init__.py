"""`import`: what another program saved becomes a step of a root, or a directory of files there.

    import_source -> choosing        which `Source` knows what is there: torch and DCP are here, each
                                     integration brings its own, found by entry points
                  -> torch_file, dcp what is read: a tree, its step; or files by name
                  -> importing       a Checkpointer saves it, as a run does; then every byte is verified
                  -> consent         asked before the commit: nobody wrote to the source, nobody gave it up

Call order: a source is recognised by what its files look like, with no library imported; it is read, and
only then the root is opened. Whatever fails before the commit leaves the root as it was.

Idea: what is imported has the layout that a run restores from, so that the run changes over in its middle.
What nobody trusts runs no code: `torch.load(weights_only=True)`, unless `--trusted` is given.
"""

from __future__ import annotations

from ckpt_core.cli.importing.importing import import_source
from ckpt_core.cli.importing.source import Asked, NamedFiles, Source, Tree, step_of
from ckpt_core.cli.importing.torch_file import holds_pickle, load_torch

__all__ = [
    "Asked",
    "NamedFiles",
    "Source",
    "Tree",
    "holds_pickle",
    "import_source",
    "load_torch",
    "step_of",
]
