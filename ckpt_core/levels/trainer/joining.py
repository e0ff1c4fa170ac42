"""The ranks of a job join the run that its levels hold, or begin one there: all of them, or none.

rank 0      claims the levels: nobody else's run is there, and this session is the newest
leaders     look whether their machine reaches the levels too, and which of them it has for itself
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_core.coordination import Coordination, Json
from ckpt_core.errors import PersistError, RestoreError
from ckpt_core.layout import RUN_NAME
from ckpt_core.levels.errands import Errands, errand
from ckpt_core.levels.far.door import Away
from ckpt_core.levels.helping import run_here
from ckpt_core.levels.mailbox import (
    LEVELS,
    RUN,
    is_copied,
    note_claim,
    read_mounts,
    read_plan,
    write_mounts,
)
from ckpt_core.levels.trainer.ring import Known
from ckpt_core.options import Level
from ckpt_core.save import look_together
from ckpt_core.store import committed_steps, writer_of
from ckpt_core.system.files import Files, advice

_log = logging.getLogger("ckpt_core")

_NOTHING = Known()
_NOT_JOINED = {"failed": "use the levels", "so": "No rank goes on"}
_ANSWERS_WITHIN_S = 60.0
_CLAIMED_WITHIN_S = 120.0
_RUN = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True)
class Claim:
    """What all ranks of a job go by.

    Attributes:
        run: id of the run.
        session: the newest of it.
        token: of this Checkpointer.
        others: the newest session that may have been another root's.
        own: directories among the levels that each node has for itself.
    """

    run: str
    session: int
    token: str
    others: int
    own: tuple[str, ...] = ()


def claim_together(
    root: Path,
    levels: Sequence[Level],
    coordination: Coordination,
    *,
    errands: Errands,
    timeout_s: float,
    known: Known | None = None,
) -> Claim:
    """Claim the levels for the run of this root. Called on every rank, with the root locked.

    Args:
        known: what other nodes know of the run, where they have told.

    Raises:
        ConfigError: a level cannot be used; what is wrong, and what to do.
        RootBusy: a level belongs to another run, or to a job that is running elsewhere.
        RestoreError: a level cannot be reached, and this root has no run yet; or the levels could not be
            asked.
        CommitError: what went wrong on another rank.
        CoordinationTimeout: a rank did not come.
    """

    def claim() -> dict[str, Any] | None:
        if coordination.info.rank != 0:
            return None
        return claim_here(root, levels, errands, known=known or _NOTHING)

    # Whoever joins a run looks on for a while whether somebody is at work there.
    within_s = max(timeout_s, _CLAIMED_WITHIN_S)
    answer = look_together(claim, coordination, "levels", within_s, **_NOT_JOINED)[0]
    claimed = Claim(answer["run"], answer["session"], answer["token"], answer["others"])
    if coordination.info.group is None:
        return claimed
    found = coordination.gather("places", _unclaimed(levels, claimed, coordination), within_s)
    numbers = {number for one in found for number in one}
    own = tuple([level.url for number, level in enumerate(levels) if number in numbers])
    return dataclasses.replace(claimed, own=own)


def of_nodes(
    look: Callable[[], Json], coordination: Coordination, topic: str, *, timeout_s: float
) -> dict[int, Json]:
    """What `look` gives on each rank that leads a node, by its number; where it fails on one, none goes on.

    Called on every rank.

    Raises:
        CkptError: what `look` raised on this rank.
        CommitError, CoordinationTimeout: another rank's.
    """
    leads = coordination.info.leads
    told = look_together(
        lambda: look() if leads else None, coordination, topic, timeout_s, **_NOT_JOINED
    )
    return {rank: one for rank, one in enumerate(told) if one}


def check(root: Path, levels: Sequence[Level], errands: Errands) -> None:
    """Be sure that this machine reaches the levels too.

    Raises:
        ConfigError, RestoreError: see `claim_together`.
    """
    _warn(_ask(root, "check", {}, levels, errands))


def read_run(root: Path) -> str | None:
    """The id of the run of a root; None: it has none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        text = (root / LEVELS / RUN).read_text().strip()
        return text if _RUN.fullmatch(text) else None
    return None


def write_run(root: Path, run: str, *, files: Files) -> None:
    """Keep the id of the run in the root, durably; a no-op where it is there.

    Raises:
        PersistError: it cannot be written.
    """
    if read_run(root) == run:
        return
    folder = root / LEVELS
    # Always the same name: who has the root is the only writer, and takes away what a kill has left.
    fresh = folder / f".{RUN}.new"
    try:
        with contextlib.suppress(FileExistsError):
            files.mkdir(folder)
        files.sync_dir(root)
        with contextlib.suppress(FileNotFoundError):
            files.unlink(fresh)
        files.write_new(fresh, f"{run}\n".encode())
        files.rename(fresh, folder / RUN)
        files.sync_dir(folder)
    except OSError as exc:
        raise PersistError(
            f"the id of the run could not be kept in {folder}: {exc.strerror}. Committed steps are safe. "
            f"{advice(exc)}",
            path=folder,
        ) from exc


# -- inside ----------------------------------------------------------------------------------------


def claim_here(
    root: Path, levels: Sequence[Level], errands: Errands, *, known: Known = _NOTHING
) -> dict[str, Any]:
    """Claim the levels for the run of this root: `run`, `session`, `token` and `others`.

    Raises as `claim_together`.
    """
    run, before, token = read_run(root) or known.run, read_plan(root), secrets.token_hex(8)
    # An agent that works here is its own, and no copy has it: something else has touched its files.
    mine, copied = list[str](), is_copied(root) and writer_of(root / LEVELS) is None
    if before is not None:
        with contextlib.suppress(OSError):  # then its sessions may be those of others
            mine = note_claim(root, token, copied=copied)
    session = before.session if before is not None and before.run == run else 0
    request = {
        "run": run,
        "fresh": run is None and not committed_steps(root),
        "copied": copied,
        "leads": True,
        "session": max(session, known.session),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "token": token,
        "mine": mine,
    }
    answer = _ask(root, "claim", request, levels, errands)
    _warn(answer)
    if copied:  # also the session of its plan was another root's
        answer["others"] = answer["session"]
    return {**{name: answer[name] for name in ("run", "session", "others")}, "token": token}


def _unclaimed(levels: Sequence[Level], claim: Claim, coordination: Coordination) -> list[int]:
    """Numbers of levels on disks of this machine which are not those that rank 0 has claimed just now.

    A network filesystem is never taken for one: it may be slow to show what another machine has written.
    """
    if coordination.info.rank == 0 or not coordination.info.leads:
        return []
    paths = {n: Path(level.url) for n, level in enumerate(levels) if level.scheme is None}
    return [n for n, path in paths.items() if not _is_claimed(path, claim) and _is_local(path)]


def _is_claimed(path: Path, claim: Claim) -> bool:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        word = json.loads((path / LEVELS / RUN_NAME).read_text())
        return bool(word.get("run") == claim.run and word.get("session") == claim.session)
    return False


def _is_local(path: Path) -> bool:
    there = next(one for one in (path, *path.parents) if one.is_dir())
    return Files().is_local(there)


def _warn(answer: dict[str, Any]) -> None:
    for text in answer["warnings"]:
        _log.warning("levels: %s; training goes on, and it is tried again", text)


def _ask(
    root: Path, name: str, request: dict[str, Any], levels: Sequence[Level], errands: Errands
) -> Any:
    """In this process where no client of an object store is needed, and so no thread of one."""
    rows = [level.to_json() for level in levels]
    request = {**request, "levels": rows, "mounts": read_mounts(root)}
    if any(level.scheme is not None for level in levels):
        try:
            answer = errands.run(name, request, timeout_s=_ANSWERS_WITHIN_S)
        except Away as exc:  # its process died, or says nothing
            raise RestoreError(f"levels: {exc}") from exc
    else:
        # On another thread: it waits for futures, which an interrupt of this one could leave locked.
        answer = run_here(lambda tell: errand(name)(request, tell), timeout_s=_ANSWERS_WITHIN_S)
    with contextlib.suppress(OSError):  # a full disk is told of by what is written next
        write_mounts(root, answer["mounts"])
    return answer
