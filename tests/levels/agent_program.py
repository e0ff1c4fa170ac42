"""An agent in a process of its own, quicker than usual; run as `python agent_program.py ROOT [JSON]`."""

from __future__ import annotations

import json
import sys
from typing import Any

from ckpt_core.levels.agent.agent import run_agent
from ckpt_core.levels.agent.board import Timing
from tests.store.harness import QuickFiles

QUICK: dict[str, Any] = {
    "poll_s": 0.02,
    "gone_s": 0.3,
    "look_s": 0.5,
    "others_s": 0.1,
    "beat_s": 0.2,
    "again_s": 0.05,
    "again_most_s": 0.3,
    "fenced_s": 0.3,
}


def main() -> int:
    """The exit status."""
    changes = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    return run_agent(sys.argv[1], files=QuickFiles(), timing=Timing(**{**QUICK, **changes}))


if __name__ == "__main__":
    sys.exit(main())
