"""The `ckpt-core` command: look at checkpoints, check, compare, export and remove them; measure.

    main() -> app.py        options of every command, and the one place where an error becomes text
           -> one module for each command, imported when that command runs

Call order of a command: options are parsed into a frozen request, the request goes to the command's
module, which gathers plain facts and gives them to `text.py` as a table or as JSON.

Idea: whoever looks at a checkpoint neither locks nor changes it, and needs no torch for that: the
manifests say everything. Only `diff` and `export --to torch` load tensors, one leaf at a time or once.
What a file says is shown, never trusted: names are cleaned before they reach a terminal.

Exit codes: 0 all is well, 1 a finding (bad chunks, differences, problems), 2 the command could not be
carried out.
"""

from __future__ import annotations

from ckpt_core.cli.app import main

__all__ = ["main"]
