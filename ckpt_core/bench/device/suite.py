"""The suite `device`: the order of a run, and what is noted of each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.device import figures
from ckpt_core.bench.device.settings import (
    ALL_LEAVES,
    LARGE,
    MEASURED,
    NAMES,
    DeviceMeasure,
    DeviceSettings,
    Leaves,
)
from ckpt_core.bench.machine import check_room
from ckpt_core.bench.results import Entrant, Figure
from ckpt_core.bench.run import Run
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.tables import cell, unit_name
from ckpt_core.bench.team import Launcher
from ckpt_core.errors import ConfigError

_WORKER = "ckpt_core.bench.device.worker"
_PROCESS_BYTES = 2**31
_MEMORY_STATES = 2
_LINK_PART = 0.8
_READ_TURNS = 2
"""Each has thousands of reads, and takes a whole save."""

Answer = dict[str, Any]


def measure(run: Run[DeviceSettings]) -> None:
    """Bits, copies, and a training beside saves; each row is told as soon as it is known.

    Raises:
        ConfigError: the device cannot be used, or there is no room; nothing was written.
    """
    settings, report = run.settings, run.report
    report.ours = tuple(name for name in NAMES if name.startswith(OURS))
    about = {
        name: Entrant(settings=text, reference=True, title=title)
        for name, (title, text) in figures.REFERENCES.items()
    }
    with Crew(run, Launcher(worker=f"{_WORKER}:CopyWorker"), shared=True) as crew:
        crew.enter(about, about=about)
        crew.enter(name for name in NAMES if name in settings.contenders)
        _begin(run, crew)
        _check_bits(run, crew)
        trained = crew.names(reference=False)
        for name in [name for name in trained if name in MEASURED]:
            if DeviceMeasure.FIRST in settings.measures:
                _first(run, crew, name)
            if {DeviceMeasure.COPY, DeviceMeasure.READ} & set(settings.measures):
                for leaves in ALL_LEAVES:
                    _copies(run, crew, name, leaves)
            _tell_failure(run, name)
    if {DeviceMeasure.TRAIN, DeviceMeasure.RESTORE} & set(settings.measures):
        for name in trained:
            with Crew(run, Launcher(worker=f"{_WORKER}:TrainWorker")) as crew:
                crew.enter([name])
                _train(run, crew, name)
            _tell_failure(run, name)


def _begin(run: Run[DeviceSettings], crew: Crew) -> None:
    settings = run.settings
    for name in crew.names(reference=False):
        hello = crew.ask_one(name, "hello", device=settings.device)
        if hello is None:
            continue
        if "device" not in hello:
            raise ConfigError(hello["reason"])
        run.report.settings["on"] = hello.pop("device")
        run.report.entrants[name].introduce(hello)
        if hello["reason"] is not None:
            crew.leave_out(name)
    installed = find_spec("lm_resiliency") is not None
    reason = "kept by hooks of frameworks that do not train here" if installed else "not installed"
    run.report.entrants["lm_resiliency"] = Entrant(reason=reason)
    run.known(figures.about(run.report))
    memory = settings.pool_bytes + _MEMORY_STATES * settings.state_bytes + _PROCESS_BYTES
    check_room(settings.root, disk_bytes=settings.disk_bytes, memory_bytes=memory)


def _check_bits(run: Run[DeviceSettings], crew: Crew) -> None:
    settings = run.settings
    for name in crew.names(reference=False):
        if not name.startswith(OURS):
            continue
        run.notify(f"bits: {name}")
        sizes = {"leaf_bytes": settings.check_leaf_bytes, "steps": settings.check_steps}
        answer = crew.ask_one(name, "check", device=settings.device, **sizes)
        if answer is None:
            continue
        run.report.entrants[name].restored = not answer["wrong"]
        if answer["wrong"]:
            wrong = ", ".join(answer["wrong"])
            crew.give_up(name, f"{name}: other bits than training had: {wrong}")
        run.known(f"bits of {settings.check_steps} steps, {name}: {answer['wrong'] or 'equal'}")


def _leaves(run: Run[DeviceSettings], leaves: Leaves) -> Answer:
    """What the worker is to build, and within which bounds."""
    settings = run.settings
    count, leaf_bytes = leaves.within(settings.part)
    return {
        "device": settings.device,
        "leaves": count,
        "leaf_bytes": leaf_bytes,
        "staging_bytes": settings.pool_bytes,
        "timeout_s": settings.timeout_s,
    }


def _first(run: Run[DeviceSettings], crew: Crew, name: str) -> None:
    run.notify(f"first save: {name}")
    answer = crew.ask_one(name, "open", prepare=False, warmups=1, **_leaves(run, LARGE))
    if answer is not None:
        run.report.add(figures.FIRST, name, answer["first_s"])
    crew.ask(name, "drop")


def _copies(run: Run[DeviceSettings], crew: Crew, name: str, leaves: Leaves) -> None:
    settings = run.settings
    run.notify(f"{leaves.title}, warm-up: {name}")
    asked = {"warmups": settings.warmups, **_leaves(run, leaves)}
    opened = crew.ask_one(name, "open", prepare=True, **asked)
    if opened is None:
        return
    if leaves is LARGE:
        run.report.add(figures.PREPARE, name, opened["prepare_s"])
        run.report.add(figures.PREPARED, name, opened["first_s"])
        _known(run, (figures.FIRST, figures.PREPARE, figures.PREPARED), name)
    run.report.entrants[name].settings = opened["settings"]
    if DeviceMeasure.COPY in settings.measures:
        for _ in crew.rounds(f"{leaves.title}: {name}"):
            answer = crew.ask_one(name, "save")
            if answer is not None:
                _note_copy(run, name, leaves, answer, opened["state_bytes"])
        _known(run, (group.of(leaves) for group in figures.GROUPS), name)
    if DeviceMeasure.READ in settings.measures and leaves is LARGE:
        _read(run, crew, name)
    crew.ask(name, "drop")


def _note_copy(
    run: Run[DeviceSettings], name: str, leaves: Leaves, answer: Answer, state_bytes: int
) -> None:
    add, raw_s = run.report.add, answer["raw_s"]
    add(figures.CALL.of(leaves), name, answer["call_s"])
    add(figures.BARRIER.of(leaves), name, answer["barrier_s"])
    add(figures.PASSED.of(leaves), name, answer["passed_s"])
    if name == OURS:
        for way, seconds in ((figures.RAW, raw_s[0]), (figures.PIECES, raw_s[1])):
            add(figures.STAGED.of(leaves), way, state_bytes / seconds)
        add(figures.STAGED.of(leaves), name, state_bytes / answer["staged_s"])
        add(figures.SHARE.of(leaves), name, raw_s[0] / answer["staged_s"])
    else:
        add(figures.PASSED.of(leaves), figures.WITHIN, raw_s[0])


def _read(run: Run[DeviceSettings], crew: Crew, name: str) -> None:
    run.notify(f"reads: {name}")
    for _ in range(min(_READ_TURNS, run.settings.rounds)):
        answer = crew.ask_one(name, "read")
        if answer is None:
            return
        ways = {
            name: "save",
            **({figures.NONE: "none", figures.RAW: "raw"} if name == OURS else {}),
        }
        for way, part in ways.items():
            for key, figure in figures.READ.items():
                run.report.add(figure, way, answer[part][key] * 1e6)
    _known(run, figures.READ.values(), name)


def _train(run: Run[DeviceSettings], crew: Crew, name: str) -> None:
    settings, report = run.settings, run.report
    run.notify(f"training, warm-up: {name}")
    crew.ask(name, "hello", name=name, device=settings.device)
    started = crew.ask_one(
        name,
        "start",
        model=dataclasses.asdict(settings.model),
        staging_bytes=settings.pool_bytes,
        timeout_s=settings.timeout_s,
        parts=settings.parts,
        warmups=settings.warmups + 1,  # DCP tries numbers of threads in three
    )
    if started is None:
        return
    report.entrants[name].settings = started["settings"]
    report.more["training"] = {key: started[key] for key in ("state_bytes", "leaves")}
    report.add(figures.DURABLE, name, started["saves"][-1]["durable_s"])
    if DeviceMeasure.TRAIN in settings.measures:
        run.notify(f"training: {name}")
        steps, base = settings.every * settings.rounds, settings.base_steps
        answer = crew.ask_one(name, "train", every=settings.every, steps=steps, base=base)
        if answer is not None:
            _note_training(run, name, answer)
    if DeviceMeasure.RESTORE in settings.measures:
        run.notify(f"restore: {name}")
        answer = crew.ask_one(name, "restore", rounds=settings.rounds)
        if answer is not None:
            _note_restores(run, name, answer)


def _note_training(run: Run[DeviceSettings], name: str, answer: Answer) -> None:
    report, every, base_s = run.report, run.settings.every, fmean(answer["base_s"])
    report.add(figures.STEP, name, base_s)
    report.add(figures.LONGER, name, fmean(answer["step_s"]) / base_s - 1)
    for begin in range(0, len(answer["step_s"]), every):
        interval = answer["step_s"][begin : begin + every]
        report.add(figures.INTERVAL, name, fmean(interval) / base_s - 1)
        report.add(figures.LONGEST, name, max(interval) / base_s)
    for figure, key in ((figures.TRAIN_CALL, "call_s"), (figures.TRAIN_STALL, "stall_s")):
        for seconds in answer[key]:
            report.add(figure, name, seconds)
    _known(run, figures.OF_TRAINING, name)


def _note_restores(run: Run[DeviceSettings], name: str, answer: Answer) -> None:
    report = run.report
    for turn in answer["turns"]:
        report.add(figures.RESTORE, name, turn["restore"])
        if name == OURS:
            report.add(figures.RESTORE, figures.FROM_HOST, turn["raw"])
            report.add(figures.RESTORE, figures.PLAIN, turn["plain"])
            best = min(turn["plain"], _LINK_PART * turn["raw"])
            report.add(figures.RESTORE_SHARE, name, turn["restore"] / best)
    entrant = report.entrants[name]
    entrant.restored = answer["equal"] and entrant.restored is not False
    shown = (figures.RESTORE, figures.RESTORE_SHARE)
    _known(run, shown, name)


def _tell_failure(run: Run[DeviceSettings], name: str) -> None:
    reason = run.report.entrants[name].reason
    if reason is not None:
        run.known(f"FAILED: {reason}")


def _known(run: Run[DeviceSettings], found: Iterable[Figure], name: str) -> None:
    """Tell a way's rows, and those of the raw copies beside it: a run that is cut off has them."""
    for figure in found:
        for way in (*figures.BESIDE.get(name, ()), name):
            text = cell(run.report, figure, way)
            if text:
                run.known(f"{figure.title}, {unit_name(figure)}: {way} {text}")


SUITE = Suite(
    settings=DeviceSettings,
    schedule=measure,
    figures=lambda report: figures.VIEWS,
    about=figures.about,
    fields=lambda settings: {"leaves": LARGE.within(settings.part)[0]},
)
