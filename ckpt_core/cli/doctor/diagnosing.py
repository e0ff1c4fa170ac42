"""All checks in order, and their answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpt_core.anywhere import local, url_of
from ckpt_core.cli.doctor.environment import TORCH, check_environment
from ckpt_core.cli.doctor.far_root import check_far_root
from ckpt_core.cli.doctor.finding import Finding, Level, problem
from ckpt_core.cli.doctor.framework import Framework, frameworks
from ckpt_core.cli.doctor.levels import check_levels
from ckpt_core.cli.doctor.machine import check_machine
from ckpt_core.cli.doctor.names import check_names
from ckpt_core.cli.doctor.peers import check_peers
from ckpt_core.cli.doctor.root import check_root
from ckpt_core.cli.doctor.trials import trials
from ckpt_core.cli.doctor.versions import is_there
from ckpt_core.cli.text import say, say_json, say_rich, table
from ckpt_core.errors import ConfigError
from ckpt_core.units import count_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import DoctorRequest


def diagnose(request: DoctorRequest) -> bool:
    """Run every check and print what they found; False if there is a problem.

    Raises:
        ConfigError: two roots are named, or one by a URL that cannot be; a script is neither a file nor a
            directory with scripts.
        OSError: the configuration, or a script, cannot be read.
    """
    findings = _examine(request)
    counts = Counter(finding.level for finding in findings)
    if request.json:
        answer = {
            f"{level}s": counts[level] for level in (Level.PROBLEM, Level.WARNING, Level.NOTE)
        }
        checks = [asdict(finding) for finding in findings]
        say_json({"ok": not counts[Level.PROBLEM], **answer, "checks": checks})
    else:
        _print(findings, counts)
    return not counts[Level.PROBLEM]


def _examine(request: DoctorRequest) -> list[Finding]:
    if request.place is not None and request.root is not None:
        raise ConfigError(f"{request.place} and --root {request.root}: name one root")
    place = request.place or request.root
    url = None if place is None else url_of(place)
    root = None if place is None or url is not None else local(place)
    known = frameworks()
    job = _job(request, known)
    programs = {one.name: one.program for one in (TORCH, *known) if is_there(one.name)}
    with trials({} if request.quick else programs) as running:
        found = [] if root is None else check_root(root)
        found += [] if url is None else check_far_root(url)
        found += check_peers(root)
        found += check_levels(root, request.level or [])
        told = {} if running is None else running.results()
    return [
        *check_environment(told, known, asked=_asks(request)),
        *check_machine(told.get("torch")),
        check_names(),
        *found,
        *job,
    ]


def _asks(request: DoctorRequest) -> bool:
    return request.config is not None or bool(request.script)


def _job(request: DoctorRequest, known: Sequence[Framework]) -> list[Finding]:
    """What the frameworks say about the files of a job."""
    judges = [one.judge_job for one in known if one.judge_job is not None]
    if not _asks(request):
        return []
    if not judges:
        text = "no integration is installed that could read this job's files"
        return [problem("config", text, "install ckpt-core again")]
    return [
        found for judge in judges for found in judge(request.config, tuple(request.script or ()))
    ]


def _print(findings: Sequence[Finding], counts: Counter[Level]) -> None:
    rows = [(finding.check, _level_text(finding.level), _text(finding)) for finding in findings]
    wrong = (_level_text(Level.PROBLEM),)
    say_rich(table(("check", "result", "found"), rows, wrong=wrong))
    levels = [level for level in (Level.PROBLEM, Level.WARNING, Level.NOTE) if counts[level]]
    told = [count_text(counts[level], level.value) for level in levels]
    if not counts[Level.PROBLEM]:
        told.insert(0, "no problem")
    say(", ".join(told))


def _level_text(level: Level) -> str:
    return level.value.upper() if level is Level.PROBLEM else level.value


def _text(finding: Finding) -> str:
    return finding.found if finding.advice is None else f"{finding.found}; {finding.advice}"
