"""`python -m ckpt_core.levels`: what a Checkpointer starts beside itself. Imports no torch."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """`errands`, or `agent ROOT`."""
    if arguments[0] == "errands":
        from ckpt_core.levels.errands import serve_errands

        return serve_errands()
    assert arguments[0] == "agent", arguments
    from ckpt_core.levels.agent.agent import run_agent

    return run_agent(arguments[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
