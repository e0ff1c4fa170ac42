"""Measured processes as forks of one that has imported what they would: most of what they do is to import."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from unittest import mock

from ckpt_core.bench import remote
from tests.forks import Forks


@contextmanager
def forked(*modules: str) -> Iterator[None]:
    """Have each `Remote` be a fork of a process that has imported these modules (`tests.forks`)."""
    instead = SimpleNamespace(**vars(subprocess) | {"Popen": _forks(*modules).popen})
    with mock.patch.object(remote, "subprocess", instead):
        yield


@cache
def _forks(*modules: str) -> Forks:
    """Kept: several files of tests ask for the same."""
    return Forks("ckpt_core.bench.serving", *modules)
