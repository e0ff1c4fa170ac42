"""Every error that ckpt_core raises, in one tree.

    CkptError
    |-- ConfigError (ValueError)        the caller's input: names the field, the value and what to do
    |-- StagingError                    a snapshot could not be copied out of the way of training
    |   `-- BarrierError                a leaf changed while it was being staged (debug_barrier=True)
    |-- PersistError                    bytes could not be made durable
    |-- CommitError                     a step could not be published; `.failures` maps rank -> error
    |-- RootBusy                        another live process holds the root for writing
    |-- CoordinationTimeout (TimeoutError)
    `-- RestoreError
        |-- NotCommitted                the step that was asked for does not exist
        |-- StateMismatch               the checkpoint does not fit the live state; lists every difference
        |-- CorruptCheckpoint           bytes are not what the manifest says; `.path .expected .got`
        |-- UnknownFormat               written by a newer format; `.version`
        `-- UntrustedData               holds objects that only trusted=True may load; `.type_name`

Each carries `step`, `rank` and `path` where it has them. A failed save never harms a committed step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class CkptError(Exception):
    """Base of every error raised by ckpt_core."""

    nowhere = False
    """The ranks have agreed that no root holds the step and none ever will, so that its files may go."""

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        path: str | Path | None = None,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank
        self.path = Path(path) if isinstance(path, str) else path

    def __reduce__(self) -> tuple[object, ...]:
        # By default the class is called with the message alone, and some ask for more: then a pool, whose
        # worker has raised one, would wait for ever.
        return _remade, (type(self), self.args), self.__dict__


def _remade(cls: type[CkptError], args: tuple[object, ...]) -> CkptError:
    """An error as it was pickled or copied, but for its attributes."""
    error = cls.__new__(cls)
    error.args = args
    return error


class ConfigError(CkptError, ValueError):
    """The caller's input is wrong; nothing was changed."""


class StagingError(CkptError):
    """The snapshot was not taken; earlier steps are untouched and training may go on."""


class BarrierError(StagingError):
    """A leaf changed between `save` and the end of its copy: a `wait_staged` is missing."""


class PersistError(CkptError):
    """Bytes did not become durable; this attempt is given up, earlier steps are untouched."""


class CommitError(CkptError):
    """The step was not published; earlier steps are untouched."""

    def __init__(
        self,
        message: str,
        *,
        failures: Mapping[int, BaseException] | None = None,
        step: int | None = None,
        rank: int | None = None,
        path: str | Path | None = None,
    ) -> None:
        super().__init__(message, step=step, rank=rank, path=path)
        self.failures: dict[int, BaseException] = dict(failures or {})


class RootBusy(CkptError):
    """Another live process (or another Checkpointer of this one) writes to this root."""


class CoordinationTimeout(CkptError, TimeoutError):
    """The other ranks did not answer before the deadline."""


class RestoreError(CkptError):
    """The state could not be restored."""


class NotCommitted(RestoreError):
    """The step that was asked for is not a committed step of this root."""


class StateMismatch(RestoreError):
    """The checkpoint and the live state differ in names, shapes or dtypes; `.problems` lists all."""

    def __init__(
        self,
        message: str,
        *,
        problems: list[str],
        step: int | None = None,
        path: Path | None = None,
    ) -> None:
        super().__init__(message, step=step, path=path)
        self.problems = problems


class CorruptCheckpoint(RestoreError):
    """Bytes on storage are not the bytes that were committed."""

    def __init__(
        self,
        message: str,
        *,
        path: str | Path,
        expected: str = "",
        got: str = "",
        step: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, step=step, rank=rank, path=path)
        self.expected = expected
        self.got = got


class UnknownFormat(RestoreError):
    """The checkpoint was written in a format version that this release does not know."""

    def __init__(self, message: str, *, version: object, path: str | Path | None = None) -> None:
        super().__init__(message, path=path)
        self.version = version


class UntrustedData(RestoreError):
    """The checkpoint holds an object that could run code; only `trusted=True` loads it."""

    def __init__(self, message: str, *, type_name: str, path: str | Path | None = None) -> None:
        super().__init__(message, path=path)
        self.type_name = type_name


class RestoreWarning(UserWarning):
    """A step was passed over for an older one or had to be brought anew, a further level is away, or values
    of other ranks or devices are put back; the text says which and why."""
