"""DeepSpeed's checkpoint engine, over ckpt_core.

    save_checkpoint:   create(info)  save(state, path)*  seal()  -> staged -> durable -> `latest` moves
    next step:         wait_staged()  before the model is updated
    load_checkpoint:   chosen and verified tag -> load(path)*

DeepSpeed's own commit is never asked for by a training engine: `is_decoupled` keeps it from writing `latest`
itself, which it does before the other ranks' files are there.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ckpt_core import Checkpointer, CkptError, ConfigError, FilesSave, SaveHandle
from ckpt_deepspeed.early import Early
from ckpt_deepspeed.mapping import Mappings
from ckpt_deepspeed.roots import ROOTS, is_trainers
from ckpt_deepspeed.settings import EngineSettings, Wait

_log = logging.getLogger("ckpt_deepspeed")

LATEST = "latest"
_OPTIMIZER = "optimizer"
_OPTIMIZERS = "optim_states.pt"
_REPLACED = ("*_states.pt",)
"""What DeepSpeed calls its files in a tag. A tokenizer or exported weights beside them stay."""
_MOST_CLONED_BYTES = 256 << 20
"""Of a rank. Clones need memory for as long as the save takes, perhaps on the device."""


@dataclass(slots=True)
class _Tag:
    """A tag that is being saved.

    Attributes:
        info: DeepSpeed's: tag, save_dir, save_latest.
        checkpointer: of save_dir; None for the tag that `save_16bit_model` names and does not write.
        files: None until the first file of this rank.
        given: the state of each file so far.
        problem: why it is given up; raised at the end of `save_checkpoint`.
        moves: it is the first of a new directory, and the ones before may be deleted behind it.
    """

    info: Any
    checkpointer: Checkpointer | None = None
    moves: bool = False
    files: FilesSave | None = None
    given: dict[str, Any] = field(default_factory=dict)
    problem: Exception | None = None

    def name_of(self, path: Any) -> str | None:
        """What a file of it is called in its directory, "." for that itself; None for what is not in it."""
        directory = os.path.normpath(os.path.join(self.info.save_dir, self.info.tag))
        path = os.path.normpath(path)
        if path == directory:
            return "."
        inside = path.startswith(directory + os.sep)
        return path[len(directory) + 1 :] if inside else None

    def give_up(self, raised: BaseException | None = None) -> None:
        """Nothing of it becomes visible; `raised` is what the caller is told. Idempotent."""
        if self.files is not None:
            self.files.abort(raised)


@dataclass(frozen=True, slots=True)
class Saving:
    """What is known of the `save_checkpoint` that is under way.

    Attributes:
        step: that is saved.
        client_state: as the user passed it.
        updated: parameters that the optimizer's step changes, and nothing else.
        is_restless: whatever is saved may change without the barrier.
        per_node: each node has a directory of its own of this name.
        moves: a program may delete what it has elsewhere once this save has returned; all ranks say so.
    """

    step: int
    client_state: Any
    updated: Sequence[torch.Tensor]
    is_restless: bool
    per_node: bool
    moves: bool


class CkptCoreEngine(CheckpointEngine):  # type: ignore[misc]
    """Made by DeepSpeed for each engine; used on the training thread.

    Args:
        settings: from the configuration.

    Attributes:
        newest: the save that was begun last, if one was.
        mappings: how files are loaded.
    """

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self.name = "ckpt_core"
        self.settings = settings
        self.newest: SaveHandle | None = None
        self._tag: _Tag | None = None
        self._saving: Saving | None = None
        self._place: str | None = None
        self._peeks = False
        self.mappings = Mappings()

    # -- what DeepSpeed calls ---------------------------------------------------------------------

    def create(self, info: Any) -> None:
        """A tag begins; called on every rank. One that an error left open is given up.

        Raises:
            CkptError: the directory cannot be opened for writing on some rank.
        """
        self._abort()
        tag = self._tag = _Tag(info)
        if self._saving is None:
            return
        moves = self._saving.moves
        problem: CkptError | None = None
        try:
            ROOTS.trim(info.save_dir, moves=moves)
        except CkptError as exc:
            problem = exc
        tag.moves = moves and not ROOTS.has(info.save_dir)
        # Here, since the ranks do it together: a rank without a file of its own never calls `save`.
        tag.checkpointer = ROOTS.of(
            info.save_dir, self.settings.options, per_node=self._saving.per_node
        )
        if problem is not None:
            self.declines()
            tag.problem = problem

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a directory, except those of a save: that of the tag appears when it is complete.

        One inside a directory that is saved to is made once that is done, which may be of that name.

        A save_dir that cannot be made is for `create` to tell, on all ranks: only one of them is here, and
        the others would wait for it.
        """
        tag = self._tag
        if tag is None and self._saving is not None:
            return
        if tag is None or tag.name_of(path) is None:
            if self._saving is None:
                ROOTS.wait_ended(Path(path).parent)
            super().makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: Any) -> None:
        """Take one file on; `saving` copies what may change early, and starts the copy of the rest.

        Behind the barriers at which DeepSpeed lets the ranks wait for one another: until then none waits for
        another one's pickling, nor any collective for threads of ours. Nobody changes the state meanwhile,
        as training is in `save_checkpoint`. A file outside of a tag (`save_16bit_model`) is written before
        this returns.
        """
        tag = self._tag
        name = None if tag is None or self._saving is None else tag.name_of(path)
        if tag is None or name is None:
            _write_alone(state_dict, Path(path))
            return
        tag.given[name] = state_dict
        if tag.problem is None:
            try:
                self._files(tag)
            except Exception as exc:
                tag.problem = exc

    def load(self, path: Any, map_location: Any = None) -> Any:
        """What a file holds; the tag has been verified by then. While `peeking`, tensors are not read."""
        if self._peeks and zipfile.is_zipfile(path):
            return torch.load(path, map_location=map_location, weights_only=False, mmap=True)
        return self.mappings.load(path, map_location)

    @contextmanager
    def peeking(self) -> Iterator[None]:
        """Within it, nobody reads the tensors of what is loaded."""
        self._peeks = True
        try:
            yield
        finally:
            self._peeks = False

    def commit(self, info: Any) -> bool:
        """Called by `save_16bit_model` alone, whose file `save` has written."""
        self._abort()
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """As in the base class."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """DeepSpeed shall neither commit nor write `latest`, and call `cleanup`."""
        return True

    def get_commit_info(self) -> None:
        """Called before each update: nothing to commit, but the barrier."""
        ROOTS.wait_staged()

    def preserves_storage_sharing(self) -> bool:
        """No: views are cut to size as they are written, so DeepSpeed need not clone them."""
        return False

    def cleanup(self) -> None:
        """The training engine is destroyed: finish what is in flight.

        Raises:
            CkptError: a save failed and was not reported yet.
        """
        self._abort()
        ROOTS.wait()

    # -- what the wrapped save_checkpoint calls ---------------------------------------------------

    def saving(self, known: Saving, act: Callable[[], Any]) -> Any:
        """Run DeepSpeed's `save_checkpoint`: what it saves is sealed, or given up if it raises.

        No context manager: an interrupt at its edges would leave the save open.

        Args:
            act: that call.

        Returns:
            What it returns.

        Raises:
            ConfigError: something cannot be saved.
            CkptError: an earlier save failed in the background, and this is the first to say so; or, with
                wait="persisted", why the tag is not durable.
        """
        try:
            self._saving = known
            result = act()
            tag = self._tag
            handle = self.seal()
        except BaseException as exc:
            try:
                self._abort(exc)
            except BaseException:
                # A second interrupt: what it cut short is done now. A third leaves it to the next save.
                self._abort(exc)
                raise
            raise
        finally:
            self._saving = None
        assert tag is not None and tag.checkpointer is not None
        if self.settings.wait is Wait.PERSISTED or tag.moves:
            _be_durable(handle, tag.checkpointer)
        return result

    def declines(self) -> bool:
        """See to it that giving up the tag tells the other ranks; False where they know, or none is open.

        An error of `create`, and of what is before it, is one of all ranks.
        """
        tag = self._tag
        if tag is None or tag.checkpointer is None:
            return False
        with suppress(CkptError):
            self._files(tag)  # only what is begun is declined
        return True

    def seal(self) -> SaveHandle:
        """All files of this rank have been given; a rank that has none takes part in the commit too.

        Returns once all is copied that could change before the barrier.

        Raises:
            ConfigError: something cannot be saved.
            CkptError: the save could not be begun, or what could change not be copied within `timeout`.
        """
        tag = self._tag
        assert tag is not None and self._saving is not None, "seal() follows create()"
        assert tag.checkpointer is not None
        if tag.problem is not None:
            raise tag.problem
        files, early = self._files(tag), self._early(tag.given)
        files.add_all(tag.given, eager=early or False)
        self.newest = files.seal()
        # Order matters: until it is sealed, an interrupt is to give it up.
        self._tag = None
        ROOTS.saved(tag.info.save_dir, self.newest)
        self.at(tag.info.save_dir)
        if early is None:
            names = None if self._saving.is_restless else _of_models(tag.given)
            tag.checkpointer.wait_staged(names)
        return self.newest

    # -- inside -----------------------------------------------------------------------------------

    def at(self, place: str | os.PathLike[str]) -> None:
        """This engine has saved to a directory, or loaded from it."""
        self._place = os.path.realpath(place)

    def moves_to(self, save_dir: str | os.PathLike[str]) -> bool:
        """Whether a program may delete what it has elsewhere once this save has returned: Trainer does."""
        place = os.path.realpath(save_dir)
        if self._place is None:
            return is_trainers(place)
        return place != self._place

    def _early(self, given: Mapping[str, Any]) -> Early | None:
        """What is cloned; None where that is too much, or not all: then training waits for its copy."""
        assert self._saving is not None
        if self._saving.is_restless:
            return None
        held = [
            {key: value for key, value in given[name].items() if key != _OPTIMIZER}
            if isinstance(given[name], Mapping)
            else given[name]
            for name in _of_models(given)
        ]
        early = Early([self._saving.client_state, *held], but=self._saving.updated)
        return early if early.nbytes <= _MOST_CLONED_BYTES else None

    def _files(self, tag: _Tag) -> FilesSave:
        assert tag.checkpointer is not None and self._saving is not None
        if tag.files is None:
            pointer = LATEST if tag.info.save_latest else None
            tag.files = tag.checkpointer.begin_files(
                self._saving.step, tag.info.tag, pointer=pointer, replaces=_REPLACED
            )
        return tag.files

    def _abort(self, raised: BaseException | None = None) -> None:
        if self._tag is not None:
            self._tag.give_up(raised)
            # Order matters: interrupted, the next call finds it.
            self._tag = None


def engine_of(config: Mapping[str, Any]) -> CkptCoreEngine:
    """The engine of a section `checkpoint_engine`.

    Raises:
        ConfigError: a setting is wrong.
    """
    return CkptCoreEngine(EngineSettings.of(config))


def _of_models(names: Iterable[str]) -> list[str]:
    """The files that hold more than an optimizer's state."""
    return [name for name in names if not name.endswith(_OPTIMIZERS)]


def _be_durable(handle: SaveHandle, checkpointer: Checkpointer) -> None:
    try:
        handle.committed.result()
    except CkptError:
        # It is told here. The next save would tell it once more, and save nothing.
        with suppress(CkptError):
            checkpointer.wait()
        raise


def _write_alone(state_dict: Any, path: Path) -> None:
    """As stock DeepSpeed does: one file, at once."""
    if path.is_dir():
        raise ConfigError(f"save_filename={path.name!r} is a directory: name a file")
    torch.save(state_dict, path)
