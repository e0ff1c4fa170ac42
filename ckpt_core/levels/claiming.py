"""Errands of a Checkpointer that is being made: are the levels in order, and whose are they?

    {"run", "session", "others", "warnings"} = claim({"levels", "run", "fresh", "leads", ...}, progress)

Each level has two words. `run.json` says which run it belongs to, and counts the Checkpointers that have
opened it (the *session*): an agent that sees a higher one than its own ends. `lease.json` is renewed by an
agent as long as its trainer lives: a fresh root joins the run that it finds, unless somebody is seen to be at
work in it. With the session goes the newest one that is not known to have been the same root's: only such a
one may have changed at a level what this root remembers of it.

Idea: nobody's clock is compared with another's. A lease holds if it is seen to change while we look on.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from ckpt_core.errors import CkptError, ConfigError, RestoreError, RootBusy
from ckpt_core.layout import RUN_NAME
from ckpt_core.levels.far.door import Away, Conflict, Far, Word
from ckpt_core.levels.far.opening import open_far
from ckpt_core.options import Level, parse_levels
from ckpt_core.system.machine import boot_id

Json = Any
Progress = Callable[[int, int], None]

LEASE = "lease.json"

WATCH_S = 40.0
"""How long a lease is watched: longer than two of its renewals."""

_PIDS = "/proc/self/ns/pid"
_LOOK_EVERY_S = 1.0
_TRIES = 20

R = TypeVar("R")
_Read = tuple[Far, Word | None, Word | None]


@dataclass(frozen=True)
class _Claim:
    """What is asked for.

    Attributes:
        run: that of the root; None: it has none yet.
        fresh: the root holds no step, so that it may join a run that it finds.
        copied: it is a copy of one that may be at work: as one that joins, it looks on first.
        least: a session that this root has had already; the next one is above it.
        host, pid: whose claim it is.
        token: likewise.
        mine: tokens of all claims of this root.
    """

    run: str | None
    fresh: bool
    copied: bool
    least: int
    host: str
    pid: int
    token: str
    mine: frozenset[str]


def check(request: Json, progress: Progress) -> Json:
    """Whether every level can hold steps; what is only away is a warning.

    Raises:
        ConfigError: names each level that cannot, and the remedy.
    """
    levels = _opened(request)
    try:
        return {"warnings": _checked(levels, progress), "mounts": _mounts(levels)}
    finally:
        _close(levels)


def claim(request: Json, progress: Progress) -> Json:
    """Check the levels, find the run that they belong to or begin one, and count this session everywhere.

    With `leads` false it only checks: the rank that leads has claimed, or will.

    Raises:
        ConfigError: as `check`.
        RestoreError: a level is away and this root has no run yet: there may be one to go on from, and
            nobody can tell.
        RootBusy: a level belongs to another run, or somebody else is at work in it.
    """
    levels = _opened(request)
    try:
        warnings = _checked(levels, progress)
        if not request["leads"]:
            about = {"run": request["run"], "session": 0}
            return {**about, "warnings": warnings, "mounts": _mounts(levels)}
        asked = _Claim(
            run=request["run"],
            fresh=bool(request["fresh"]),
            copied=bool(request.get("copied")),
            least=int(request.get("session", 0)),
            host=request["host"],
            pid=int(request["pid"]),
            token=request.get("token", ""),
            mine=frozenset(request.get("mine", ())),
        )
        run, session, others = _claimed(levels, asked, warnings, progress)
        about = {"run": run, "session": session, "others": others}
        return {**about, "warnings": warnings, "mounts": _mounts(levels)}
    finally:
        _close(levels)


# -- the check ---------------------------------------------------------------------------------------


def _opened(request: Json) -> list[Far]:
    levels: tuple[Level, ...] = parse_levels(list(request["levels"]))
    mounts = request.get("mounts", {})
    return [open_far(level.url, mounted=mounts.get(level.url, "")) for level in levels]


def _mounts(levels: Sequence[Far]) -> dict[str, str]:
    return {far.url: far.mounted for far in levels if far.mounted}


def _close(levels: Sequence[Far]) -> None:
    for far in levels:
        far.close()


def _checked(levels: Sequence[Far], progress: Progress) -> list[str]:
    """All are looked at, also when one is out of order: whoever repairs one wants to know of the others."""
    problems: list[str] = []
    warnings: list[str] = []
    for _, error in _at_once(levels, lambda far: far.check()):
        if isinstance(error, Away) and not error.hopeless:
            warnings.append(str(error))
        elif isinstance(error, CkptError):
            problems.append(str(error))
        elif error is not None:
            raise error
    progress(0, 1)
    if problems:
        raise ConfigError("levels: " + "; ".join(problems))
    return warnings


def _at_once(
    levels: Sequence[Far], act: Callable[[Far], R]
) -> list[tuple[R | None, Exception | None]]:
    def guarded(far: Far) -> tuple[R | None, Exception | None]:
        try:
            return act(far), None
        except Exception as exc:
            return None, exc

    with ThreadPoolExecutor(max(1, len(levels)), thread_name_prefix="ckpt-claim") as threads:
        return list(threads.map(guarded, levels))


# -- the claim ---------------------------------------------------------------------------------------


def _claimed(
    levels: Sequence[Far], asked: _Claim, warnings: list[str], progress: Progress
) -> tuple[str, int, int]:
    for _ in range(_TRIES):
        words = _words(levels, asked, warnings)
        found = {far.url: _object(far, said) for far, one, two in words if (said := one or two)}
        run = _run(found, asked)
        if found and (run != asked.run or asked.copied):
            _be_alone(words, found, asked, warnings, progress)
        session = 1 + max([asked.least, *(int(word["session"]) for word in found.values())])
        others = max([asked.least, *(_others(word, asked) for word in found.values())])
        told: dict[str, Any] = {"host": asked.host, "pid": asked.pid}
        told |= {"token": asked.token, "others": others}
        try:
            for far, word, _ in words:
                _write(far, word, claim_word(run, session, **told), asked, warnings)
        except Conflict:
            continue  # somebody else is at it in this very moment: look again who it is
        return run, session, others
    raise RootBusy(
        f"{levels[0].url}: several claim this level again and again: start one run after the other"
    )


def _words(levels: Sequence[Far], asked: _Claim, warnings: list[str]) -> list[_Read]:
    """`run.json` and the lease of each level that answers. The latter, too, says whose it is.

    Who fills a level anew, which somebody has emptied, may have come to renew the lease alone.
    """

    def read(far: Far) -> tuple[Word | None, Word | None]:
        return far.read_word(RUN_NAME), far.read_word(LEASE)

    words: list[_Read] = []
    for far, (found, error) in zip(levels, _at_once(levels, read), strict=True):
        if isinstance(error, Away):
            _warn_or_raise(error, asked, warnings)
        elif error is not None:
            raise error
        elif found is not None:
            words.append((far, *found))
    return words


def _write(far: Far, word: Word | None, data: bytes, asked: _Claim, warnings: list[str]) -> None:
    try:
        far.write_word(RUN_NAME, data, over=None if word is None else word.tag)
    except Away as exc:
        _warn_or_raise(exc, asked, warnings)


def _warn_or_raise(error: Away, asked: _Claim, warnings: list[str]) -> None:
    """A level that is away now stops nobody who has a run; whoever has none would begin where others are."""
    if error.hopeless:
        raise ConfigError(f"levels: {error}") from None
    if asked.run is None:
        raise RestoreError(
            f"levels: {error}. This root has no run yet, and one may be there to go on with: nothing was "
            "begun. Start again when it answers"
        ) from None
    if str(error) not in warnings:
        warnings.append(str(error))


def _run(found: Mapping[str, Mapping[str, Any]], asked: _Claim) -> str:
    """The run that all levels belong to."""
    runs = {word["run"] for word in found.values()}
    joins = asked.run is None and asked.fresh and len(runs) == 1
    for url, word in found.items():
        if word["run"] != asked.run and not joins:
            raise RootBusy(
                f"{url} belongs to another run ({word['run']}): {_who(word)}. Nothing was changed there. "
                "Give this run a place of its own; or, to go on with that run, an empty first root"
            )
    if asked.run is not None:
        return asked.run
    return str(runs.pop()) if runs else secrets.token_hex(16)


def _others(word: Mapping[str, Any], asked: _Claim) -> int:
    """The newest session that another root may have had, as a level knows it."""
    return int(word["others"] if word.get("token") in asked.mine else word["session"])


def _be_alone(
    words: list[_Read],
    found: Mapping[str, Mapping[str, Any]],
    asked: _Claim,
    warnings: list[str],
    progress: Progress,
) -> None:
    """Return when nobody is seen to work in the run that is joined. Takes out levels that stay away.

    Raises:
        RootBusy: somebody is.
        ConfigError, RestoreError: a level stays away, see `_warn_or_raise`.
    """
    watched = [
        one
        for one in words
        if one[0].url in found and not _has_ended(found[one[0].url], one[0], one[2])
    ]
    silent_s, away_s, looked_at = 0.0, 0.0, time.monotonic()
    while watched and silent_s < WATCH_S:
        progress(0, 1)
        time.sleep(_LOOK_EVERY_S)
        is_away = False
        for one in list(watched):
            try:
                if _look_on(one, found[one[0].url]):
                    watched.remove(one)
            except Away as exc:
                is_away = True
                if exc.hopeless or away_s >= WATCH_S:
                    _warn_or_raise(exc, asked, warnings)
                    watched.remove(one)
                    words.remove(one)
        now_s = time.monotonic()
        if is_away:  # nobody who could not be seen was silent
            away_s += now_s - looked_at
        else:
            # Looks count, and not the time that has passed: while a machine was stopped, nobody could beat.
            silent_s += min(now_s - looked_at, 1.5 * _LOOK_EVERY_S)
        looked_at = now_s


def _look_on(before: _Read, run: Mapping[str, Any]) -> bool:
    """Whether the work of the last session has ended for certain; raises RootBusy where somebody works."""
    far, word, lease = before
    now = far.read_word(LEASE)
    if now is not None and _has_ended(run, far, now):
        return True
    if _is_written(now, lease) or _is_written(far.read_word(RUN_NAME), word):
        raise RootBusy(
            f"{far.url}: somebody is at work in this run: {_who(run)}. End that trainer "
            "first; its committed steps stay, and a fresh root goes on from them"
        )
    return False


def _is_written(now: Word | None, before: Word | None) -> bool:
    """Whether somebody has written a word; one that is gone is no sign of work."""
    return now is not None and (before is None or now.tag != before.tag)


def _has_ended(run: Mapping[str, Any], far: Far, lease: Word | None) -> bool:
    return _is_over(run, None if lease is None else _object(far, lease))


def _is_over(run: Mapping[str, Any], lease: Mapping[str, Any] | None) -> bool:
    """Whether the work of the last session has ended for certain."""
    if lease is not None and lease["session"] >= run["session"] and lease.get("closed"):
        return True
    return _is_dead(run) and (lease is None or _is_dead(lease))


def _is_dead(holder: Mapping[str, Any]) -> bool:
    # Another machine may have the same name, and another container, or this one anew, other processes.
    if holder.get("host") != socket.gethostname() or not holder.get("pids") == pids_here() != "":
        return False
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError, KeyError):
        return False
    return False


def parsed(word: Word | None) -> dict[str, Any]:
    """What a word says, for whoever asks in passing; {} when it says nothing that can be understood."""
    with suppress(ValueError, RecursionError):
        obj = json.loads(word.data) if word is not None else None
        if isinstance(obj, dict) and isinstance(obj.get("session", 0), int):
            return obj
    return {}


# -- words -------------------------------------------------------------------------------------------


def pids_here() -> str:
    """Where the number of a process means what it means here; "" where that cannot be told."""
    boot = boot_id()
    with suppress(OSError):
        return f"{boot} {os.readlink(_PIDS)}" if boot else ""
    return ""


def claim_word(run: str, session: int, *, host: str, pid: int, **more: Any) -> bytes:
    """What `RUN_NAME` holds of a level that a session claims now; `first_root=True`: it is one.

    Called on the machine, and in the container, of that process.
    """
    since = datetime.now(UTC).isoformat(timespec="seconds")
    word = {"run": run, "session": session, "host": host, "pid": pid, "pids": pids_here()}
    return json.dumps({**word, "since": since, **more}).encode()


def _object(far: Far, word: Word) -> dict[str, Any]:
    try:
        obj = json.loads(word.data)
        if isinstance(obj, dict) and isinstance(obj["run"], str):
            numbers = {name: int(obj.get(name, 0)) for name in ("session", "others")}
            return {**obj, **numbers}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(
        f"{far.url}: {RUN_NAME} or {LEASE} there is not ours or damaged: look whose place it is, and "
        "remove that file"
    )


def _who(word: Mapping[str, Any]) -> str:
    since = f", since {word['since']}" if "since" in word else ""
    return f"process {word.get('pid', '?')} on {word.get('host', '?')}{since}"
