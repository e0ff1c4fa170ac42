"""A file of `torch.save`: read with nothing run that it asks for, unless it is trusted."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckpt_core.cli.importing.source import Asked, Source, Tree, step_of
from ckpt_core.errors import ConfigError, CorruptCheckpoint, RestoreError, UntrustedData

_LEGACY = b"\x80\x02\x8a\x0a"
"""How files of torch before 1.6 begin: a pickle of its magic number."""
_PICKLE = "/data.pkl"
_BLOCK_BYTES = 1 << 20
_STEP_KEYS = ("step", "global_step", "iteration")
_SHOWN = 5


def holds_pickle(path: Path, text: bytes = b"") -> bool:
    """Whether it is a file of `torch.save`, in whose structure this text occurs. Nothing is unpickled.

    Raises:
        CorruptCheckpoint: it is an archive, and damaged.
    """
    if not path.is_file():
        return False
    if _is_archive(path):
        with _archive(path) as archive:
            found = [name for name in archive.namelist() if name.endswith(_PICKLE)]
            return any(text in archive.read(name) for name in found)
    with open(path, "rb") as file:
        head = file.read(_BLOCK_BYTES)
    return head.startswith(_LEGACY) and text in head


def load_torch(path: Path, *, trusted: bool) -> Any:
    """What the file holds, on the CPU; its tensors are read from it when they are needed.

    Raises:
        CorruptCheckpoint: the file is damaged: its bytes have not the checksums that it says, or torch
            cannot read it.
        UntrustedData: it holds objects that might run code; names them.
        ConfigError: what one of its objects is made of is not installed.
        RestoreError: an object cannot be built.
    """
    import torch

    _check_bytes(path)
    mapped = _is_archive(path)
    try:
        with arrays_allowed():
            return torch.load(path, map_location="cpu", weights_only=not trusted, mmap=mapped)
    except pickle.UnpicklingError as exc:
        names = _refused(path, exc)
        if not names:
            raise damaged(path, exc) from exc
        raise untrusted(path, names) from exc
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"{path} holds objects that cannot be built here: {exc}. Install what they are of, or run the "
            f"command where it can be imported (PYTHONPATH)",
            path=path,
        ) from exc
    except (RuntimeError, ValueError, EOFError, OSError) as exc:
        raise damaged(path, exc) from exc
    except Exception as exc:  # an object's own code may raise anything
        text = f"{path} holds an object that cannot be built: {type(exc).__name__}: {exc}"
        raise RestoreError(text, path=path) from exc


def untrusted(path: Path, names: Sequence[str]) -> UntrustedData:
    """What to say of objects of these classes."""
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return UntrustedData(
        f"{path} holds objects of {shown}: to build them may run code. If you trust whoever wrote it, add "
        f"--trusted",
        type_name=names[0],
        path=path,
    )


def refused_by(exc: Exception) -> list[str]:
    """The class that a load with `weights_only` names as what it refuses; none where it names none."""
    return re.findall(r"GLOBAL ([\w.]+)", str(exc))


def damaged(path: Path, exc: BaseException) -> CorruptCheckpoint:
    """What to say of a source that cannot be read."""
    text = " ".join(str(exc).split())[:200] or type(exc).__name__
    return CorruptCheckpoint(f"{path} cannot be read, and nothing was imported: {text}", path=path)


def _check_bytes(path: Path) -> None:
    """Compare what is in the archive with its checksums, which torch writes and does not look at."""
    if not _is_archive(path):
        return
    with _archive(path) as archive:
        # Where they are turned off, and in files of ours, there is none, which is said by 0.
        for entry in (entry for entry in archive.infolist() if entry.CRC):
            with archive.open(entry) as record:
                while record.read(_BLOCK_BYTES):
                    pass


def _is_archive(path: Path) -> bool:
    with suppress(zipfile.BadZipFile):
        return zipfile.is_zipfile(path)
    return True  # one that zipfile can make nothing of


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """To read it; whatever zipfile then raises, it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except Exception as exc:
        raise damaged(path, exc) from exc


@contextmanager
def arrays_allowed() -> Iterator[None]:
    """Meanwhile a load with `weights_only` takes numpy's arrays and numbers: no code of anybody else."""
    import torch

    allowed: list[Any] = []
    with suppress(ImportError):
        import numpy as np

        core: Any = np._core if hasattr(np, "_core") else np.core
        kinds = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDSUM"}
        allowed = [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype]
        allowed += kinds
    with torch.serialization.safe_globals(allowed):
        yield


def _refused(path: Path, exc: Exception) -> list[str]:
    """Names of all that a load refuses; none for bytes that are no pickle."""
    import torch

    try:
        with arrays_allowed():
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # no archive, or damaged within: what the load says is all there is
        return refused_by(exc)


def _recognises(path: Path) -> bool:
    return holds_pickle(path)


def _read(asked: Asked) -> Tree:
    if asked.path.is_dir():
        raise ConfigError(
            f"{asked.path} is no file of torch.save: it is a directory", path=asked.path
        )
    value = load_torch(asked.path, trusted=asked.trusted)
    return placed(asked, value, changed={})


def placed(asked: Asked, value: Any, *, changed: Mapping[str, str]) -> Tree:
    """A value as the state of a step, under `asked.key` if that is given.

    Raises:
        ConfigError: it is no dict, and there is no key; or nobody says which step it is.
    """
    says = None
    if isinstance(value, Mapping):
        says = next((value[key] for key in _STEP_KEYS if isinstance(value.get(key), int)), None)
    elif asked.key is None:
        raise ConfigError(
            f"{asked.path} holds one {type(value).__name__}, and a state is a dict: say what it is called "
            f"there, --as model"
        )
    step = step_of(asked, says, exact=False)
    return Tree(step, value if asked.key is None else {asked.key: value}, changed)


TORCH = Source(
    name="torch",
    what="a file of torch.save",
    place=80,
    recognises=_recognises,
    read=_read,
)
