"""Which tests stay in one process when several run them: `pytest -n 2 --dist loadscope`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out what `prepared_together` calls one, in the order of the files.

    Not by marks of groups: xdist 3.8 writes them into names that pytest 9.2 does not read. Then every test is
    dealt out by itself, and each process prepares everything.
    """
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByPreparation(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return prepared_together(nodeid)

    # Else those with the most tests come first, and the few that take long come last.
    config.option.loadscopereorder = False
    return ByPreparation(config, log)


def prepared_together(nodeid: str) -> str:
    """The same for tests that share a long preparation: those of a file, or of a folder of launches."""
    path = PurePosixPath(nodeid.partition("::")[0])
    in_one = path.parent.name == "horovod" and path.name != "test_elastic.py"
    return str(path.parent if in_one else path)
