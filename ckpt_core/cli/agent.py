"""`agent`: the process that takes steps to further levels, started by hand or by systemd."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpt_core.cli.listing_levels import further_levels, told
from ckpt_core.cli.places import check_directory, directory_of
from ckpt_core.cli.text import say, say_json
from ckpt_core.errors import ConfigError
from ckpt_core.levels import due_steps, serve_agent, settle_plan
from ckpt_core.options import Level
from ckpt_core.store import find_root
from ckpt_core.units import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_core.cli.requests import AgentRequest


def run(request: AgentRequest) -> bool:
    """Be the agent, and say at the end how far it came; False when something is still to come.

    Raises:
        ConfigError: there is no plan, the job has its own, or a level cannot be used.
        RootBusy: the root has an agent; or a level belongs to another run, or to a job that runs elsewhere.
        Away: a level cannot be reached.
    """
    root = directory_of(request.root, command="ckpt-core agent")
    check_directory(root)
    there = find_root(root)  # which a link does not lead elsewhere meanwhile
    with spoken():
        plan = settle_plan(there, _levels(request))
        status = serve_agent(there, once=request.once)
    left = {} if status is None else due_steps(there, plan, status)
    problems = [] if status is None else [level.problem for level in status.levels if level.problem]
    whole = status is not None and not any(left.values()) and not problems
    found = further_levels(there)
    assert found is not None
    if request.json:
        rows = [{**asdict(row), "due": left.get(row.url, ())} for row in found.levels]
        say_json({"root": str(root), "ended": found.ended, "levels": rows})
    else:
        for line in told(found):
            say(line)
    return whole or not request.once


def _levels(request: AgentRequest) -> tuple[Level, ...]:
    urls = request.level or []
    if not urls and (request.every != 1 or request.keep_last != 2 or request.bandwidth):
        raise ConfigError("--every, --keep-last and --bandwidth are of levels: give --level URL")
    return tuple(
        [
            Level(url, request.every, request.keep_last or None, bandwidth=request.bandwidth)
            for url in urls
        ]
    )


@contextmanager
def spoken() -> Iterator[None]:
    """What the agent has to say is said here, too; its log is in `.levels/agent.log`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Clean("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    ours = logging.getLogger("ckpt_core")
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)


class _Clean(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))
