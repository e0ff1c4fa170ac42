"""Sends one step to a level: `python -m tests.levels.servers.sender ROOT STEP URL [REPLACES]`."""

from __future__ import annotations

import sys
from pathlib import Path

from ckpt_core.levels import open_far
from tests.levels.sending import sent_to


def main(root: str, step: str, url: str, replaces: str | None = None) -> None:
    """Say whether it is there now; end with an error where it was not told."""
    with open_far(url) as far:
        print(sent_to(far, Path(root), int(step), replaces=replaces), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
