"""Lightning's `.ckpt` files, for `ckpt-core import` and `ckpt-core export`."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from ckpt_core import ConfigError
from ckpt_core.cli.elsewhere import Target
from ckpt_core.cli.importing import Asked, Source, Tree, holds_pickle, load_torch, step_of

_INSTALL = "pip install 'ckpt-core[lightning]'"
_MARK = b"pytorch-lightning_version"


def _recognises(path: Path) -> bool:
    return _is_sharded(path) or holds_pickle(path, _MARK)


def _is_sharded(path: Path) -> bool:
    return (path / ".metadata").is_file() and (path / "meta.pt").is_file()


def _read(asked: Asked) -> Tree:
    """The checkpoint as Lightning's own dict: what AsyncCheckpoint saves, but for what it adds."""
    path = asked.path
    if path.is_dir():
        raise ConfigError(
            f"{path} is a sharded checkpoint: make one file of it by `python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {path}`, and import that",
            path=path,
        )
    from ckpt_lightning.capture import plain_hparams

    checkpoint: Any = load_torch(path, trusted=asked.trusted)
    lacking = [
        name for name in ("state_dict", "loops", "optimizer_states") if name not in checkpoint
    ]
    if lacking:
        raise ConfigError(
            f"{path} lacks {', '.join(lacking)}, so no run goes on from it (save_weights_only=True?): "
            f"load_from_checkpoint takes weights from it as it is; or --format torch",
            path=path,
        )
    return Tree(step_of(asked, checkpoint.get("global_step")), plain_hparams(checkpoint))


def _write(step: str, file: IO[bytes], trusted: bool) -> None:
    """The step as a `.ckpt` that Lightning reads without us."""
    import torch

    from ckpt_lightning.capture import EXTRAS
    from ckpt_lightning.finding import STATE_KEY
    from ckpt_lightning.resume import load

    checkpoint = load(step, trusted=trusted)
    checkpoint.pop(EXTRAS, None)
    checkpoint.get("callbacks", {}).pop(STATE_KEY, None)
    torch.save(checkpoint, file)


SOURCE = Source(
    name="lightning",
    what="a checkpoint of Lightning",
    place=10,
    recognises=_recognises,
    read=_read,
    install=_INSTALL,
)
TARGET = Target(name="lightning", write_file=_write, install=_INSTALL)
