"""DeepSpeed's tags, for `ckpt-core import`: the same files, committed as one and with checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_core import ConfigError
from ckpt_core.cli.importing import Asked, NamedFiles, Source, load_torch, step_of

_LATEST = "latest"
_STATES = "*_states.pt"
_COUNT = "global_steps"


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
    count = next(
        (found for name in names if (found := _steps_in(tag / name, asked)) is not None), None
    )

    def read(name: str) -> Any:
        return load_torch(tag / name, trusted=asked.trusted)

    return NamedFiles(step_of(asked, count), tag.name, _LATEST, tuple(names), read)


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


def _steps_in(path: Path, asked: Asked) -> Any:
    if not path.name.endswith("model_states.pt"):
        return None
    held = load_torch(path, trusted=asked.trusted)
    return held.get(_COUNT) if isinstance(held, dict) else None


SOURCE = Source(
    name="deepspeed",
    what="a tag of DeepSpeed",
    place=30,
    recognises=_recognises,
    read=_read,
    install="pip install 'ckpt-core[deepspeed]'",
)
