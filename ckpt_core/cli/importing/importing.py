"""`import`: the command; what was read is saved by a Checkpointer, as a run saves it, and verified."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.cli.importing.choosing import AUTO, chosen
from ckpt_core.cli.importing.consent import Consent
from ckpt_core.cli.importing.source import Asked, NamedFiles, Source, Tree
from ckpt_core.cli.places import directory_of
from ckpt_core.cli.text import note, say, say_json, shorten
from ckpt_core.cli.tree import read_tree, walk
from ckpt_core.errors import ConfigError, CorruptCheckpoint, UntrustedData
from ckpt_core.observe import progress_bar
from ckpt_core.options import Options
from ckpt_core.restore import Report, read_manifests, verify
from ckpt_core.system.files import Files
from ckpt_core.units import size_text

if TYPE_CHECKING:
    from ckpt_core.checkpointer import Checkpointer
    from ckpt_core.cli.requests import ImportRequest
    from ckpt_core.save import SaveHandle

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _Imported:
    """What came of it: the directory, verified; and places that only `trusted=True` restores."""

    source: Source
    found: Tree | NamedFiles
    path: Path
    report: Report
    opaque: tuple[str, ...]


def import_source(request: ImportRequest) -> bool:
    """Import it and say so; always a success.

    Raises:
        ConfigError: it cannot be imported, its step is there, or the root has newer ones.
        UntrustedData, CorruptCheckpoint, RestoreError: it cannot be read, or somebody wrote to it meanwhile;
            nothing was published.
        RootBusy: a run writes to the root.
        PersistError, StagingError, CommitError: it could not be saved; nothing was published.
    """
    root = directory_of(request.root, command="ckpt-core import")
    asked = Asked(request.source, request.step, request.key, request.trusted, request.force)
    source = chosen(request.format, asked.path)
    if request.format == AUTO:
        note(f"{asked.path} is {source.what} ({source.name})")
    consent = Consent(asked.path, root)
    with redirect_stdout(sys.stderr):  # some frameworks talk when they are imported
        found = _read(source, asked)
    if isinstance(found, NamedFiles):
        consent.within = found.folder
    path = _written(found, root, consent, force=request.force)
    try:
        with progress_bar(shown=not request.no_progress, tell=note) as show:
            report = verify(path, progress=partial(show, f"verifying {path.name}"))
    except KeyboardInterrupt:  # and SIGTERM
        note(
            f"interrupted: step {found.step} is committed, and not verified: ckpt-core verify {path}"
        )
        raise
    if not report.ok:
        raise CorruptCheckpoint(f"{path} was saved, and is damaged: look at the disk", path=path)
    opaque = () if isinstance(found, NamedFiles) else _opaque(path)
    _tell(request, _Imported(source, found, path, report, opaque))
    return True


def _read(source: Source, asked: Asked) -> Tree | NamedFiles:
    try:
        return source.read(asked)
    except ImportError as exc:
        how = f": {source.install}" if source.install else ""
        raise ConfigError(
            f"{asked.path} is read by the libraries of its framework, and {exc.name or exc} is not "
            f"installed{how}",
            path=asked.path,
        ) from exc


def _written(found: Tree | NamedFiles, root: Path, consent: Consent, *, force: bool) -> Path:
    """Save it; the directory, committed."""
    from ckpt_core.checkpointer import Checkpointer

    # Nothing is retired: whose steps they are will say how many stay.
    with Checkpointer(root, Options(keep_last=None), coordination=consent) as ck:
        if not force:
            _check_free(found, ck)
        try:
            return _begun(found, ck).committed.result()
        except KeyboardInterrupt:  # and SIGTERM
            # Closing would wait for the save, and commit it: nobody waits for that any more.
            none = consent.withdraw()
            ck._abandon()
            came = (
                "nothing was imported"
                if none
                else f"step {found.step} may be in {root} all the same"
            )
            note(f"interrupted: {came}")
            raise


def _begun(found: Tree | NamedFiles, ck: Checkpointer) -> SaveHandle:
    if isinstance(found, Tree):
        return ck.save(found.step, found.tree)
    files = ck.begin_files(found.step, found.directory, pointer=found.pointer)
    try:
        for name in found.names:
            files.add(name, found.read(name))
    except BaseException as exc:
        files.abort(exc)
        raise
    return files.seal()


def _check_free(found: Tree | NamedFiles, ck: Checkpointer) -> None:
    """Raises ConfigError where something would be replaced, or would not be what a run goes on from."""
    if isinstance(found, NamedFiles):
        path = ck.root / found.directory
        if path.exists():
            raise ConfigError(f"{path} is there already: --force replaces it", path=path)
        if (ck.root / found.pointer).exists():
            raise ConfigError(
                f"{ck.root} has a newest tag already, and a run would go on from {found.directory} instead: "
                f"give a root of its own, or --force"
            )
        return
    steps = ck.steps()
    if found.step in steps:
        raise ConfigError(f"{ck.root} holds step {found.step} already: --force replaces it")
    if steps and steps[-1] > found.step:
        raise ConfigError(
            f"{ck.root} holds newer steps (newest {steps[-1]}), and a run would go on from those, not from "
            f"step {found.step}: give a root of its own, or --force"
        )


def _opaque(path: Path) -> tuple[str, ...]:
    """Places of the step that were pickled, since nothing else can hold them, and that may run code."""
    from ckpt_core.state import Skeleton

    (rank,) = read_manifests(path, files=Files()).ranks
    found = []
    for item in walk(read_tree(rank.skeleton)):
        if item.kind in ("opaque", "enum"):
            alone = Skeleton.from_json(
                {**rank.skeleton, "tree": item.value, "pools": []}, path=path
            )
            try:
                alone.unflatten({}, trusted=False)
            except UntrustedData:
                found.append(item.path)
    return tuple(found)


def _tell(request: ImportRequest, done: _Imported) -> None:
    (step,) = done.report.steps
    nbytes = step.checked_bytes + step.unchecked_bytes
    changed = done.found.changed if isinstance(done.found, Tree) else {}
    if request.json:
        say_json(
            {
                "source": str(request.source),
                "format": done.source.name,
                "root": request.root,
                "step": done.found.step,
                "path": str(done.path),
                "nbytes": nbytes,
                "changed": dict(changed),
                "trusted": list(done.opaque),
            }
        )
        return
    say(f"{done.path}: step {done.found.step}, {size_text(nbytes)}, committed and verified")
    for where, what in list(changed.items())[:_SHOWN]:
        note(f"changed: {shorten(where, 60)} ({what})")
    if done.opaque:
        shown = ", ".join(shorten(where, 60) for where in done.opaque[:_SHOWN])
        more = ", ..." if len(done.opaque) > _SHOWN else ""
        note(f"restore it with trusted=True: pickled objects at {shown}{more}")
