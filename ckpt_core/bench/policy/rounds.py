"""The order of a run of the suite `policy`, and what is noted of each round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ckpt_core.bench.machine import check_room, describe, work_folder
from ckpt_core.bench.policy import figures
from ckpt_core.bench.policy.conditions import ALONE, CONDITIONS, FIXED
from ckpt_core.bench.policy.processors import MEMORY
from ckpt_core.bench.policy.reaction import (
    compare,
    intervals_of,
    iterations_until,
    overheads_from,
    settled_overhead,
)
from ckpt_core.bench.policy.settings import PolicyMeasure, PolicySettings
from ckpt_core.bench.processes import Processes
from ckpt_core.bench.remote import Remote
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.bench.settings import plain

_WORKER = "ckpt_core.bench.policy.worker:JobWorker"
_MEMORY_STATES = 6
"""In sizes of the state: what trains with its gradients, staging memory of two saves, dirty pages."""

_DISK_STATES = 5
_PROCESS_BYTES = 500 * 2**20
_CALM = 1.5
"""By how much the interval may be longer than alone for the second job to begin."""

_CUT = "a block ended before its interval: it took too long"
Answer = dict[str, Any]


def run(
    settings: PolicySettings, *, notify: Callable[[str], None] = lambda message: None
) -> Report:
    """Measure everything that `settings` asks for; what is written is removed again.

    Args:
        settings: the run.
        notify: told what happens next, for a progress line.

    Raises:
        ConfigError: there is no room for the run.
    """
    fields = {**plain(settings), "load": dataclasses.asdict(settings.load), "leaves": 0}
    report = Report("policy", fields, describe(settings.root))
    report.ours = tuple(CONDITIONS)
    report.more["policy"] = {"decision": None, "conditions": {}}
    load_bytes = (settings.load.disk_threads + 1) * settings.load.file_bytes
    check_room(
        settings.root,
        disk_bytes=settings.state_bytes * _DISK_STATES + load_bytes,
        memory_bytes=settings.state_bytes * _MEMORY_STATES + 3 * _PROCESS_BYTES,
    )
    with work_folder(settings.root) as folder:
        for name in _names(settings):
            with _Jobs(settings, folder, report, notify) as jobs:
                jobs.measure(name)
    return report


def _names(settings: PolicySettings) -> list[str]:
    """The conditions that run; the first one is needed for whatever is asked."""
    if PolicyMeasure.OVERHEAD not in settings.measures:
        return [ALONE]
    return [name for name in CONDITIONS if name == ALONE or name in settings.contenders]


class _Jobs(Processes):
    """The one process that is at work. Close it, or use it in a `with` block."""

    def __init__(
        self,
        settings: PolicySettings,
        root: Path,
        report: Report,
        notify: Callable[[str], None],
    ) -> None:
        super().__init__(report, notify, seed=settings.seed, rounds=settings.rounds)
        self._settings = settings
        self._root = root

    def measure(self, name: str) -> None:
        """All rounds of one condition, and the check of what it has saved."""
        interval = self._fixed() if name == FIXED else None
        if name == FIXED and interval is None:
            self.report.entrants[name] = Entrant(reason=f"{ALONE} has found no interval")
            return
        self._start(name)
        measures = self._settings.measures
        if name == ALONE and PolicyMeasure.DECISION in measures:
            self._decide(name)
        if PolicyMeasure.OVERHEAD not in measures:
            return
        if self._open(name, interval) and self._settle(name) and self._all_rounds(name):
            self._check(name)

    def _decide(self, name: str) -> None:
        """How long a decision takes."""
        self.notify("the time of a decision")
        answer = self.ask(name, "decide", questions=self._settings.questions)
        self.report.more["policy"]["decision"] = answer

    def _fixed(self) -> int | None:
        """The interval that was usual alone."""
        found = self.report.stats(figures.INTERVAL).get(ALONE)
        return None if found is None else max(1, round(found.median))

    def _start(self, name: str) -> None:
        settings = self._settings
        self.report.entrants[name] = Entrant(fsyncs="yes")
        (self._root / name).mkdir()
        self._remotes[name] = Remote(
            name,
            self._root / name,
            timeout_s=settings.timeout_s,
            worker=_WORKER,
            environment={"OMP_NUM_THREADS": str(settings.threads), **MEMORY},
        )

    def _open(self, name: str, interval: int | None) -> bool:
        settings, report = self._settings, self.report
        condition = CONDITIONS[name]
        self.notify(f"{name}: starting")
        entrant = report.entrants[name]
        report.more["policy"]["conditions"][name] = {
            "title": condition.title,
            "fixed": interval,
            "trace": [],
            "rounds": [],
            "changes": [],
        }
        hello = self.ask(name, "hello")
        opened = self.ask(
            name,
            "open",
            size=dataclasses.asdict(settings.model),
            policy={"interval": interval, "max_overhead": settings.max_overhead},
            load=dataclasses.asdict(settings.load),
            threads=settings.threads,
            staging_bytes=settings.staging_bytes,
            timeout_s=settings.timeout_s,
        )
        if hello is None or opened is None:
            return False
        entrant.version = hello["version"]
        policy = f"every {interval} steps"
        if condition.adapts:
            policy = f"Auto(max_overhead={settings.max_overhead:g})"
        entrant.settings = f"{policy}, {condition.title}"
        report.settings.update(state_bytes=opened["state_bytes"], leaves=opened["leaves"])
        return True

    def _settle(self, name: str) -> bool:
        """Before the rounds; the second job is there from the beginning where it never begins anew."""
        condition, blocks = CONDITIONS[name], self._settings.blocks
        if condition.disturbed and not condition.adapts:
            self.ask(name, "disturb", on=True)
        answer = self.ask(name, "settle", saves=blocks.settle_saves, within_s=blocks.limit_s)
        if answer is None:
            return False
        self._trace(name, "settle", answer)
        return True

    def _all_rounds(self, name: str) -> bool:
        condition = CONDITIONS[name]
        changes = condition.disturbed and condition.adapts
        for _ in self.rounds(name):
            changed = self._change(name) if changes else None
            if changes and changed is None:
                return False
            answer = self._compare(name)
            if answer is None:
                return False
            if changed is not None:
                self._note_change(name, changed, compare(answer).base_s)
                self.ask(name, "disturb", on=False)
        if changes:
            self._note_settled(name)
        return True

    def _change(self, name: str) -> Answer | None:
        """The second job begins in the middle of the run."""
        blocks = self._settings.blocks
        usual = self._fixed()
        answer = self.ask(
            name,
            "change",
            below=round((usual or 1) * _CALM),
            quiet=blocks.quiet,
            least=blocks.change,
            within_s=blocks.limit_s,
        )
        if answer is not None:
            self._trace(name, "calm", answer["calm"])
            self._trace(name, "change", answer["change"])
        return answer

    def _compare(self, name: str) -> Answer | None:
        blocks = self._settings.blocks
        answer = self.ask(
            name,
            "compare",
            pairs=blocks.pairs,
            base=blocks.base,
            saving=blocks.saving,
            within_s=blocks.limit_s,
        )
        if answer is None:
            return None
        for pair in answer["pairs"]:
            for part in ("before", "saving", "drain"):
                self._trace(name, part, pair[part])
        self._trace(name, "after", answer["after"])
        self._note_compared(name, answer)
        return answer

    # -- notes -----------------------------------------------------------------------------------

    def _note_compared(self, name: str, answer: Answer) -> None:
        report, found = self.report, compare(answer)
        saving = [pair["saving"] for pair in answer["pairs"]]
        intervals = [interval for block in saving for interval in intervals_of(block)]
        told = None if None in answer["told"] else median(answer["told"])
        report.add(figures.OVERHEAD, name, found.overhead)
        report.add(figures.ITERATION, name, found.base_s)
        report.add(figures.COST, name, found.cost_s)
        report.add(figures.INTERVAL, name, median(intervals))
        if told is not None:
            report.add(figures.TOLD, name, told)
        if any(block["cut"] for block in saving):
            self._remark(name, _CUT)
        report.more["policy"]["conditions"][name]["rounds"].append(
            {
                "overhead": found.overhead,
                "told": told,
                "base_s": found.base_s,
                "cost_s": found.cost_s,
                "stall_s": sum(block["stall_s"] for block in saving) / found.saves,
                "iterations": found.iterations,
                "drained": sum(len(pair["drain"]["seconds"]) for pair in answer["pairs"]),
                "intervals": intervals,
            }
        )

    def _note_change(self, name: str, answer: Answer, base_s: float) -> None:
        block = answer["change"]
        overheads = overheads_from(block["seconds"], base_s)
        after = iterations_until(self._settings.max_overhead, overheads)
        if after is None:
            self._remark(name, f"a change was not met within {len(overheads)} iterations")
        # A bound from below is better than a value that is left out.
        self.report.add(figures.REACTION, name, len(overheads) if after is None else after)
        self.report.more["policy"]["conditions"][name]["changes"].append(
            {
                "after": after,
                "overheads": overheads,
                "saves": block["saves"],
                "intervals": block["intervals"],
                "calmed": len(answer["calm"]["seconds"]),
            }
        )

    def _note_settled(self, name: str) -> None:
        """Afterwards, when it is known what a save costs beside the second job."""
        conditions = self.report.more["policy"]["conditions"]
        rounds = [
            row for other in (FIXED, name) for row in conditions.get(other, {}).get("rounds", ())
        ]
        cost = fmean(row["cost_s"] / row["base_s"] for row in rounds)
        for change in conditions[name]["changes"]:
            settled = settled_overhead(change["saves"], len(change["overheads"]), cost)
            change["settled"] = settled
            self.report.add(figures.SETTLED, name, settled)

    def _remark(self, name: str, text: str) -> None:
        notes = self.report.entrants[name].notes
        if text not in notes:
            notes.append(text)

    def _trace(self, name: str, part: str, block: Answer) -> None:
        """Every iteration is kept, for the picture and for whoever doubts a figure."""
        if block["seconds"]:
            seconds = [round(value, 6) for value in block["seconds"]]
            row = {"part": part, **block, "seconds": seconds}
            self.report.more["policy"]["conditions"][name]["trace"].append(row)

    def _check(self, name: str) -> None:
        """The newest committed step is what training had."""
        answer = self.ask(name, "check")
        if answer is not None:
            entrant = self.report.entrants[name]
            entrant.restored = answer["live"] == answer["restored"]
            entrant.digest = answer["restored"]
