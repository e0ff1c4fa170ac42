"""What of a root is still to be taken on: retention leaves that alone, and `wait` waits for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ckpt_core.errors import CommitError
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.far.looking import Looked
from ckpt_core.levels.mailbox import LevelStatus
from ckpt_core.levels.named import NamedFiles, newest_directories, wanted_directories
from ckpt_core.levels.wants import but_for, lasting, wanted
from ckpt_core.options import Level
from ckpt_core.store import committed_steps, pinned_steps
from ckpt_core.system.files import Files
from ckpt_core.types import step_dir_name


def awaited(
    here: Mapping[int, str],
    levels: Sequence[Level],
    seen: Sequence[LevelStatus | None],
    *,
    apart: Collection[str] = (),
) -> set[int]:
    """Steps of the root that some level still wants, and that no directory before that level holds. Pure.

    Of each level the newest `backlog`, and the one that is on its way.

    Args:
        here: committed steps of the root, with their attempts.
        seen: what is known of each level; None: nothing, so that it may want all.
        apart: attempts that a level of parity never gets.
    """
    stay: set[int] = set()
    held: dict[int, str] = {}
    for level, status in zip(levels, seen, strict=True):
        there = {} if status is None else status.steps
        open_ones = {step: attempt for step, attempt in here.items() if held.get(step) != attempt}
        if level.parity is not None:
            # The agent may not have looked again since training has gone back.
            open_ones, there = but_for(here, apart), but_for(there, apart)
            lasts = lasting(open_ones, level, there=there)
            stay.update(() if lasts is None else {lasts})
        stay.update(wanted(open_ones, level, there=there))
        if status is not None:
            stay.update(step for step in here if step == status.sending)
        if level.scheme is None:
            # It is the source of what comes after.
            held.update(there)
    return stay


class Attempts:
    """The attempts of committed steps of a root, each manifest read once."""

    def __init__(self, root: Path) -> None:
        self._looked = Looked(root, files=Files())

    def of(self, steps: Sequence[int]) -> dict[int, str]:
        """step -> attempt; "", which is nobody's, for one that cannot be read."""
        names = {step: step_dir_name(step) for step in steps}
        self._looked.forget_others(names.values())
        return {step: self._of(name) for step, name in names.items()}

    def _of(self, name: str) -> str:
        try:
            manifest = self._looked.manifest(name)
        except OSError:
            return ""
        return "" if manifest is None else manifest.attempt


class Due:
    """What is committed in a root, due at a level, and not there. Used by one thread at a time."""

    def __init__(self, root: Path, *, files: Files) -> None:
        self._root = root
        self._attempts = Attempts(root)
        self._named = NamedFiles(DirectoryFar(root, files=files))

    def newest(self, *, apart: Collection[str] = ()) -> tuple[Copy, ...]:
        """The newest step, and the newest directories of files: what was saved last.

        Args:
            apart: attempts that training has gone back behind: the newest step but for these, too.

        Raises:
            Away: the root cannot be read.
        """
        committed = committed_steps(self._root)
        steps = self._attempts.of(committed if apart else committed[-1:])
        ours = [*but_for(steps, apart)]
        steps = {step: steps[step] for step in {*committed[-1:], *ours[-1:]}}
        named = [one.copy for one in newest_directories(self._named.look())]
        return (*[Copy(step, attempt) for step, attempt in steps.items() if attempt], *named)

    def left(
        self,
        level: Level,
        seen: LevelStatus | None,
        *,
        apart: Collection[str] = (),
        last: Sequence[Copy] = (),
        needed: Copy | None = None,
    ) -> list[str]:
        """Steps and directories of files, for people; also those of `last`, whatever `every` says.

        Args:
            seen: what is known of the level; None: nothing.
            apart: attempts that a level of parity never gets, or has no more.
            needed: a step that has to be there itself, however new what is there may be.

        Raises:
            CommitError: nothing is left but steps that never go there.
            Away: the root cannot be read.
        """
        seen = seen or LevelStatus(level.url)
        found = self._attempts.of(committed_steps(self._root))
        if not level.parity:
            apart = ()
        # The agent may not have looked again since training has gone back.
        here, there = but_for(found, apart), but_for(seen.steps, apart)
        lasts = [
            one for one in last if one.attempt not in apart and _is_missing(one, level, seen, there)
        ]
        due = {step: here[step] for step in wanted(here, level, there=there)}
        due |= {one.step: one.attempt for one in lasts if one.directory is None}
        if needed is not None and there.get(needed.step) != needed.attempt:
            due[needed.step] = needed.attempt
        files = {name: Copy.of(attempt, name) for name, attempt in seen.files.items()}
        # Parity is kept of steps alone.
        named = (
            wanted_directories(self._named.look(), level, there=files) if not level.parity else ()
        )
        left = [f"step {step}" for step in sorted(due) if seen.skipped.get(step) != due[step]]
        names = {one.name for one in named}
        left += sorted(names | {one.target for one in lasts if one.directory is not None})
        pins = pinned_steps(self._root).intersection(seen.steps).difference(seen.pinned)
        left += [f"the pin of step {step}" for step in sorted(pins)]
        if due and not left:
            why = seen.problem or "agent.log says why"
            text = f"steps {sorted(due)} were passed over at {level.url}: {why}"
            raise CommitError(f"{text}. They are safe where they are", step=max(due))
        return left


def _is_missing(save: Copy, level: Level, seen: LevelStatus, there: Mapping[int, str]) -> bool:
    """Whether a level has neither this very save nor a newer one."""
    if save.directory is not None:
        return not level.parity and seen.files.get(save.directory) != save.attempt
    if save.step in there:
        return there[save.step] != save.attempt
    return save.step > max(there, default=-1)
