"""`verify`: every byte against its checksum, with a progress bar on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.cli.steps import find_step
from ckpt_core.cli.text import console, count_text, note, say, say_json, shorten, size_text
from ckpt_core.errors import CkptError, NotCommitted
from ckpt_core.layout import RankManifest, parse_shard_name, rank_manifest_name
from ckpt_core.restore import BadChunk, StepReport, verify
from ckpt_core.store import committed_steps, step_path
from ckpt_core.types import parse_step_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_core.cli.app import VerifyRequest

    Show = Callable[[str, int, int], None]

_LEAVES_SHOWN = 8


def verify_path(request: VerifyRequest) -> bool:
    """Print what is wrong; False when anything is.

    Raises:
        NotCommitted: there is no step.
        RestoreError: the root cannot be listed.
    """
    reports: list[StepReport] = []
    with _progress() as show:
        for number, path in enumerate(paths := _steps(request.path, request.step), 1):
            label = f"{path.name} ({number}/{len(paths)})"
            reports += _verify_one(path, label, show, alone=len(paths) == 1)
    ok = all(report.ok for report in reports)
    if request.json:
        say_json({"path": str(request.path), "ok": ok, "steps": [_json(r) for r in reports]})
    else:
        for report in reports:
            _say(report)
    return ok


def _steps(path: Path, step: int | None) -> list[Path]:
    if step is None and parse_step_dir(path.name) is None:
        steps = committed_steps(path)
        if steps:
            return [step_path(path, number) for number in steps]
    return [find_step(path, step)]


def _verify_one(path: Path, label: str, show: Show, *, alone: bool) -> Iterator[StepReport]:
    try:
        report = verify(path, progress=lambda done, total: show(label, done, total))
    except NotCommitted:
        if alone:
            raise
        report = None
    # A writer retires steps meanwhile: one that is gone was not damaged.
    if report is not None and (report.ok or path.is_dir() or alone):
        yield from report.steps
    else:
        note(f"{path.name} was retired meanwhile: left out")


@contextmanager
def _progress() -> Iterator[Show]:
    """A function that draws how far we are; it does nothing where there is no terminal."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda label, done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(label: str, done: int, total: int) -> None:
            if label not in tasks:
                for task in tasks.values():
                    progress.update(task, visible=False)
                tasks[label] = progress.add_task(label)
            progress.update(tasks[label], completed=done, total=total)

        yield show


# -- for people --------------------------------------------------------------------------------


def _say(report: StepReport) -> None:
    name = report.path.name if report.step is None else f"step {report.step}"
    checked = f"{size_text(report.checked_bytes)} checked"
    if report.unchecked_bytes:
        checked += f", {size_text(report.unchecked_bytes)} without checksum"
    if report.ok:
        say(f"{name}: ok, {checked}")
        return
    findings = len(report.bad_chunks) + len(report.problems)
    say(f"{name}: DAMAGED, {count_text(findings, 'finding')}, {checked}")
    for problem in report.problems:
        say(f"  {problem}")
    for bad, leaves in zip(report.bad_chunks, _leaves_hit(report), strict=True):
        end = bad.offset + bad.nbytes
        say(f"  {bad.file}: chunk {bad.index}, bytes {bad.offset}..{end}")
        say(f"    expected xxh3 {bad.expected}, got {bad.got}")
        if leaves:
            more = ", ..." if len(leaves) > _LEAVES_SHOWN else ""
            shown = ", ".join(shorten(leaf, 60) for leaf in leaves[:_LEAVES_SHOWN])
            say(f"    {count_text(len(leaves), 'leaf')} hit: {shown}{more}")
        elif leaves is not None:
            say("    no leaf hit: only the header or padding")


def _leaves_hit(report: StepReport) -> list[list[str] | None]:
    """Leaves with bytes in each bad chunk; None when the manifest cannot say."""
    manifests = {bad.file: _manifest(report.path, bad) for bad in report.bad_chunks}
    return [_hit(manifests[bad.file], bad) for bad in report.bad_chunks]


def _hit(manifest: RankManifest | None, bad: BadChunk) -> list[str] | None:
    if manifest is None:
        return None
    return [
        leaf.spec.name
        for leaf in manifest.leaves
        if manifest.files[leaf.file].name == bad.file
        and max(leaf.offset, bad.offset) < min(leaf.offset + leaf.nbytes, bad.offset + bad.nbytes)
    ]


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


def _json(report: StepReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "path": str(report.path),
        "ok": report.ok,
        "checked_bytes": report.checked_bytes,
        "unchecked_bytes": report.unchecked_bytes,
        "problems": list(report.problems),
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
