"""Lightning's door to storage, for our format: what `ckpt_path=` and `trainer.save_checkpoint` go through.

a directory    ours: a step, or a root (then its newest step)
a file         Lightning's own, `.ckpt`: left to the CheckpointIO that was there before
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO

from ckpt_core import Checkpointer, ConfigError, Options
from ckpt_lightning.capture import plain_hparams
from ckpt_lightning.ranks import Ranks
from ckpt_lightning.resume import load, load_from_levels

if TYPE_CHECKING:
    from ckpt_lightning.by_hand import ByHand
    from ckpt_lightning.recorder import Recorder

_FILES = frozenset({".ckpt", ".pt", ".pth", ".bin"})


class StepIO(CheckpointIO):
    """Reads and writes directories of ours, and leaves files to `base`.

    `AsyncCheckpoint` installs one. Without the callback, for `trainer.test(ckpt_path="ckpts")` of a fresh
    process: `Trainer(plugins=[StepIO()])`.

    Args:
        base: for everything that is not ours; None for Lightning's default.
        options: of the engine, for `trainer.save_checkpoint`.
        trusted: allow objects that could run code when they are loaded.
    """

    def __init__(
        self,
        base: CheckpointIO | None = None,
        *,
        options: Options | None = None,
        trusted: bool = False,
    ) -> None:
        if base is None:
            from lightning.fabric.plugins import TorchCheckpointIO

            base = TorchCheckpointIO()
        self.base = base
        self.options = options or Options()
        self.trusted = trusted
        self.ranks: Ranks | None = None
        self._recorders: list[Recorder] = []
        self._by_hand: ByHand | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and for other processes, which have no part in a fit that runs here."""
        return {**self.__dict__, "_recorders": [], "_by_hand": None}

    def opens(self, recorder: Recorder) -> None:
        """A fit of this trainer begins, and its root is open."""
        self._recorders.append(recorder)
        self._by_hand = recorder.by_hand

    def closes(self, recorder: Recorder) -> None:
        """It is over. What is saved after it is still completed."""
        self._recorders = [one for one in self._recorders if one is not recorder]

    def recorder_of(self, root: Path) -> Recorder | None:
        """The one that has this root open."""
        found = (one for one in self._recorders if one.session.checkpointer.root == root)
        return next(found, None)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; it is durable when this returns.

        `path` is a root, which gets one more step; with a suffix `.ckpt`, a file in Lightning's own format.

        Raises:
            ConfigError: storage_options for a format that has none, or weights alone.
            CkptError: the save failed; what was there before is untouched.
        """
        if names_a_file(path):
            self.base.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if storage_options is not None:
            raise ConfigError(
                f"storage_options={storage_options!r}: a directory of steps has none; set them with "
                f"AsyncCheckpoint(options=Options(...)), or give the path a suffix .ckpt"
            )
        if "optimizer_states" not in checkpoint:
            raise ConfigError(
                "weights_only=True: a step holds the whole state, since runs go on from the newest: leave it "
                "out, or give the path a suffix .ckpt"
            )
        plain_hparams(checkpoint)
        root = Path(os.path.abspath(path))
        if (recorder := self.recorder_of(root)) is not None:
            recorder.save_now(checkpoint)
            return
        if self._by_hand is not None:
            checkpoint, _ = self._by_hand.completed(checkpoint)
        ranks = self.ranks
        opened = ranks.open(root, self.options) if ranks else Checkpointer(root, self.options)
        with opened as checkpointer:
            own = ranks.private(checkpoint) if ranks else None
            step = checkpoint["global_step"]
            checkpointer.save(step, checkpoint, per_rank=own).committed.result()

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint at `path`, with CPU tensors if it is ours.

        Raises:
            NotCommitted: a directory without a committed step.
            CkptError: as `ckpt_lightning.load`.
        """
        if _is_ours(path):
            trusted = self.trusted if weights_only is None else not weights_only
            found = self._from_levels(Path(os.path.abspath(path)), trusted)
            if found is not None:
                return found
            return load(path, trusted=trusted, rank=self.ranks.viewpoint if self.ranks else None)
        options = {} if weights_only is None else {"weights_only": weights_only}
        if map_location is not None:
            options["map_location"] = map_location
        loaded: dict[str, Any] = self.base.load_checkpoint(path, **options)
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file of Lightning's own format; steps are retired by the engine."""
        self.base.remove_checkpoint(path)

    def teardown(self) -> None:
        """Called by Lightning when it is done."""
        self.base.teardown()

    def _from_levels(self, path: Path, trusted: bool) -> dict[str, Any] | None:
        """A step that a root which is open has not got itself: its further levels may have it."""
        for recorder in [] if path.exists() else self._recorders:
            checkpointer = recorder.session.checkpointer
            if checkpointer.options.levels:
                found = load_from_levels(checkpointer, path, trusted=trusted)
                if found is not None:
                    return found
        return None


def _is_ours(path: str | Path) -> bool:
    """A directory; or the name of one that is not there, of which the engine says so best."""
    found = Path(path)
    if "://" in str(path) or found.is_file():
        return False
    return found.is_dir() or not names_a_file(path)


def names_a_file(path: str | Path) -> bool:
    """Whether a checkpoint of this path is a file of Lightning's own."""
    return "://" in str(path) or Path(path).suffix in _FILES
