"""An interrupt, or an error, at every line of a restore that brings its step: the next one is well."""

from __future__ import annotations

import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.levels.errands import Errands
from ckpt_core.restore import Restorer, verify
from ckpt_core.store import committed_steps
from ckpt_core.system.files import Files
from tests import places
from tests.interrupts.scenarios import strike
from tests.interrupts.trap import Boom, Trap
from tests.levels.restoring import TIMEOUT_S, brings_back, fill, opened
from tests.levels.servers.faulty import FaultServer, in_environment
from tests.levels.test_bringing_objects import put_step
from tests.restore.harness import assert_same, small_state, zeros_like

MOST, FEW = 12, 4


def restored(root: Path, level: str, errands: Errands, trap: Trap) -> None:
    """A restore of a fresh root that is struck, and one after it by the same process."""
    shutil.rmtree(root, ignore_errors=True)
    with opened(root) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def restorer() -> Restorer:
            further = brings_back(store, [level])
            further._errand = errands.run
            return Restorer(
                root,
                files=Files(),
                readers=2,
                timeout_s=TIMEOUT_S,
                store=store,
                further=further,
            )

        live: Any = zeros_like(small_state())
        strike(trap, lambda: restorer().restore(live))
        found = restorer().restore(live)
        assert found is not None and found.step == 20
        assert_same(live["weight"], small_state(20)["weight"])
    assert committed_steps(root) == (20,)
    assert verify(root).ok
    assert not list((root / ".inflight").iterdir())


def strike_everywhere(
    root: Path, level: str, kind: type[BaseException], *, most: int, of: str
) -> None:
    errands = Errands()
    try:
        counting = Trap(-1, kind)
        restored(root, level, errands, counting)
        assert counting.lines > 50
        for n in places.some(range(counting.lines), most, of=of):
            restored(root, level, errands, Trap(n, kind))
    finally:
        errands.close()
    names = [one.name for one in threading.enumerate()]
    assert not [name for name in names if name.startswith(("ckpt-bring", "ckpt-errand"))]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Boom])
def test_bringing_from_a_directory_can_be_cut_short_at_every_line(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    fill(tmp_path / "level", 10, 20)
    of = f"bring from a directory {kind}"
    strike_everywhere(tmp_path / "root", str(tmp_path / "level"), kind, most=MOST, of=of)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Boom])
def test_bringing_from_a_store_can_be_cut_short_at_every_line(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    pytest.importorskip("obstore")
    fill(tmp_path / "sent", 20)
    with FaultServer() as server, in_environment(server.environ()):
        put_step(server, tmp_path / "sent", 20)
        of = f"bring from a store {kind}"
        strike_everywhere(tmp_path / "root", server.url(), kind, most=FEW, of=of)
