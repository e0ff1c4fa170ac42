"""Stores as fixtures; a run starts what others made once, so each test keeps below a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.levels.servers.azurite import AzuriteServer
from tests.levels.servers.like_google import GoogleServer
from tests.levels.servers.moto import MotoServer
from tests.levels.servers.peer import PeerServer


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzuriteServer]:
    with AzuriteServer() as server:
        yield server


@pytest.fixture(scope="session")
def peer() -> Iterator[PeerServer]:
    with PeerServer() as server:
        yield server


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    with GoogleServer() as server:
        yield server
