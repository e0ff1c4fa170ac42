"""Small real filesystems for tests, mounted by root; whoever is not root skips with a reason."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

SIZE_MIB = 24
_MAKING = {"ext4": "-q -F -O ^has_journal".split(), "btrfs": "-q -f -M -m single -d single".split()}


def _command(*words: str | Path) -> None:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"cannot run {words[0]} here: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def mounted(kind: str, place: Path) -> Iterator[Path]:
    """A filesystem below `place`: "tmpfs", "ext4" or "btrfs" of 24 MiB, or an "overlay" of `place`."""
    if os.geteuid() != 0:
        pytest.skip("mounting a filesystem needs root")
    where = place / kind
    where.mkdir()
    mount(kind, place)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=False, timeout=60)


def fill(disk: Path) -> None:
    """Leave no byte free in a filesystem."""
    with open(disk / "filler", "ab", buffering=0) as file:
        for nbytes in (1 << 20, 4096, 1):
            with suppress(OSError):
                while file.write(bytes(nbytes)):
                    pass
        with suppress(OSError):
            os.fsync(file.fileno())


def mount(kind: str, place: Path) -> None:
    """Mount it, making it if it is not there yet."""
    where = place / kind
    if kind == "tmpfs":
        _command("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", where)
        return
    if kind == "overlay":
        layers = [place / name for name in ("lower", "upper", "work")]
        for layer in layers:
            layer.mkdir()
        options = ",".join(f"{layer.name}dir={layer}" for layer in layers)
        _command("mount", "-t", kind, "-o", options, kind, where)
        return
    image = place / "image"
    if not image.exists():
        image.touch()
        os.truncate(image, SIZE_MIB * 2**20)
        try:
            _command(f"mkfs.{kind}", *_MAKING[kind], image)
        except FileNotFoundError:
            pytest.skip(f"mkfs.{kind} is not installed")
    _command("mount", "-o", "loop", image, where)


@contextmanager
def bound(where: Path, *, at: Path | None = None) -> Iterator[None]:
    """Mounted at itself, a directory has its files as ever and keeps its name; or at another one, over it."""
    at = at or where
    if os.geteuid() != 0:
        pytest.skip("mounting a filesystem needs root")
    _command("mount", "--bind", where, at)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False, timeout=60)


def remount(where: Path, options: str) -> None:
    """Change the options of a mounted filesystem."""
    _command("mount", "-o", f"remount,{options}", where)
