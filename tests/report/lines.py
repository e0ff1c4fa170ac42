"""Event files by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def line(name: str, time_s: float, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": name, "time_s": time_s, "rank": rank} | more


def save(step: int, at: float, rank: int = 0, *, waited_s: float = 0.0) -> list[dict[str, Any]]:
    """A save of 1,000 bytes: staged after 0.1 s, written after 0.3 s, durable after 0.4 s."""
    return [
        line("begin", at, rank, step=step, waited_s=waited_s),
        line("staged", at + 0.1, rank, step=step, waited_s=waited_s + 0.02),
        line("persisted", at + 0.3, rank, step=step, nbytes=1000, waited_s=waited_s + 0.02),
        line("committed", at + 0.4, rank, step=step, nbytes=1000, waited_s=waited_s + 0.02),
    ]


def written(path: Path, *lines: dict[str, Any], rest: str = "") -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines) + rest)
    return path
