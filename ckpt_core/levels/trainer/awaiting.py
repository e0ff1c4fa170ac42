"""What of a root is still to be taken on: retention leaves that alone, and `wait` waits for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ckpt_core.errors import CommitError
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.far.looking import Looked
from ckpt_core.levels.mailbox import LevelStatus
from ckpt_core.levels.named import NamedFiles, newest_directories, wanted_directories
from ckpt_core.levels.wants import but_for, lasting, meets, wanted
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


_Saved = tuple[Sequence[Copy], Sequence[Copy]]


def _nothing() -> _Saved:
    return (), ()


class Due:
    """What is committed in a root, due at a level, and not there. Used by one thread at a time.

    Args:
        saved: asked what this Checkpointer has saved last, of steps and of directories of files.
    """

    def __init__(self, root: Path, *, files: Files, saved: Callable[[], _Saved] = _nothing) -> None:
        self._root, self._saved = root, saved
        self._attempts = Attempts(root)
        self._named = NamedFiles(DirectoryFar(root, files=files))

    def newest(self, *, apart: Collection[str] = (), nodes: bool = False) -> tuple[Copy, ...]:
        """What was saved last; of steps, or directories, of which none is here: those of the highest number.

        Args:
            apart: attempts that training has gone back behind: the newest step but for these, too.
            nodes: as for `left`; then those of the highest number.

        Raises:
            Away: the root cannot be read.
        """
        # Order matters: what is committed meanwhile would be taken for deleted.
        last_steps, last_files = _nothing() if nodes else self._saved()
        committed, looked = committed_steps(self._root), self._named.look()
        some = {*committed[-1:], *(one.step for one in last_steps)}
        steps = self._attempts.of([step for step in committed if apart or step in some])
        ours = [*but_for(steps, apart)]
        ends = [Copy(step, steps[step]) for step in {*committed[-1:], *ours[-1:]} if steps[step]]
        last_steps = [one for one in last_steps if steps.get(one.step) == one.attempt]
        files = [one for one in looked if one.copy in last_files] or newest_directories(looked)
        return (*(last_steps or ends), *[one.copy for one in files])

    def left(
        self,
        level: Level,
        seen: LevelStatus | None,
        *,
        apart: Collection[str] = (),
        last: Sequence[Copy] = (),
        needed: Copy | None = None,
        nodes: bool = False,
    ) -> list[str]:
        """Steps and directories of files, for people; also those of `last`, whatever `every` says.

        Args:
            seen: what is known of the level; None: nothing.
            apart: attempts that a level of parity never gets, or has no more.
            needed: a step that has to be there itself, however new what is there may be.
            nodes: nodes of the job keep one another's steps there: what training has gone back behind goes.

        Raises:
            CommitError: nothing is left but steps that never go there; or what was saved last does not.
            Away: the root cannot be read.
        """
        seen = seen or LevelStatus(level.url)
        found = self._attempts.of(committed_steps(self._root))
        if not level.parity:
            apart = ()
        # The agent may not have looked again since training has gone back.
        here, there = but_for(found, apart), but_for(seen.steps, apart)
        # Parity is kept of steps alone.
        looked = () if level.parity else self._named.look()
        files = {name: Copy.of(it, name) for name, it in seen.files.items()}
        at_root = [*_copies(here), *(one.copy for one in looked)]
        lasts = [one for one in last if one.attempt not in apart]
        lasts = self._coming(lasts, level, seen, there, at_root, nodes=nodes)
        due = {step: here[step] for step in wanted(here, level, there=there)}
        due |= {one.step: one.attempt for one in lasts if one.directory is None}
        if needed is not None and there.get(needed.step) != needed.attempt:
            due[needed.step] = needed.attempt
        named = wanted_directories(looked, level, there=files)
        left = [f"step {step}" for step in sorted(due) if seen.skipped.get(step) != due[step]]
        names = {one.name for one in named}
        left += sorted(names | {one.target for one in lasts if one.directory is not None})
        pins = pinned_steps(self._root).intersection(seen.steps).difference(seen.pinned)
        left += [f"the pin of step {step}" for step in sorted(pins)]
        if due and not left:
            text = f"steps {sorted(due)} were passed over at {level.url}"
            why = seen.problem or "agent.log says why"
            raise CommitError(f"{text}: {why}. They are safe where they are", step=max(due))
        return left

    def _coming(
        self,
        lasts: Sequence[Copy],
        level: Level,
        seen: LevelStatus,
        there: Mapping[int, str],
        at_root: Collection[Copy],
        *,
        nodes: bool,
    ) -> list[Copy]:
        """What of that is not there yet; CommitError where something of it never comes."""
        saved = () if nodes else [one for kind in self._saved() for one in kind]
        missing = [
            one
            for one in lasts
            # Its owner may have deleted a directory since.
            if (one.directory is None or one in at_root)
            and _is_missing(one, level, seen, there, itself=one in saved)
        ]
        at_level = [*_copies(there), *(Copy.of(it, name) for name, it in seen.files.items())]
        for one in () if nodes else missing:
            if one in saved or one.directory is not None:
                self._check_comes(one, level, at_level, at_root)
        return missing

    def _check_comes(
        self, save: Copy, level: Level, there: Collection[Copy], here: Collection[Copy]
    ) -> None:
        """Raises CommitError where a level never gets what was saved last."""
        what, newer, where = _text(save), None, level.url
        if save.target not in {one.target for one in there}:
            newer = _newer(save, there)
        if newer is None and not meets(save.step, level):
            # Beside what `every` takes the agent sends what is newest in the root, and nothing else.
            newer, where = _newer(save, here), str(self._root)
        if newer is None:
            return
        how = "" if save.directory else f": ckpt-core rm {self._root} --after {save.step}"
        raise CommitError(
            f"{what} was saved last, and does not go to {level.url}: {_text(newer)} is in {where}, of before "
            f"training went back, and a restart resumes from that. {what} is safe in {self._root}. To go on "
            f"from it, end the run and remove what is newer{how}",
            step=save.step,
            path=self._root,
        )


def _copies(saves: Mapping[int, str]) -> list[Copy]:
    return [Copy(step, attempt) for step, attempt in saves.items()]


def _newer(save: Copy, others: Collection[Copy]) -> Copy | None:
    """The newest of its kind, if that is newer than a save."""
    kind = save.directory is None
    newer = [one for one in others if one.step > save.step and (one.directory is None) == kind]
    return max(newer, key=lambda one: one.step, default=None)


def _text(save: Copy) -> str:
    return save.directory or f"step {save.step}"


def _is_missing(
    save: Copy, level: Level, seen: LevelStatus, there: Mapping[int, str], *, itself: bool
) -> bool:
    """Whether a level has neither this very save nor, unless it has to be `itself`, a newer one."""
    if save.directory is not None:
        return not level.parity and seen.files.get(save.directory) != save.attempt
    if itself or save.step in there:
        return there.get(save.step) != save.attempt
    return save.step > max(there, default=-1)
