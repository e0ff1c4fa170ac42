"""What a user can set, checked once and frozen. Explicit argument > environment > default."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from ckpt_core.errors import ConfigError
from ckpt_core.options.addresses import absolute, parse_metrics
from ckpt_core.options.level import Level, at_home, check_collapsed, parse_levels, scheme_of
from ckpt_core.options.presets import preset_fields
from ckpt_core.types import DirectIO, Mode, OnError
from ckpt_core.units import (
    ALIGN_BYTES,
    html_table,
    known_names,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_timeout,
)

ENV_PREFIX = "CKPT_CORE_"
_Kind = TypeVar("_Kind")
_SIZES = ("staging_bytes", "chunk_bytes", "eager_leaf_bytes")
_COUNTS = ("in_flight", "writers", "readers", "keep_last", "keep_every", "rebase_every")
_MODES: dict[str, type[StrEnum]] = {"mode": Mode, "direct_io": DirectIO, "on_error": OnError}
_FLAGS = ("checksum", "debug_barrier", "pipelined", "blocking", "progress", "share_unchanged")
_PLACES = ("levels", "events_file", "metrics")
_DURATIONS = ("timeout", "rebase_after")
_NONE_ALLOWED = frozenset(
    {"staging_bytes", "keep_last", "keep_every", "rebase_after", "events_file", "metrics"}
)


def _told_of_names(cls: type[_Kind]) -> type[_Kind]:
    """A name that is no option is a ConfigError, no TypeError of `__init__`.

    Around that and not in `__new__`, so that those who ask for the signature find the options.
    """
    init: Any = cls.__init__

    @functools.wraps(init)
    def checked(self: Any, *given: Any, **named: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]
        for name in named:
            if name not in known:
                raise ConfigError(f"{name} is not a setting: {known_names(name, known)}")
        init(self, *given, **named)

    setattr(cls, "__init__", checked)  # noqa: B010 - no type checker takes an assignment
    return cls


@_told_of_names
@dataclass(frozen=True, repr=False)
class Options:
    """Settings of a `Checkpointer`. Sizes take an int or text like "2GiB", durations a timedelta or seconds.

    Attributes:
        in_flight: checkpoints that may be started and not yet committed; one more `save` waits.
        staging_bytes: bound of host memory for staging, shared by all in-flight checkpoints. None:
            twice the state, at most a quarter of the free memory (of the control group, if that has
            a limit), which the ranks of a machine share.
        chunk_bytes: size of one staging chunk, of one write and of one checksum; rounded up to 4 KiB.
        writers: threads that write chunks.
        readers: threads that read chunks in `restore`.
        mode: HOST copies to staging chunks, DEVICE clones on the GPU first, DIRECT copies into the
            memory-mapped shard file. AUTO: DEVICE for leaves on a device, DIRECT on tmpfs in huge pages,
            else HOST.
        direct_io: O_DIRECT writes; AUTO falls back to buffered ones where the filesystem has none.
        checksum: xxh3 of each chunk, kept in the manifest.
        keep_last: newest committed steps to keep; None keeps all.
        keep_every: steps that are multiples of this are kept for ever; None keeps none of them.
        on_error: what the next `save` does about a save that failed in the background.
        timeout: longest time that any wait lasts, and longest life of one in-flight checkpoint.
        eager_leaf_bytes: leaves up to this size are copied inside `save`, since training may change
            them before the next barrier (BatchNorm buffers, counters, RNG states).
        debug_barrier: hash every leaf before and after staging, and fail the save of a step whose
            leaves changed meanwhile, naming them. Costs two passes over the state; without it a sample of
            the bytes is compared.
        pipelined: a chunk goes to the writers as soon as it is full (PCcheck 3.1). False: no writer begins
            before the whole snapshot is staged (CheckFreq's two phases); staging memory must then hold a
            whole shard. With DIRECT, copies into the mapped file do not wait.
        blocking: `save` and `seal` return once the step is committed on all ranks, or raise what failed
            it, whatever `on_error` says. False: both return at once.
        events_file: append every event to this file as a JSON line, and each barrier of training; None:
            do not. For `ckpt-core report` and `ckpt-core tune`. All ranks may name the same.
        metrics: tell Prometheus the figures of the run: a file whose name ends in .prom, which is replaced
            after each save (each rank has one, with its number in the name), or HOST:PORT to answer at, a
            port alone for 127.0.0.1 (each rank adds its number); None: do not.
        progress: `restore` shows how far it is, once it takes more than a second: a bar where standard error
            is a terminal, elsewhere a line in the log every few seconds. Of several ranks the first one does.
        share_unchanged: a file of leaves that have not changed is a link to that of an earlier step, and is
            not written again: for adapters, frozen encoders. Known by the bytes; see docs/unchanged.md.
        frozen: with `share_unchanged`, paths of the state (each with all below it) that never change: they
            are read at every tenth save only. One that has changed then fails that save.
        rebase_every: most steps that share one file; then it is written anew, so that damage to it harms no
            more of them.
        rebase_after: the same by time, since the file was written; None: by steps alone.
        levels: more roots, in their order, to which committed steps are taken behind training: `Level`s, or
            what makes one (mappings of its fields, URLs; in the environment JSON of that).
    """

    in_flight: int = 2
    staging_bytes: int | str | None = None
    chunk_bytes: int | str = "8MiB"
    writers: int = 8
    readers: int = 8
    mode: Mode | str = Mode.AUTO
    direct_io: DirectIO | str = DirectIO.AUTO
    checksum: bool = True
    keep_last: int | None = 2
    keep_every: int | None = None
    on_error: OnError | str = OnError.RAISE
    timeout: timedelta | float = timedelta(minutes=10)
    eager_leaf_bytes: int | str = "16KiB"
    debug_barrier: bool = False
    pipelined: bool = True
    blocking: bool = False
    events_file: str | os.PathLike[str] | None = None
    metrics: str | os.PathLike[str] | int | None = None
    progress: bool = True
    share_unchanged: bool = False
    frozen: Sequence[str] = ()
    rebase_every: int = 20
    rebase_after: timedelta | float | None = None
    levels: Sequence[Level | Mapping[str, Any] | str] = ()

    def __repr__(self) -> str:
        """What is set, and not what is left as it was."""
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        changed = [
            f"{name}={value!r}" for name, value in fields if value != getattr(_plain(), name)
        ]
        return f"Options({', '.join(changed)})"

    def _repr_html_(self) -> str:
        """For notebooks: all of them."""
        fields = dataclasses.fields(self)
        return html_table("Options", {field.name: getattr(self, field.name) for field in fields})

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in _NONE_ALLOWED:
                continue
            object.__setattr__(self, field.name, _checked(field.name, value))
        self._check_sharing()
        object.__setattr__(self, "chunk_bytes", -(-self.chunk_size // ALIGN_BYTES) * ALIGN_BYTES)

    def _check_sharing(self) -> None:
        if not self.share_unchanged:
            for name in ("frozen", "rebase_after"):
                if value := getattr(self, name):
                    raise ConfigError(
                        f"{name}={value!r} needs share_unchanged=True: without it every save writes all"
                    )
            return
        if not self.pipelined or self.mode is Mode.DIRECT:
            field = "mode='direct'" if self.pipelined else "pipelined=False"
            raise ConfigError(
                f"share_unchanged=True and {field} exclude each other: what is shared is not copied before "
                f"it is known to be the same; leave one of them out"
            )

    @property
    def chunk_size(self) -> int:
        """`chunk_bytes` in bytes."""
        return parse_bytes(self.chunk_bytes, field="chunk_bytes")

    @property
    def timeout_s(self) -> float:
        """`timeout` in seconds."""
        return parse_duration(self.timeout, field="timeout").total_seconds()

    @property
    def rebase_after_s(self) -> float | None:
        """`rebase_after` in seconds."""
        after = self.rebase_after
        return (
            None if after is None else parse_duration(after, field="rebase_after").total_seconds()
        )

    @property
    def further(self) -> tuple[Level, ...]:
        """`levels`, each as a `Level`."""
        return parse_levels(self.levels)

    @property
    def metrics_place(self) -> str | None:
        """`metrics` as an absolute path that ends in .prom, or as `HOST:PORT`."""
        return None if self.metrics is None else parse_metrics(self.metrics)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **explicit: Any) -> Options:
        """Options from `CKPT_CORE_<FIELD>` variables; keyword arguments win over them.

        Nothing but this and `or_places_from_env` takes settings from such variables. "none" stands for None.

        Raises:
            ConfigError: a variable with our prefix names no field, or its value does not parse.
        """
        environ = os.environ if environ is None else environ
        names = {field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        keys: dict[str, str] = {}
        for key, text in environ.items():
            if not key.startswith(ENV_PREFIX):
                continue
            name = key.removeprefix(ENV_PREFIX).lower()
            if name not in names:
                known = [ENV_PREFIX + known.upper() for known in names]
                raise ConfigError(f"{key} is not a setting: {known_names(key, known)}")
            values[name], keys[name] = _from_text(name, text, key), key
        try:
            return cls(**(values | explicit))
        except ConfigError as exc:
            for name in values.keys() - explicit.keys():
                if cls._is_wrong(name, values[name], str(exc)):
                    raise ConfigError(f"{keys[name]}: {exc}") from None
            raise

    @classmethod
    def _is_wrong(cls, name: str, value: Any, text: str) -> bool:
        """Whether a setting alone is what an error is about."""
        try:
            cls(**{name: value})
        except ConfigError as exc:
            return str(exc) == text
        return False

    @staticmethod
    def checked_root(root: object) -> Path:
        """A root as an absolute path: for integrations, which are given one long before they open it.

        Raises:
            ConfigError: it is no path, or empty, or a URL.
        """
        return checked_root(root)

    def or_places_from_env(self, environ: Mapping[str, str] | None = None) -> Options:
        """These settings, with the `levels`, `events_file` and `metrics` of the environment that they lack.

        Called by integrations, which otherwise take nothing from the environment: those are what somebody
        who starts a job knows, and not who has written it.

        Raises:
            ConfigError: a variable does not parse.
        """
        environ = os.environ if environ is None else environ
        lacking = [f"{ENV_PREFIX}{name.upper()}" for name in _PLACES if not getattr(self, name)]
        found = Options.from_env({name: environ[name] for name in lacking if name in environ})
        places = {name: getattr(found, name) for name in _PLACES}
        return dataclasses.replace(self, **{name: at for name, at in places.items() if at})

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Options:
        """Settings that make this engine work as a published strategy does; `changes` win over them.

        Args:
            name: a key of `ckpt_core.options.presets.PRESETS`: what each imitates, and what it cannot.

        Raises:
            ConfigError: no preset has this name, or a change names no field or has a wrong value.
        """
        return cls(**(preset_fields(name) | changes))


@functools.cache
def _plain() -> Options:
    return Options()


def _checked(name: str, value: Any) -> Any:
    if name in _SIZES:
        size = parse_bytes(value, field=name)
        if size == 0 and name != "eager_leaf_bytes":
            raise ConfigError(f"{name}={value!r} must be above zero")
        return size
    if name in _COUNTS:
        return parse_count(value, field=name)
    if name in _MODES:
        try:
            return _MODES[name](value)
        except ValueError as exc:
            known = ", ".join(repr(member.value) for member in _MODES[name])
            raise ConfigError(f"{name}={value!r} is unknown: choose one of {known}") from exc
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be True or False")
        return value
    if name == "levels":
        return parse_levels(value)
    if name == "metrics":
        return parse_metrics(value)
    if name == "frozen":
        return _paths(value)
    if name == "events_file":
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise ConfigError(f"events_file={value!r} is not a path: name a file, or None")
        return absolute(os.fspath(value))
    assert name in _DURATIONS, name
    parse = parse_timeout if name == "timeout" else parse_duration
    return parse(value, field=name)


def _paths(value: Any) -> tuple[str, ...]:
    given = isinstance(value, Sequence) and not isinstance(value, str)
    paths = tuple(value) if given else ()
    if not given or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(
            f"frozen={value!r} must be a list of paths of the state, such as ['model.base']"
        )
    return paths


def _from_text(name: str, text: str, key: str) -> Any:
    text = text.strip()
    if text.lower() == "none" and name in _NONE_ALLOWED:
        return None
    if name in _FLAGS:
        flag = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in flag:
            raise ConfigError(f"{key}={text!r} is neither true nor false")
        return flag[text.lower()]
    if name == "frozen":
        return tuple([path.strip() for path in text.split(",") if path.strip()])
    if name in _COUNTS or name in _DURATIONS:
        try:
            return int(text) if name in _COUNTS else float(text)
        except ValueError as exc:
            raise ConfigError(f"{key}={text!r} is not a number") from exc
    return text


def checked_options(options: object, levels: object = None) -> Options:
    """`options`, or the defaults for None, with these levels; ConfigError for anything else."""
    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise ConfigError(f"options={options!r} is no Options: pass ckpt_core.Options(...)")
    if levels is None:
        return options
    if options.levels:
        raise ConfigError("levels are given twice, as an argument and in options: give them once")
    return dataclasses.replace(options, levels=parse_levels(levels))


def checked_root(root: object) -> Path:
    """`root` as an absolute path, since the loop may change its working directory later.

    Raises:
        ConfigError: it is no path, or empty, or a URL.
    """
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise ConfigError(f"root={root!r} is not a path: give the directory for the checkpoints")
    if scheme_of(root) is not None:
        raise ConfigError(
            f"root={os.fspath(root)!r} is a URL: the first level is a directory. Name one here, and take its "
            f"steps there with levels=[Level(...)]"
        )
    text = os.fsdecode(root)
    if "\0" in text:
        raise ConfigError(f"root={text!r} has a null character, and no path has: leave it out")
    check_collapsed(text, "root")
    return Path(at_home(text))
