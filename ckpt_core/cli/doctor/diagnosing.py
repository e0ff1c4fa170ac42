"""All checks in order, and their answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpt_core.cli.doctor.deepspeed_config import check_config
from ckpt_core.cli.doctor.environment import check_environment, framework_names
from ckpt_core.cli.doctor.finding import Finding, Level
from ckpt_core.cli.doctor.machine import check_machine
from ckpt_core.cli.doctor.root import check_root
from ckpt_core.cli.doctor.scripts import read_scripts
from ckpt_core.cli.doctor.selection import check_selection
from ckpt_core.cli.doctor.trials import trials
from ckpt_core.cli.text import count_text, say, say_json, say_rich, table

if TYPE_CHECKING:
    from ckpt_core.cli.requests import DoctorRequest


def diagnose(request: DoctorRequest) -> bool:
    """Run every check and print what they found; False if there is a problem.

    Raises:
        ConfigError: a script is neither a file nor a directory with scripts.
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
    scripts = read_scripts(request.script) if request.script else None
    config = None if request.config is None else check_config(request.config)
    with trials(() if request.quick else framework_names()) as running:
        found = [] if request.root is None else check_root(request.root)
        if config is not None:
            found += config.findings
        found += check_selection(config, scripts)
        told = {name: trial.result() for name, trial in running.items()}
    wants_deepspeed = config is not None or scripts is not None
    return [
        *check_environment(told, wants_deepspeed=wants_deepspeed),
        *check_machine(told.get("torch")),
        *found,
    ]


def _print(findings: Sequence[Finding], counts: Counter[Level]) -> None:
    rows = [(finding.check, _level_text(finding.level), _text(finding)) for finding in findings]
    say_rich(table(("check", "result", "found"), rows))
    levels = [level for level in (Level.PROBLEM, Level.WARNING, Level.NOTE) if counts[level]]
    told = [count_text(counts[level], level.value) for level in levels]
    if not counts[Level.PROBLEM]:
        told.insert(0, "no problem")
    say(", ".join(told))


def _level_text(level: Level) -> str:
    return level.value.upper() if level is Level.PROBLEM else level.value


def _text(finding: Finding) -> str:
    return finding.found if finding.advice is None else f"{finding.found}; {finding.advice}"
