"""DeepSpeedStrategy: DeepSpeed writes its own files, through `ckpt_deepspeed`, behind training.

A root holds DeepSpeed's tags, one for each step, and `latest`; its tools and plain DeepSpeed read them. What
Lightning has beside model and optimizer (loops, callbacks, generators, the place in the data) goes along as
`client_state`. One rank writes that; what the others have of their own is gathered for it.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ckpt_core import (
    Checkpointer,
    ConfigError,
    NotCommitted,
    Options,
    SaveHandle,
    committed_directories,
)
from ckpt_lightning.capture import EXTRAS
from ckpt_lightning.ranks import Ranks
from ckpt_lightning.session import Session

if TYPE_CHECKING:
    from ckpt_deepspeed.settings import EngineSettings

_STATES = ("state_dict", "optimizer_states")
_OWN = ("loops", "callbacks", EXTRAS)
"""Entries of a checkpoint that are each rank's own."""

_EVERYONES = "ckpt_lightning_ranks"
"""Key of those of all ranks, in a `client_state`."""

_SECTION = "checkpoint_engine"
_PREFIX = "global_step"
_LIGHTNINGS_TAG = "checkpoint"


def saves_by_deepspeed(trainer: Trainer) -> bool:
    """Whether DeepSpeed keeps the states of model and optimizer."""
    return isinstance(trainer.strategy, DeepSpeedStrategy)


def tag_path(root: Path, step: int) -> Path:
    """Where a step lies; the name is the one that DeepSpeed gives by itself."""
    return root / f"{_PREFIX}{step}"


def choose_engine(trainer: Trainer, options: Options, *, monitor: str | None) -> None:
    """Let DeepSpeed save by this engine. Called in setup(), before DeepSpeed reads its configuration.

    Raises:
        ConfigError: ckpt_deepspeed is missing, or the configuration names another engine; or a metric is to
            say which steps stay.
    """
    if monitor is not None:
        raise ConfigError(
            f"monitor={monitor!r} does not go with DeepSpeedStrategy, which keeps all tags: leave it out, "
            f"and give the metric to a ModelCheckpoint beside this callback"
        )
    try:
        from ckpt_deepspeed.settings import section_of
    except ImportError as exc:
        raise ConfigError(
            f"DeepSpeedStrategy saves through ckpt_deepspeed, which cannot be imported ({exc}): "
            f"pip install 'ckpt-core[deepspeed]'"
        ) from exc
    config = _config(trainer)
    if section_of(config) is None:
        usual = Options()
        given = {one.name: getattr(options, one.name) for one in dataclasses.fields(Options)}
        changed = {name: value for name, value in given.items() if value != getattr(usual, name)}
        config[_SECTION] = {"type": "ckpt_core", **changed}


def _config(trainer: Trainer) -> dict[str, Any]:
    config: dict[str, Any] = trainer.strategy.config  # type: ignore[attr-defined]
    return config


def _settings(trainer: Trainer) -> EngineSettings:
    from ckpt_deepspeed.settings import EngineSettings

    return EngineSettings.of(_config(trainer)[_SECTION])


class DeepSpeedSession(Session):
    """A `Session` whose saves are DeepSpeed's."""

    def _opened(self, root: Path, options: Options) -> Checkpointer:
        from ckpt_deepspeed.roots import ROOTS

        trainer = self.ranks.trainer
        per_node = _config(trainer).get("checkpoint", {}).get("use_node_local_storage", False)
        options = _settings(trainer).options
        # DeepSpeed saves to where a name leads at each save, which a link above the root may change.
        self._real = Path(os.path.realpath(root))
        return ROOTS.of(root, options, per_node=bool(per_node), stays=True)

    def steps(self) -> tuple[int, ...]:
        """As `Session.steps`; tags of other names are not ours."""
        names = committed_directories(self._real)
        numbers = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
        return tuple(sorted(int(number) for number in numbers if number.isdecimal()))

    def prepare(self, tree: Any) -> None:
        """Nothing: the files of a tag become known one by one."""

    def close(self) -> None:
        """As `Session.close`; another process may save there then."""
        from ckpt_deepspeed.roots import ROOTS

        try:
            super().close()
        finally:
            ROOTS.forget(self._real)

    def _start(self, step: int, tree: dict[str, Any]) -> SaveHandle:
        """Called on every rank: collectives of DeepSpeed's, and one of ours."""
        from ckpt_deepspeed.tags import AgreedTag

        strategy: Any = self.ranks.trainer.strategy
        engine = strategy.deepspeed_engine
        client = {key: value for key, value in tree.items() if key not in _STATES}
        own = {key: client.pop(key) for key in _OWN if key in client}
        client[_EVERYONES] = self._of_all(own)
        engine.save_checkpoint(
            str(self._real),
            # Ranks that train together are at one step.
            tag=AgreedTag(tag_path(self._real, step).name),
            client_state=client,
            exclude_frozen_parameters=strategy.exclude_frozen_parameters,
        )
        handle: SaveHandle = engine.checkpoint_engine.newest
        # DeepSpeed counts its own updates.
        return dataclasses.replace(handle, step=step)

    def _of_all(self, own: dict[str, Any]) -> list[Any]:
        if not self.ranks.several:
            return [own]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return found


@dataclasses.dataclass(frozen=True)
class DeepSpeedDoors:
    """Stand in the strategy's way where it loads and saves by a path. Made in setup()."""

    ranks: Ranks

    def install(self) -> None:
        """Called at each setup(); takes the place of those of an earlier one."""
        strategy: Any = self.ranks.trainer.strategy
        strategy.load_checkpoint, strategy.save_checkpoint = self.load, self.save

    def load(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """A directory that Lightning wrote is its own business; a root of ours means the newest whole tag.

        Called on every rank, when model and optimizer are there to be filled.

        Raises:
            NotCommitted: there is none.
        """
        path = Path(os.path.abspath(self.ranks.first(str(checkpoint_path))))
        if (path / _LIGHTNINGS_TAG).is_dir() or path.is_file():
            return self.ranks.own_method("load_checkpoint")(path, weights_only=weights_only)  # type: ignore[no-any-return]
        is_tag = (path.parent / "latest").is_file()
        found = self.newest(path.parent, path.name) if is_tag else self.newest(path)
        if found is None:
            raise NotCommitted(f"{path} holds no tag that is whole", path=path)
        return found

    def newest(self, root: Path, tag: str | None = None) -> dict[str, Any] | None:
        """Fill model and optimizer from this tag, or the newest whole one; what Lightning is to go on from.

        Called on every rank.

        Returns:
            None when there is no tag.
        """
        trainer = self.ranks.trainer
        strategy: Any = trainer.strategy
        _, client = strategy.deepspeed_engine.load_checkpoint(
            str(root),
            tag,
            load_optimizer_states=trainer.state.fn == TrainerFn.FITTING,
            load_lr_scheduler_states=False,
            load_module_strict=trainer.lightning_module.strict_loading,
        )
        if client is None:
            return None
        everyones = client.pop(_EVERYONES, [{}])
        return {**client, **everyones[trainer.global_rank % len(everyones)]}

    def resume(self, root: Path) -> int | None:
        """Let Lightning go on from the newest tag that is whole; the step, or None when there is no tag."""
        tree = self.newest(root)
        # Not a public name. Lightning would set it to the same, from a path that it is given.
        self.ranks.trainer._checkpoint_connector._loaded_checkpoint = tree or {}
        return None if tree is None else int(tree["global_step"])

    def save(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """For `trainer.save_checkpoint` and ModelCheckpoint, which deletes the one before: it is durable."""
        import ckpt_deepspeed

        self.ranks.own_method("save_checkpoint")(
            checkpoint, filepath, storage_options=storage_options
        )
        ckpt_deepspeed.wait(self.ranks.first(str(filepath)))
