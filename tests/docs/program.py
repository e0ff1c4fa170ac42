"""Runs pages, each in a directory of its own: `python -m tests.docs.program DIRECTORY PAGE...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.docs.prepared import run_page

if __name__ == "__main__":
    for page in sys.argv[2:]:
        folder = Path(sys.argv[1], Path(page).stem)
        folder.mkdir()
        os.chdir(folder)
        run_page(page)
