"""Sending one step by hand."""

from __future__ import annotations

from pathlib import Path

from ckpt_core.levels.agent.copying import How, Sent, send
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.far.door import Far
from ckpt_core.store import step_path
from ckpt_core.system.files import Files


def sent_to(
    far: Far, root: Path, step: int, *, replaces: str | None = None, own: bool = False
) -> bool:
    """Send a step; whether it is there now."""
    with OpenSave(step_path(root, step), files=Files()) as opened:
        return send(opened, far, How(replaces=replaces, own=own)) is Sent.REACHED
