"""What is to be known of a format to import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Asked:
    """What is wanted of a source.

    Attributes:
        path: the file or directory.
        step: its number, as the user says; None: what the source says.
        key: put all that it holds under this key of the state; None: it is a state already.
        trusted: its objects may be built, which may run code.
        force: take what may lack a part of it, too.
    """

    path: Path
    step: int | None = None
    key: str | None = None
    trusted: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """A state that was read, for `Checkpointer.save`.

    Attributes:
        step: its number.
        tree: the state.
        changed: paths that are there in another form, and which.
    """

    step: int
    tree: Any
    changed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """Files that were found, for `Checkpointer.begin_files`.

    Attributes:
        step: the number that they belong to.
        directory: their directory in the root.
        pointer: the file in the root that names it.
        folder: where the files are read.
        names: of the files.
        read: what one of them holds.
    """

    step: int
    directory: str
    pointer: str
    folder: Path
    names: tuple[str, ...]
    read: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Source:
    """One format. Made without importing what reads it.

    Attributes:
        name: what `--format` calls it.
        what: what it is, in words.
        place: among the others, the most special first: the first that recognises a path is taken.
        recognises: whether a path looks like it. Only names and a few bytes are looked at.
        read: all of it. Raises ConfigError for what cannot be imported, UntrustedData for what needs
            `trusted`, CorruptCheckpoint for what is damaged.
        install: how to get what it is read with; "" where that is there.
    """

    name: str
    what: str
    place: int
    recognises: Callable[[Path], bool]
    read: Callable[[Asked], Tree | NamedFiles]
    install: str = ""


def step_of(asked: Asked, found: object, *, exact: bool = True) -> int:
    """The number of the step: what the source says, or the user.

    Args:
        found: what the source says; anything but a number means nothing.
        exact: the framework counts on it, and on the layout: the user may say no other.

    Raises:
        ConfigError: neither says it, or they contradict each other.
    """
    if exact and asked.key is not None:
        raise ConfigError(f"--as {asked.key}: the layout is that of its framework; leave it out")
    says = found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None
    if asked.step is not None:
        if exact and says is not None and says != asked.step:
            raise ConfigError(f"--step {asked.step}: {asked.path} is step {says}; leave it out")
        return asked.step
    if says is None:
        raise ConfigError(f"{asked.path} does not say which step it is: add --step N")
    return says
