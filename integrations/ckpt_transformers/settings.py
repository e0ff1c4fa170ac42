"""What TrainingArguments ask of checkpoints: settings of the engine, or refused with what to do instead."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy

from ckpt_core import ConfigError, OnError, Options
from ckpt_transformers.texts import tell


def engine_options(options: Options | None, on_error: OnError | str, levels: Any) -> Options:
    """The settings of an AsyncCheckpoint; where the user gave none, `keep_last` says so.

    Raises:
        ConfigError: they are none.
    """
    settings: object = Options(keep_last=None) if options is None else options
    if not isinstance(settings, Options):
        raise ConfigError(f"options={options!r} is no Options: pass ckpt_core.Options(...)")
    more = {} if levels is None else {"levels": levels}
    return replace(settings, on_error=on_error, **more).or_places_from_env()


def of_run(options: Options, args: TrainingArguments) -> Options:
    """The same for one call of train(): `save_total_limit` says how many steps stay, where it is set."""
    limit = args.save_total_limit
    return options if limit is None or limit <= 0 else replace(options, keep_last=limit)


def checked_root(root: object) -> str:
    """The root as an absolute path.

    Raises:
        ConfigError: it is none, or a URL.
    """
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise ConfigError(f"root={root!r} is no path: give the directory for the steps")
    return str(Options.checked_root(root))


def check_thread(on_sigterm: str | None) -> None:
    """Raises ConfigError where SIGTERM is to be heard of, and this thread cannot ask for it."""
    if on_sigterm is not None and threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "train() is not called on the main thread, which alone can ask for SIGTERM: give "
            "AsyncCheckpoint(on_sigterm=None), or call it there"
        )


def check(trainer: Trainer) -> None:
    """Refuse what cannot be kept. Called on every rank, before anything is opened.

    Raises:
        ConfigError: names the argument, and what to do.
    """
    args = trainer.args
    if args.save_only_model:
        raise ConfigError(
            "save_only_model=True, and a step holds the whole state, so that training can go on from it: "
            "leave it out, and take weights by ckpt_transformers.export(root, directory)"
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True changes the batches in the middle of a run: set "
            "per_device_train_batch_size to what it has found, and leave it out"
        )
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint=True takes SIGTERM for itself: leave it out, AsyncCheckpoint saves then"
        )
    if args.push_to_hub and args.hub_strategy != HubStrategy.END:
        raise ConfigError(
            f"hub_strategy={HubStrategy(args.hub_strategy).value!r} uploads directories that are not written "
            f"here: use hub_strategy='end'"
        )
    _check_strategy(trainer)
    _check_data(trainer)


def _check_strategy(trainer: Trainer) -> None:
    if trainer.is_deepspeed_enabled:
        raise ConfigError(
            "deepspeed= keeps its states where only DeepSpeed can save them: set the key checkpoint_engine "
            "of its configuration (docs/deepspeed.md), and leave AsyncCheckpoint out"
        )
    if trainer.args.fsdp and not trainer.is_fsdp_enabled:
        tell(
            "fsdp= is ignored by Accelerate on this device, and the ranks train with DDP; that is saved",
            rank=trainer.args.process_index,
        )
    elif trainer.is_fsdp_enabled:
        plugin = trainer.accelerator.state.fsdp_plugin
        if getattr(plugin, "fsdp_version", 1) != 2:
            raise ConfigError(
                "fsdp= of version 1 keeps its states where only it can save them: use version 2, "
                "fsdp_config={'version': 2, ...}"
            )


def _check_data(trainer: Trainer) -> None:
    args, accelerator = trainer.args, trainer.accelerator
    if args.world_size < 2 or args.ignore_data_skip or accelerator.split_batches:
        return
    # Of an IterableDataset Accelerate skips those of all ranks.
    if accelerator.dispatch_batches and not isinstance(trainer.train_dataset, IterableDataset):
        tell(
            "dispatch_batches=True: a run that goes on in the middle of an epoch is given batches again: "
            "Accelerate skips those of one rank. Leave it out, or set split_batches=True as well",
            rank=args.process_index,
        )
