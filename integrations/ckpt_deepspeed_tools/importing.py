"""DeepSpeed's tags, for `ckpt-core import`: the same files, committed as one and with checksums."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_core import ConfigError
from ckpt_core.cli.importing import Asked, NamedFiles, Source, load_torch, step_of

_LATEST = "latest"
_STATES = "*_states.pt"
_COUNT = "global_steps"
_OF_RANK = re.compile(
    r"(?P<mixed>bf16_)?zero_pp_rank_\d+_mp_rank_\d+_(?P<of>model|optim)_states\.pt"
)
_LAYER = re.compile(r"layer_(\d+)-(?:.*-)?model_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_\d+_model_states\.pt")
_OF_EXPERTS = re.compile(r"expp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_NAMED = ("param_shapes", "frozen_param_shapes", "buffer_names")
"""Under which keys a model's file names what it is of; under ZeRO alone the first is there."""
_SHOWN = 4


def _recognises(path: Path) -> bool:
    return path.is_dir() and _tag_of(path) is not None


def _tag_of(path: Path) -> Path | None:
    """The tag that is meant: the directory itself, or what its `latest` names."""
    if any(path.glob(_STATES)):
        return path
    if not (path / _LATEST).is_file():
        return None
    named = path / (path / _LATEST).read_text(errors="replace").strip()
    return named if named.is_dir() and any(named.glob(_STATES)) else None


def _read(asked: Asked) -> NamedFiles:
    tag = _tag_of(asked.path)
    if tag is None:
        raise ConfigError(f"{asked.path} is no tag, and names none in a file latest: give a tag")
    names = _names(tag)
    model = next((found for name in names if (found := _model_in(tag / name, asked))), {})
    wanted = {*_of_all_ranks(tag, names, model, asked), *_of_experts(names, model)}
    missing = sorted(wanted.difference(names))
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if missing[_SHOWN:] else "")
        raise ConfigError(
            f"{tag} lacks {shown}, which ranks of its job save: it was not saved whole; import another tag, "
            f"or bring the files here",
            path=tag,
        )
    if not asked.force:
        _check_layers(tag, names, asked)

    def read(name: str) -> Any:
        return load_torch(tag / name, trusted=asked.trusted)

    step = step_of(asked, model.get(_COUNT))
    name = Path(os.path.abspath(tag)).name  # "." has none
    return NamedFiles(step, name, _LATEST, tag, tuple(names), read)


def _names(tag: Path) -> list[str]:
    """Files of the tag, those of models first: they say which step it is."""
    if (tag / "manifest.json").exists():
        raise ConfigError(f"{tag} was saved by this engine: `ckpt-core push` and `pull` copy it")
    found = [path.name for path in tag.iterdir() if path.suffix != ".py"]
    others = [name for name in found if not name.endswith(".pt") or not (tag / name).is_file()]
    if others:
        raise ConfigError(
            f"{tag} holds {others[0]}, which is no file of torch.save: DeepSpeed itself goes on from this "
            f"tag (load_checkpoint), and what follows is saved by this engine",
            path=tag,
        )
    return sorted(found, key=lambda name: (not name.endswith("model_states.pt"), name))


def _model_in(path: Path, asked: Asked) -> dict[str, Any] | None:
    """What a file of a model says of its tag; None of another file."""
    if not path.name.endswith("model_states.pt"):
        return None
    held = load_torch(path, trusted=asked.trusted)
    return held if isinstance(held, dict) and _COUNT in held else None


def _of_all_ranks(
    tag: Path, names: list[str], model: dict[str, Any], asked: Asked
) -> Iterator[str]:
    """The files of models and optimizers that a tag must have, by what a model's file says of the ranks."""
    found = [match for name in names if (match := _OF_RANK.fullmatch(name))]
    optimizers = [match for match in found if match["of"] == "optim"]
    is_split = len(optimizers) < len(found)
    is_zero = bool(found) or model.get("param_shapes") is not None
    ranks, slices = (model.get(f"{kind}_world_size") or 0 for kind in ("dp", "mp"))
    if optimizers and len(optimizers) < ranks * slices:
        # Not all ranks save under MiCS: there it says how many do.
        held = load_torch(tag / optimizers[0][0], trusted=asked.trusted)
        count = held.get("optimizer_state_dict", {}).get("partition_count", ranks)
        ranks = max(count) if isinstance(count, list) else count
    mixed = optimizers[0]["mixed"] or "" if optimizers else ""
    for part in range(slices):
        if not is_split:
            yield f"mp_rank_{part:02d}_model_states.pt"
        for rank in range(ranks) if is_zero else ():
            name = f"zero_pp_rank_{rank}_mp_rank_{part:02d}"
            yield f"{mixed}{name}_optim_states.pt"
            if is_split:
                yield f"{name}_model_states.pt"


def _of_experts(names: list[str], model: dict[str, Any]) -> Iterator[str]:
    """The files of experts that a tag must have, by what the model's file says of their number."""
    counts = model.get("num_experts")
    # AutoEP may have them in the files of ZeRO; an old release has names without a layer.
    others = model.get("ds_autoep_layers") or any(name.startswith("expert_") for name in names)
    if others or not isinstance(counts, list):
        return
    found = {match.groups() for name in names if (match := _EXPERT.fullmatch(name))}
    for layer, count in enumerate(counts):
        for expert in range(count):
            if (str(layer), str(expert)) not in found:
                yield f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
    if counts and model.get("param_shapes") is None:
        ranks = {int(match[1]) for name in names if (match := _OF_EXPERTS.fullmatch(name))}
        for rank in set(range(max(ranks, default=0) + 1)) - ranks:
            yield f"expp_rank_{rank}_mp_rank_00_optim_states.pt"


def _check_layers(tag: Path, names: list[str], asked: Asked) -> None:
    """Be sure that a pipeline has all its layers, which are numbered over its stages.

    Raises:
        ConfigError: one in between is not there. It may be a plain function, which has no file: only the
            user knows, unless ZeRO names all that is trained.
    """
    numbers = {int(match[1]) for name in names if (match := _LAYER.fullmatch(name))}
    gaps = set(range(max(numbers, default=0))) - numbers
    if gaps:
        gaps -= _without_parameters(tag, names, gaps, asked)
    if gaps:
        shown = [f"layer_{number:02d}-model_states.pt" for number in sorted(gaps)]
        raise ConfigError(
            f"{tag} lacks {', '.join(shown[:_SHOWN])}{', ...' if shown[_SHOWN:] else ''}: if each of these "
            f"layers is a plain function, or one that is tied and has a forward_fn, it never was there: "
            f"--force imports the tag; else it was not saved whole",
            path=tag,
        )


def _without_parameters(tag: Path, names: list[str], gaps: set[int], asked: Asked) -> set[int]:
    """Those layers that hold nothing, by the names in the files of models."""
    held = [found for name in names if (found := _model_in(tag / name, asked))]
    if not held or any(model.get("param_shapes") is None for model in held):
        return set()
    groups = [group for model in held for key in _NAMED for group in _groups(model.get(key))]
    heads = {name.partition(".")[0] for group in groups for name in group}
    # What is tied is named by its key, and does not say which layers have it.
    return set() if "tied_modules" in heads else {one for one in gaps if str(one) not in heads}


def _groups(named: Any) -> list[Any]:
    """Names are under the groups of an optimizer, or alone."""
    if isinstance(named, list) and named and not isinstance(named[0], str):
        return named
    return [named or ()]


SOURCE = Source(
    name="deepspeed",
    what="a tag of DeepSpeed",
    place=30,
    recognises=_recognises,
    read=_read,
    install="pip install 'ckpt-core[deepspeed]'",
)
