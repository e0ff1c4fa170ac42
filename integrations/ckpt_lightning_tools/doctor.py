"""Lightning, for `ckpt-core doctor`."""

from __future__ import annotations

from ckpt_core.cli.doctor import Finding, Framework, is_there, warning

_INSTALL = "pip install 'ckpt-core[lightning]'"


def _absent(asked: bool) -> Finding | None:
    if not is_there("pytorch_lightning"):
        return None
    text = "only pytorch_lightning is installed, whose Trainer takes no callback of ours"
    return warning("lightning", text, f"{_INSTALL}, and import lightning.pytorch")


FRAMEWORK = Framework(
    name="lightning",
    needs="ckpt_lightning",
    install=_INSTALL,
    place=1,
    program="import ckpt_lightning",
    absent=_absent,
)
