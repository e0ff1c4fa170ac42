"""`verify`: every byte against its checksum, with a progress bar on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_core.cli.at_levels import url_of_level
from ckpt_core.cli.places import directory_of, seen
from ckpt_core.cli.same_files import SameFiles
from ckpt_core.cli.steps import elsewhere_text, find_step, held_text
from ckpt_core.cli.text import note, say, say_json, say_wrong, shorten
from ckpt_core.errors import CkptError, NotCommitted, RestoreError
from ckpt_core.layout import RankManifest, parse_shard_name, rank_manifest_name
from ckpt_core.observe import progress_bar
from ckpt_core.restore import BadChunk, KnownFiles, StepReport, verify
from ckpt_core.store import committed_steps, step_path
from ckpt_core.types import parse_step_dir
from ckpt_core.units import count_text, size_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import VerifyRequest

_LEAVES_SHOWN = 8
_STEPS_SHOWN = 12


def verify_path(request: VerifyRequest) -> bool:
    """Print what is wrong; False when anything is.

    Raises:
        ConfigError: the root has no such level.
        NotCommitted: there is no step.
        RestoreError: the root cannot be listed, or the store cannot be read; or, once all is told, nothing
            is wrong with what this user may read, and that is not all.
    """
    place = request.path
    if request.level is not None:
        root = directory_of(place, command="ckpt-core verify --level")
        place = url_of_level(root, request.level)
    reports: list[StepReport] = []
    retired: list[int | None] = []
    known: KnownFiles = {}
    with progress_bar(shown=not request.no_progress, tell=note) as show, seen(place) as there:
        paths, is_root = _steps(there.path, request.step)
        if len(paths) > 1:
            there.outline()
        for number, path in enumerate(paths, 1):
            label = f"{path.name} ({number}/{len(paths)})"
            try:
                step = there.ready(path)
                told = partial(show, label)
                found = verify(step, progress=told, files=there.files, known=known)
                there.check(None if found.ok else step)
                reports += found.steps
            except NotCommitted:
                if not is_root:
                    raise
                # The writer goes on: a step that is gone was not damaged.
                retired.append(parse_step_dir(path.name))
                note(f"{path.name} was retired meanwhile: left out")
    ok, same = all(report.ok for report in reports), SameFiles()
    if request.json:
        steps = [_json(report, same) for report in reports]
        say_json({"path": place, "ok": ok, "steps": steps, "retired": retired})
    else:
        for report in reports:
            _say(report, same)
    _check_read(reports)
    return ok


def _check_read(reports: Sequence[StepReport]) -> None:
    unread = [_name(report) for report in reports if report.is_unread]
    if unread and all(report.ok or report.is_unread for report in reports):
        refuse_unread(_some(unread))


def refuse_unread(what: str) -> NoReturn:
    """The end of a command that has found nothing wrong, and may not read all. Raises RestoreError."""
    raise RestoreError(
        f"this user has no permission to read {what}: whether that is sound is not known. Run it as the owner"
    )


def _steps(path: Path, step: int | None) -> tuple[list[Path], bool]:
    """The directories to verify, and whether they are all steps of a root."""
    if step is None and parse_step_dir(path.name) is None:
        steps = committed_steps(path)
        if steps:
            return [step_path(path, number) for number in steps], True
    return [find_step(path, step)], False


# -- for people --------------------------------------------------------------------------------


def _name(report: StepReport) -> str:
    return report.path.name if report.step is None else f"step {report.step}"


def _say(report: StepReport, same: SameFiles) -> None:
    name = _name(report)
    checked = f"{size_text(report.checked_bytes)} checked"
    if report.unchecked_bytes:
        checked += f", {size_text(report.unchecked_bytes)} without checksum"
    if report.world_size > 1:
        checked += f", {held_text(report.ranks, report.world_size)}"
    if report.ok:
        say(f"{name}: ok, {checked}")
        _say_elsewhere(report)
        return
    findings = len(report.bad_chunks) + len(report.problems)
    state = "NOT READ" if report.is_unread else "DAMAGED"
    say_wrong(f"{name}: {state}, {count_text(findings, 'finding')}, {checked}")
    for problem in report.problems:
        say(f"  {problem}")
    for bad, leaves in zip(report.bad_chunks, _leaves_hit(report), strict=True):
        end = bad.offset + bad.nbytes
        say(f"  {bad.file}: chunk {bad.index}, bytes {bad.offset}..{end}")
        say(f"    expected xxh3 {bad.expected}, got {bad.got}")
        if leaves:
            say(f"    {count_text(len(leaves), 'leaf')} hit: {_some(leaves)}")
        elif leaves is not None:
            say("    no leaf hit: only the header or padding")
    for file, steps in _shared(report, same).items():
        say(f"  {file} is one file with that of {_numbers(steps)}")
    _say_elsewhere(report)


def _numbers(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_STEPS_SHOWN]))
    if len(steps) > _STEPS_SHOWN:
        return f"{count_text(len(steps), 'step')}: {shown}, ..."
    return f"{'step' if len(steps) == 1 else 'steps'} {shown}"


def _shared(report: StepReport, same: SameFiles) -> dict[str, list[int]]:
    """Damaged files that other steps have too, and which."""
    files = dict.fromkeys(bad.file for bad in report.bad_chunks)
    found = {file: same.steps_with(report.path / file) for file in files}
    return {file: steps for file, steps in found.items() if steps}


def _say_elsewhere(report: StepReport) -> None:
    if not report.is_partial:
        return
    others = elsewhere_text(report.ranks, report.world_size)
    say(f"  the root of one node: whether what {others} wrote is sound, only other roots can tell")
    if report.elsewhere:
        shown = _some(report.elsewhere)
        say(f"  {count_text(len(report.elsewhere), 'leaf')} in part in other roots: {shown}")


def _some(leaves: Sequence[str]) -> str:
    more = ", ..." if len(leaves) > _LEAVES_SHOWN else ""
    return ", ".join(shorten(leaf, 60) for leaf in leaves[:_LEAVES_SHOWN]) + more


def _leaves_hit(report: StepReport) -> list[list[str] | None]:
    """Leaves with bytes in each bad chunk; None when the manifest cannot say."""
    manifests = {bad.file: _manifest(report.path, bad) for bad in report.bad_chunks}
    found = [(bad, manifests[bad.file]) for bad in report.bad_chunks]
    return [None if manifest is None else bad.leaves_of(manifest) for bad, manifest in found]


def _manifest(step_dir: Path, bad: BadChunk) -> RankManifest | None:
    parsed = parse_shard_name(bad.file)
    if parsed is None:
        return None
    path = step_dir / rank_manifest_name(parsed[0])
    try:
        return RankManifest.decode(path.read_bytes(), path=path)
    except (OSError, CkptError):
        return None


# -- for programs ------------------------------------------------------------------------------


def _json(report: StepReport, same: SameFiles) -> dict[str, Any]:
    return {
        "step": report.step,
        "path": str(report.path),
        "ok": report.ok,
        "world_size": report.world_size if report.ranks else None,
        "ranks": list(report.ranks),
        "elsewhere": list(report.elsewhere),
        "checked_bytes": report.checked_bytes,
        "unchecked_bytes": report.unchecked_bytes,
        "problems": list(report.problems),
        "unread": list(report.unread),
        "shared": _shared(report, same),
        "bad_chunks": [
            _bad_json(bad, leaves)
            for bad, leaves in zip(report.bad_chunks, _leaves_hit(report), strict=True)
        ],
    }


def _bad_json(bad: BadChunk, leaves: Sequence[str] | None) -> dict[str, Any]:
    return {
        "file": bad.file,
        "index": bad.index,
        "offset": bad.offset,
        "nbytes": bad.nbytes,
        "expected": bad.expected,
        "got": bad.got,
        "leaves": None if leaves is None else list(leaves),
    }
