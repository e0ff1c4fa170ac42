"""How steps lose their names: out of sight first, then a look at the pins, then for good.

Any process may pin a step, without a lock. It makes its pin durable and then looks whether the step is
there; here the step's name goes first, and then the pins are read. So one of both always sees the other: a
pin that was acknowledged is seen here, and the step comes back.

    step-<N>  ->  .inflight/<N>-<random>.replaced   undecided: `repair` brings it back after a kill
              ->  .inflight/<N>-<random>.retired    decided: `repair` deletes it
        or    ->  step-<N>                          pinned meanwhile

Nothing here waits for storage: between the first and the last name lie two looks at directories.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.errors import ConfigError, NotCommitted
from ckpt_core.store.names import INFLIGHT, REPLACED, RETIRED, is_real_dir, step_path
from ckpt_core.store.pins import pinned_steps
from ckpt_core.store.publish import sync_names
from ckpt_core.store.trees import ensure_dir
from ckpt_core.system.files import Files

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Left:
    """What became of steps that were to go.

    Attributes:
        gone: step -> where it lies, without a name that anybody looks for. Not durable yet.
        pinned: those that were pinned meanwhile.
        stuck: those that could not be renamed, as another user's, and why.
    """

    gone: dict[int, Path]
    pinned: frozenset[int]
    stuck: dict[int, OSError]


def take_away(
    root: Path,
    steps: Collection[int],
    *,
    files: Files,
    together: bool = False,
    held: Callable[[], Collection[int]] = tuple,
) -> Left:
    """Take the names of steps away, except from those that have been pinned meanwhile.

    Args:
        together: none goes if one of them is pinned, or cannot go.
        held: what says which steps stay as pinned ones do.

    Raises:
        OSError, an interrupt: none went: each has its name still, or again; if that failed too, it is logged.
    """
    now: dict[int, Path] = {}
    stuck: dict[int, OSError] = {}
    try:
        if steps:
            ensure_dir(files, root / INFLIGHT)
        for step in steps:
            # Order matters: noted before it is done, here and below. An interrupt may come in between.
            now[step] = root / INFLIGHT / f"{step:012d}-{secrets.token_hex(4)}{REPLACED}"
            try:
                files.rename(step_path(root, step), now[step])
            except OSError as exc:
                if together:
                    raise
                stuck[step] = exc
                _bring_back(root, {step: now[step]}, files=files)
                del now[step]
        if stuck and not now:
            raise next(iter(stuck.values()))
        # Order matters: read when the names are gone.
        pinned = pinned_steps(root).union(held()).intersection(steps)
        for step in tuple(now):
            if step in pinned or (pinned and together):
                files.rename(now[step], step_path(root, step))
                del now[step]
            else:
                aside, now[step] = now[step], now[step].with_suffix(RETIRED)
                files.rename(aside, now[step])
        if pinned:
            sync_names(files, root)
    except BaseException:
        _bring_back(root, now, files=files)
        raise
    return Left(now, pinned, stuck)


def _bring_back(root: Path, now: dict[int, Path], *, files: Files) -> None:
    for step, path in now.items():
        try:
            for aside in {path, path.with_suffix(REPLACED)}:
                if is_real_dir(aside):
                    files.rename(aside, step_path(root, step))
        except OSError as exc:
            logger.error("step %d lies in %s and cannot be brought back: %s", step, path, exc)


def check_removable(
    root: Path, wanted: list[int], *, committed: Collection[int], kept: Collection[int]
) -> None:
    """Be sure that steps which a person names may all be removed.

    Raises:
        NotCommitted, ConfigError: one is not there, or is kept.
    """
    missing = sorted(set(wanted).difference(committed))
    if missing:
        text = f"steps {missing} are not committed in {root}; nothing was removed from it"
        raise NotCommitted(text, step=missing[0], path=root)
    if not set(wanted).isdisjoint(kept):
        raise is_kept(root, set(wanted).intersection(kept))


def is_kept(root: Path, steps: Collection[int]) -> ConfigError:
    """Why steps are not removed that something keeps."""
    text = (
        f"steps {sorted(steps)} are pinned, held for parity or being read in {root}: unpin them first, or "
        "leave them out; nothing was removed from it"
    )
    return ConfigError(text, step=min(steps), path=root)


def not_pinned(root: Path, step: int, *, undecided: bool) -> NotCommitted:
    """Why a pin keeps nothing."""
    text = f"step {step} is not in {root}: it was retired meanwhile, or never committed. It is not pinned"
    if undecided:
        text = (
            f"step {step} in {root} was being retired or replaced by a writer that does not go on. It is "
            "pinned; the next start of the job brings the step back if it was not decided: look then"
        )
    return NotCommitted(text, step=step, path=step_path(root, step))
