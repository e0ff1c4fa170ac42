"""DeepSpeed's tags, for `ckpt-core import`: the same files, committed as one and with checksums."""

from __future__ import annotations

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
    missing = sorted(set(_of_all_ranks(tag, names, model, asked)).difference(names))
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if missing[_SHOWN:] else "")
        raise ConfigError(
            f"{tag} lacks {shown}, which ranks of its job save: it was not saved whole; import another tag, "
            f"or bring the files here",
            path=tag,
        )

    def read(name: str) -> Any:
        return load_torch(tag / name, trusted=asked.trusted)

    return NamedFiles(step_of(asked, model.get(_COUNT)), tag.name, _LATEST, tuple(names), read)


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


SOURCE = Source(
    name="deepspeed",
    what="a tag of DeepSpeed",
    place=30,
    recognises=_recognises,
    read=_read,
    install="pip install 'ckpt-core[deepspeed]'",
)
