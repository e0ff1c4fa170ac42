"""`export`: one file that other programs read, from a step or a part of it."""

from __future__ import annotations

import os
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from ckpt_core.cli.elsewhere import export_elsewhere, targets
from ckpt_core.cli.exported import Exported, replacing
from ckpt_core.cli.parts import Part, weights_of
from ckpt_core.cli.steps import opened, rank_of
from ckpt_core.cli.text import note, say, say_json, shorten
from ckpt_core.cli.tree import read_tree
from ckpt_core.errors import ConfigError
from ckpt_core.observe import progress_bar
from ckpt_core.restore import RankLeaves
from ckpt_core.units import count_text, size_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import ExportRequest

_SHOWN = 4


class Format(StrEnum):
    """What `--to` takes, beside the layouts of frameworks."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


_SUFFIXES = {
    ".safetensors": Format.SAFETENSORS,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), Format.TORCH),
}
_REASONS = {
    Format.SAFETENSORS: "safetensors holds tensors only",
    Format.TORCH: "torch.load refuses them with weights_only",
}


def export_step(request: ExportRequest) -> bool:
    """Write the file and say what is in it; always a success.

    Raises:
        ConfigError: the options contradict each other, the rank is not there, or the file is already.
        NotCommitted, CorruptCheckpoint, UnknownFormat, RestoreError: the step cannot be read.
        OSError: the file cannot be written. It is not there then, or is the one that was there.
    """
    if request.to in targets():
        return export_elsewhere(request)
    if request.trusted:
        raise ConfigError("--trusted: in this format no object is built; leave it out")
    part = Part(request.only, request.prefix, request.strip and not request.weights)
    if request.weights and request.prefix is not None:
        raise ConfigError("--weights takes a whole module: name it with --only, not with --prefix")
    kind = _format(request)
    with (
        progress_bar(shown=not request.no_progress, tell=note) as show,
        replacing(request.file, force=request.force) as file,
    ):
        made = Exported(show=partial(show, request.file.name))
        with opened(request.path, request.step) as reader:
            leaves = reader.of_rank(rank_of(reader.leaves.step, request.rank))
            if request.weights:
                part = weights_of(read_tree(leaves.manifest.skeleton), only=request.only)
            if kind is Format.TORCH:
                from ckpt_core.cli.export_torch import write_torch

                write_torch(file, part, leaves, made)
            else:
                from ckpt_core.cli.export_safetensors import write_safetensors

                write_safetensors(file, part, leaves, made)
        made.nbytes = file.seek(0, os.SEEK_END)
    if request.weights and not request.json:
        note(f"weights: {part.only or 'the step itself'}, with names from the root of the module")
    _tell(request, kind, leaves, made)
    return True


def _format(request: ExportRequest) -> Format:
    if request.to is None:
        kind = _SUFFIXES.get(request.file.suffix)
        if kind is None:
            raise ConfigError(
                f"{request.file}: its name tells no format: add --to safetensors|torch"
            )
        return kind
    try:
        return Format(request.to)
    except ValueError as exc:
        known = " or ".join([*Format, *targets()])
        raise ConfigError(f"--to {request.to}: that is no format; choose {known}") from exc


def _tell(request: ExportRequest, kind: Format, leaves: RankLeaves, made: Exported) -> None:
    step, rank = leaves.step, leaves.manifest.rank
    count = step.manifest.world_size
    if request.json:
        say_json(
            {
                "path": str(step.path),
                "step": step.manifest.step,
                "rank": rank,
                "file": str(request.file),
                "format": str(kind),
                "nbytes": made.nbytes,
                "tensors": made.tensors,
                "left_out": made.left_out,
                "changed": made.changed,
            }
        )
        return
    tensors = count_text(made.tensors, "tensor")
    say(f"{request.file}: {tensors} of step {step.manifest.step}, {size_text(made.nbytes)}, {kind}")
    if count > 1:
        note(f"what {count} ranks have each for itself is that of rank {rank}: --rank N chooses")
    if made.left_out:
        note(f"left out ({_REASONS[kind]}): {_listed(made.left_out)}")
    if made.changed:
        note(f"changed: {_listed(made.changed)}")


def _listed(paths: dict[str, str]) -> str:
    shown = [f"{shorten(path, 60)} ({what})" for path, what in list(paths.items())[:_SHOWN]]
    more = f" and {len(paths) - _SHOWN:,} more" if len(paths) > _SHOWN else ""
    return f"{', '.join(shown)}{more}"
