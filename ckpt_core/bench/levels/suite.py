"""The suite `levels`: settings, the order of a run, and what is noted of each turn."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.levels import nodes
from ckpt_core.bench.levels.figures import (
    BACK,
    CALL,
    CAP,
    LOADED,
    MEMORY_RESTORE,
    MEMORY_SAVE,
    SLOWER,
    SLOWER_MEDIAN,
    STEP,
    UPLOAD,
    UPLOAD_CPU,
    VIEWS,
    median_within,
)
from ckpt_core.bench.levels.settings import (
    CAPPED,
    CLIENTS,
    ENGINES,
    MEMCPY,
    NAMES,
    NODES,
    OBSTORE,
    OF,
    SENDERS,
    WAYS,
    WITHOUT,
    LevelMeasure,
    LevelSettings,
)
from ckpt_core.bench.machine import check_room, work_folder
from ckpt_core.bench.remote import Remote
from ckpt_core.bench.results import Entrant, Figure, per_gb
from ckpt_core.bench.run import Run
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.team import Launcher, Team
from ckpt_core.system.machine import describe

_BUCKET = "bench"
_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    # As over TLS: there a client of this engine does not hash each part.
    "AWS_UNSIGNED_PAYLOAD": "true",
}
"""Of whoever is to use it, besides the endpoint."""

_STATES = 16
"""In sizes of the state: what processes hold, with what lies in memory and in the sink."""

_DISK_STATES = 12
"""In sizes of the state of the model that trains."""

_NODE_STATES = 48
"""In sizes of a node's state: what five of them hold, and keep of one another."""

_WARM_UPS = 2


@dataclass(frozen=True)
class _Site:
    """Where a run takes place: its crew, the sink, a folder in memory."""

    run: Run[LevelSettings]
    crew: Crew
    sink: Remote
    memory: Path

    def url(self, title: str) -> str:
        """A place in the sink."""
        return f"s3://{_BUCKET}/{title}"


def measure(run: Run[LevelSettings]) -> None:
    """Everything that the settings ask for.

    Raises:
        ConfigError: there is no room for the run; nothing was written.
    """
    settings = run.settings
    memory = settings.memory_root or settings.root
    disk_bytes = _DISK_STATES * settings.model.state_bytes
    memory_bytes = max(_STATES * settings.state_bytes, _NODE_STATES * settings.node_bytes)
    check_room(settings.root, disk_bytes=disk_bytes, memory_bytes=memory_bytes)
    parts: dict[LevelMeasure, Callable[[_Site], None]] = {
        LevelMeasure.TRAIN: _train,
        LevelMeasure.UPLOAD: _upload,
        LevelMeasure.BACK: _back,
        LevelMeasure.MEMORY: _memory,
        LevelMeasure.PEERS: lambda site: nodes.peers(run, site.crew, site.memory),
        LevelMeasure.PARITY: lambda site: nodes.parity(run, site.crew, site.memory),
    }
    with work_folder(memory) as folder, _sink(run) as sink:
        endpoint = f"http://127.0.0.1:{sink.call('start')['port']}"
        environment = {**_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}
        token = nodes.write_token(folder)

        def launch(name: str, folder: Path, timeout_s: float) -> Team:
            if name in NODES:
                return nodes.launcher(name, token)(name, folder, timeout_s)
            worker = "client:Client" if name in CLIENTS else "worker:Worker"
            start = Launcher(worker=f"{__package__}.{worker}", environment=environment)
            return start(name, folder, timeout_s)

        with Crew(run, launch) as crew:
            about = {n: Entrant(settings=words, title=title) for n, (title, words) in WAYS.items()}
            about[MEMCPY].reference = about[OBSTORE].reference = True
            asked = {name for one in settings.measures for name in OF[one]}
            crew.enter((n for n in NAMES if n in asked and n in settings.contenders), about=about)
            crew.start()
            for one in settings.measures:
                parts[one](_Site(run, crew, sink, folder))


@contextmanager
def _sink(run: Run[LevelSettings]) -> Iterator[Remote]:
    root = run.folder / "sink"
    root.mkdir()
    worker = "ckpt_core.bench.levels.sink:Sink"
    with Remote("sink", root, timeout_s=run.settings.timeout_s, worker=worker) as sink:
        yield sink


def _some(site: _Site, *names: str) -> list[str]:
    return [name for name in site.crew.names() if name in names]


def _open(site: _Site, name: str, folder: Path, title: str) -> bool:
    """A Checkpointer of one way."""
    url = None if name == WITHOUT else site.url(title)
    bandwidth = site.run.settings.bandwidth if name == CAPPED else None
    asked = {"folder": str(folder), "url": url, "bandwidth": bandwidth, "keep": 1}
    return site.crew.ask_one(name, "open", **asked) is not None


# -- beside training ------------------------------------------------------------------------------


def _train(site: _Site) -> None:
    """Windows of training; all processors but one are for the agents and the sink."""
    run, crew = site.run, site.crew
    settings, cpus = run.settings, sorted(os.sched_getaffinity(0))
    cpu = cpus[0] if len(cpus) > 1 else None
    if cpu is not None:
        site.sink.call("pin", cpus=cpus[1:])
    for name in _some(site, *ENGINES):
        crew.ask(name, "train_on", model=dataclasses.asdict(settings.model))
        _open(site, name, run.folder / f"train-{name}", f"train-{name}")
    window = {"steps": settings.train_steps, "every": settings.interval, "cpu": cpu}
    for name in _some(site, *ENGINES):
        crew.ask(name, "train", **window)
    for _ in crew.rounds("training"):
        for name in crew.shuffled(_some(site, *ENGINES)):
            answer = crew.ask_one(name, "train", **window)
            call = crew.ask_one(name, "save")
            if name != WITHOUT:
                crew.ask(name, "reach")
            if answer is not None and call is not None:
                run.report.add(STEP, name, answer["step_s"])
                run.report.add(CALL, name, call["call_s"])
        _beside(site, cpus)
    for name in _some(site, OURS, CAPPED):
        for value in median_within(run.report.values.get(SLOWER.key, {}).get(name, ())):
            run.report.add(SLOWER_MEDIAN, name, value)
    _leave(site)
    if cpu is not None:
        site.sink.call("pin", cpus=cpus)


def _beside(site: _Site, cpus: Sequence[int]) -> None:
    """Training on one processor, and the agent on the others: what it costs while it sends."""
    settings = site.run.settings
    for name in site.crew.shuffled(_some(site, OURS, CAPPED)):
        asked = {"pairs": settings.pairs, "steps": settings.interval, "others": cpus[1:]}
        answer = site.crew.ask_one(name, "beside", **asked)
        for value in answer["slower"] if answer is not None else ():
            site.run.report.add(SLOWER, name, value)


def _leave(site: _Site) -> None:
    for name in _some(site, *ENGINES):
        site.crew.ask(name, "leave")


# -- to the store, and back -----------------------------------------------------------------------


def _build(site: _Site, *names: str) -> int:
    settings, state_bytes = site.run.settings, 0
    for name in _some(site, *names):
        size = {"state_bytes": settings.state_bytes, "leaves": settings.leaves}
        answer = site.crew.ask_one(name, "build", **size)
        state_bytes = answer["state_bytes"] if answer else state_bytes
    return state_bytes


def _upload(site: _Site) -> None:
    """The same step by each way, from memory: a disk would be what is measured."""
    run, crew = site.run, site.crew
    state_bytes = _build(site, OURS, CAPPED, *SENDERS[2:])
    source = _step(site)
    ready = [
        name
        for name in _some(site, OURS, CAPPED)
        if _open(site, name, site.memory / name, f"upload-{name}") and _sent(crew, name)
    ]
    for name in crew.turns("upload"):
        if name in ready and (before := crew.ask_one(name, "reach")) is not None:
            now = _sent(crew, name)
            if now is None:
                continue
            nbytes, busy_s, cpu_s = (now[key] - before[key] for key in ("bytes", "busy_s", "cpu_s"))
            if name == CAPPED:
                run.report.add(CAP, name, nbytes / busy_s / run.settings.bandwidth)
            else:
                _note(run, name, nbytes, busy_s, cpu_s)
        elif name in SENDERS:
            told = {"url": site.url(f"upload-{name}"), "source": str(source)}
            answer = crew.ask_one(name, "upload", **told)
            if answer is not None:
                _note(run, name, state_bytes, answer["seconds"], answer["cpu_s"])
    _leave(site)


def _sent(crew: Crew, name: str) -> dict[str, Any] | None:
    crew.ask(name, "save")
    return crew.ask_one(name, "reach")


def _note(run: Run[LevelSettings], name: str, nbytes: int, seconds: float, cpu_s: float) -> None:
    run.report.add(UPLOAD, name, nbytes / seconds)
    run.report.add(UPLOAD_CPU, name, per_gb(cpu_s, nbytes))


def _step(site: _Site) -> Path:
    """The files of a step in memory, as whoever has no agent sends them."""
    folder = site.memory / "files"
    if not folder.exists():
        folder.mkdir()
        block = os.urandom(2**20)
        with (folder / "shard-00000-0.safetensors").open("wb") as file:
            for _ in range(-(-site.run.settings.state_bytes // len(block))):
                file.write(block)
    return folder


def _back(site: _Site) -> None:
    """A step comes back to an empty root and into live tensors, or to no root and into fresh ones.

    Beside ranges that the client reads.
    """
    run, crew = site.run, site.crew
    state_bytes = _build(site, OURS)
    source, url = _step(site), site.url("back-files")
    crew.ask(OBSTORE, "upload", url=url, source=str(source))
    for number, name in enumerate(crew.turns("back")):
        if name == OBSTORE:
            answer = crew.ask_one(name, "download", url=url, source=str(source))
            if answer is not None:
                nbytes = sum(path.stat().st_size for path in source.iterdir())
                for figure in (BACK, LOADED):
                    run.report.add(figure, name, nbytes / answer["seconds"])
        elif name == OURS and _open(site, name, site.memory / f"from-{number}", f"back-{number}"):
            _sent(crew, name)
            crew.ask(name, "leave")
            _open(site, name, site.memory / f"to-{number}", f"back-{number}")
            _restored(site, BACK, state_bytes, "restore")
            _restored(site, LOADED, state_bytes, "load", url=site.url(f"back-{number}"))
            crew.ask(name, "leave")


def _restored(site: _Site, figure: Figure, state_bytes: int, how: str, **told: Any) -> None:
    answer = site.crew.ask_one(OURS, how, **told)
    if answer is not None:
        site.run.report.add(figure, OURS, state_bytes / answer["seconds"])
        site.run.report.entrants[OURS].compare(answer["saved"], answer["restored"])


# -- a root in memory -----------------------------------------------------------------------------


def _memory(site: _Site) -> None:
    """Saves into files that are recycled, and restores, beside copies of the same leaves."""
    run, crew = site.run, site.crew
    state_bytes = _build(site, OURS, MEMCPY)
    folder = {"folder": str(site.memory / "memory"), "url": None, "bandwidth": None, "keep": 1}
    crew.ask(OURS, "open", **folder)
    for _ in range(_WARM_UPS):
        crew.ask(OURS, "save")
        crew.ask(MEMCPY, "memcpy")
    for name in crew.turns("memory"):
        if name == MEMCPY:
            answer = crew.ask_one(name, "memcpy")
            if answer is not None:
                for figure in (MEMORY_SAVE, MEMORY_RESTORE):
                    run.report.add(figure, name, state_bytes / answer["seconds"])
        elif name == OURS:
            saved = crew.ask_one(name, "save")
            if saved is not None:
                run.report.add(MEMORY_SAVE, name, state_bytes / saved["committed_s"])
                _restored(site, MEMORY_RESTORE, state_bytes, "restore")
    _leave(site)


def _fields(settings: LevelSettings) -> dict[str, Any]:
    memory = settings.memory_root
    return {"memory_root": None if memory is None else describe(memory).filesystem}


SUITE = Suite(
    settings=LevelSettings,
    schedule=measure,
    figures=lambda report: VIEWS,
    fields=_fields,
)
