"""DeepSpeed's part of `ckpt-core doctor`: would a job of it be saved by this engine, or silently by its own?

    judge_job -> config, scripts    what files say, as the integration would read it (settings_code)
              -> selection          what they say together
              -> builds             what a build of its extensions left on this machine

Idea: DeepSpeed ignores a key that it does not know, so what fails silently is looked for in the files that a
job is made of. They are parsed and never run, and DeepSpeed need not be installed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt_core.cli.doctor import Finding, Framework, warning
from ckpt_deepspeed_tools.doctor.builds import check_builds
from ckpt_deepspeed_tools.doctor.config import check_config
from ckpt_deepspeed_tools.doctor.scripts import read_scripts
from ckpt_deepspeed_tools.doctor.selection import check_selection

__all__ = ["FRAMEWORK"]


def _judge_job(config: Path | None, scripts: Sequence[Path]) -> list[Finding]:
    read = read_scripts(scripts) if scripts else None
    report = None if config is None else check_config(config)
    found = [] if report is None else list(report.findings)
    found += check_selection(report, read)
    # Not of scripts in which nothing is DeepSpeed's.
    return [*found, *(check_builds() if found else [])]


def _absent(asked: bool) -> Finding | None:
    advice = "run the command where the job runs, too"
    return warning("deepspeed", "not installed here", advice) if asked else None


FRAMEWORK = Framework(
    name="deepspeed",
    needs="ckpt_deepspeed",
    install="pip install 'ckpt-core[deepspeed]'",
    place=2,
    program="import ckpt_deepspeed",
    absent=_absent,
    judge_job=_judge_job,
)
