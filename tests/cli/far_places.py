"""Levels that commands are run against, as fixtures: import them into a test module."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.levels.servers.azurite import AzuriteServer, needs_azurite
from tests.levels.servers.faulty import FaultServer
from tests.levels.servers.moto import MotoServer, needs_store
from tests.levels.servers.peer import PeerServer

Cli = Callable[..., Any]


@dataclass(frozen=True)
class Place:
    """A level, and what a process needs to reach it."""

    url: str
    environ: dict[str, str] = field(default_factory=dict)


STORES = [
    pytest.param("moto", marks=needs_store, id="store"),
    pytest.param("azurite", marks=[needs_store, needs_azurite]),
    pytest.param("peer", marks=needs_store),
]


@pytest.fixture(params=["directory", *STORES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty level."""
    if request.param == "directory":
        return Place(str(tmp_path / "level"))
    server: MotoServer | AzuriteServer | PeerServer = request.getfixturevalue(request.param)
    return Place(server.url(uuid.uuid4().hex), server.environ())


@pytest.fixture
def at_place(cli: Cli, place: Place, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command that reaches the level, in this process."""
    for name, value in place.environ.items():
        monkeypatch.setenv(name, value)
    return cli


@pytest.fixture
def alone(process: Cli, place: Place) -> Cli:
    """Run it as a process of its own."""
    return lambda *arguments: process(*arguments, **place.environ)


@pytest.fixture
def faulty() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


@pytest.fixture
def at_faulty(cli: Cli, faulty: FaultServer, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command that reaches the server that can be told to fail."""
    for name, value in faulty.environ().items():
        monkeypatch.setenv(name, value)
    return cli
