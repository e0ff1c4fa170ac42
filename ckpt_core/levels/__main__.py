"""`python -m ckpt_core.levels`: what a Checkpointer starts beside itself. Imports no torch."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """`errand NAME`, or `agent ROOT`."""
    if arguments[0] == "errand":
        from ckpt_core.levels.errands import serve_errand

        return serve_errand(arguments[1])
    assert arguments[0] == "agent", arguments
    from ckpt_core.levels.agent import run_agent

    return run_agent(arguments[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
