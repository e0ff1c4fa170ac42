"""Jobs that load from directories which somebody has damaged. Each function runs in every rank.

The directory before the damage: global_step1, 2 and 3 by this engine, `plain` by DeepSpeed's own in between,
and `latest` names global_step3.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ckpt_deepspeed
from ckpt_core import CkptError
from tests.integrations.deepspeed.crash_jobs import SMALL
from tests.integrations.deepspeed.training import digest, engine, train

NEWEST, BEFORE = "global_step3", "global_step2"
ZERO = 2


def _flip(path: Path, part: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * part)] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _garble(path: Path) -> None:
    path.write_bytes(b"{" + bytes(200))


def _forget(root: Path) -> None:
    """No whole tag of this engine is left."""
    for path in root.glob("global_step*"):
        next(path.glob("*.pt")).unlink()


WAYS: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "first bit flipped": lambda path: _flip(path, 0.0),
    "middle bit flipped": lambda path: _flip(path, 0.5),
    "last bit flipped": lambda path: _flip(path, 0.999),
    "missing": Path.unlink,
    "empty": _empty,
    "garbled": _garble,
}
"""What happens to one file."""

LATEST: dict[str, bytes | None] = {
    "of a tag that is gone": b"global_step9",
    "empty": b"",
    "blank": b" \n",
    "binary": bytes(range(256)),
    "several lines": b"global_step3\nglobal_step2\n",
    "far too long": b"x" * 5000,
    "with a null byte": b"global\0step",
    "outside": b"../elsewhere",
    "missing": None,
}
"""What may be in `latest`; None: there is no such file."""


def torn(folder: str) -> dict[str, Any]:
    """What every kind of damage to every file of the newest tag does to loads with a tag and without."""
    place = Path(folder)
    base = _base(place / "base")
    found = {}
    files = sorted(path.name for path in (base / NEWEST).iterdir())
    for name in files:
        for way, act in WAYS.items():
            root = _copied(base, place / "copy", lambda root: act(root / NEWEST / name))  # noqa: B023
            found[f"{name} {way}"] = [_loaded(root), _loaded(root, NEWEST)]
    return found


def pointed(folder: str) -> dict[str, Any]:
    """What a load without a tag makes of a `latest` that is wrong."""
    place = Path(folder)
    base = _base(place / "base")
    return {
        name: _loaded(_copied(base, place / "copy", lambda root: _say(root, text)))  # noqa: B023
        for name, text in LATEST.items()
    }


def others(folder: str) -> dict[str, Any]:
    """Tags of plain DeepSpeed among ours, nothing that is whole, nothing at all."""
    place = Path(folder)
    base = _base(place / "base")
    cases: dict[str, tuple[Callable[[Path], Any], str | None]] = {
        "plain is the newest": (lambda root: _say(root, b"plain"), None),
        "plain by its tag": (lambda root: None, "plain"),
        "the newest by its tag": (lambda root: None, NEWEST),
        "nothing is whole": (_forget, None),
        "nothing is whole, by its tag": (_forget, NEWEST),
        "nothing is whole, and no latest": (lambda root: (_forget(root), _say(root, None)), None),
        "two are torn": (lambda root: _forget_newest(root, 2), None),
        "no such tag": (lambda root: None, "global_step9"),
        "nothing but plain, and no latest": (_only_plain, None),
        "nothing at all": (lambda root: _emptied(root), None),
        "no directory": (lambda root: shutil.rmtree(root), None),
    }
    return {
        name: _loaded(_copied(base, place / "copy", act), tag) for name, (act, tag) in cases.items()
    }


def aside(folder: str) -> dict[str, Any]:
    """A newer tag of save_latest=False lies beside global_step1 and 2, which `latest` named."""
    place = Path(folder)
    base, made = place / "base", engine(ZERO, "bf16", **SMALL)
    for step, tag in enumerate(["global_step1", BEFORE, "export"], start=1):
        train(made, step - 1, step)
        made.save_checkpoint(str(base), tag, {"step": step}, save_latest=tag != "export")
    ckpt_deepspeed.close()
    dist.barrier()

    cases: dict[str, Callable[[Path], Any]] = {
        "the newest is torn": lambda root: next((root / BEFORE).glob("*.pt")).unlink(),
        "no latest": lambda root: _say(root, None),
        "no other is whole": _forget,
    }
    return {name: _loaded(_copied(base, place / "copy", act)) for name, act in cases.items()}


def _base(root: Path) -> Path:
    made = engine(ZERO, "bf16", **SMALL)
    for step in range(1, 4):
        train(made, step - 1, step)
        made.save_checkpoint(str(root), client_state={"step": step})
        if step == 2:
            plain = engine(ZERO, "bf16", ours=False)
            train(plain, 0, 2)
            plain.save_checkpoint(
                str(root), tag="plain", client_state={"step": 2}, save_latest=False
            )
    ckpt_deepspeed.close()
    dist.barrier()
    return root


def _copied(base: Path, root: Path, act: Callable[[Path], Any]) -> Path:
    """A copy of the directory, damaged."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        act(root)
    dist.barrier()
    return root


def _say(root: Path, text: bytes | None) -> None:
    (root / "latest").unlink() if text is None else (root / "latest").write_bytes(text)


def _forget_newest(root: Path, count: int) -> None:
    for path in sorted(root.glob("global_step*"))[-count:]:
        next(path.glob("*.pt")).unlink()


def _only_plain(root: Path) -> None:
    _say(root, None)
    for path in root.glob("global_step*"):
        shutil.rmtree(path)


def _emptied(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def _loaded(root: Path, tag: str | None = None) -> dict[str, Any]:
    """What a load gives: the step of the client, what was warned of, what was raised."""
    made = engine(ZERO, "bf16", seed=5, **SMALL)
    before = digest(made)
    problem, step, path = "", None, None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            path, client = made.load_checkpoint(str(root), tag)
            step = None if client is None else client["step"]
        except (CkptError, OSError, AssertionError) as exc:
            problem = f"{type(exc).__name__}: {exc}"
    return {
        "step": step,
        "tag": None if path is None else Path(path).parent.name,
        "problem": problem,
        "told": [str(one.message) for one in told if str(root) in str(one.message)],
        "untouched": digest(made) == before,
        "steps": made.global_steps,
    }
