"""What the papers' texts give as numbers, beside ours. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckpt_core.bench.papers.found import (
    INTERVAL,
    PERSIST,
    SLOWDOWN,
    STALL,
    THROUGHPUT,
    Found,
    places,
)
from ckpt_core.bench.papers.settings import PapersMeasure, PapersSettings
from ckpt_core.simulate import Comparison, lightcheck_data, pccheck_data

_PAPER_THREADS = 3
_FULL_STATES = 2.0
_MODEL = "VGG-16"
_DRAWN = "the paper only draws it"
Compared = Iterator[Comparison | None]


def compare(found: Found, measure: PapersMeasure, settings: PapersSettings) -> list[Comparison]:
    """Rows for which there is a value of ours; `paper` is None where its text has no number."""
    return [row for row in _COMPARE[measure](found, settings) if row is not None]


def _row(
    what: str, source: str, paper: float | None, ours: float | None, note: str = ""
) -> Comparison | None:
    if ours is None:
        return None
    return Comparison(what=what, source=source, paper=paper, ours=ours, note=note)


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _throughput(found: Found, settings: PapersSettings) -> Compared:
    yield _row(
        "checkfreq, every 1: slowdown",
        "section 5.2.1",
        pccheck_data.VGG16_EVERY_1,
        found.median(SLOWDOWN, "checkfreq", 1),
        "VGG16, at most",
    )
    for name, plain in pccheck_data.VGG16_PLAIN.items():
        for every, per_s in zip(
            pccheck_data.VGG16_INTERVALS, pccheck_data.VGG16_THROUGHPUT[name], strict=True
        ):
            yield _row(
                f"{name}, every {every}: slowdown",
                "figure 8a, artifact",
                plain / per_s,
                found.median(SLOWDOWN, name, every),
                "VGG16",
            )


def _persist(found: Found, settings: PapersSettings) -> Compared:
    for size in places(found.of(PERSIST))[-1:]:
        for other in ("checkfreq", "gpm", "torch_save_fsync"):
            ours = _ratio(
                found.median(PERSIST, other, size), found.median(PERSIST, "pccheck", size)
            )
            what = f"{other} / pccheck, {size / 1e6:.0f} MB: time to persist"
            known = other in pccheck_data.VGG16_PLAIN
            note = "of all sizes, at most" if known else "not in the paper"
            yield _row(
                what, "section 5.3", pccheck_data.OPT_1_3B.faster if known else None, ours, note
            )


def _in_flight(found: Found, settings: PapersSettings) -> Compared:
    one = f"N = {min(settings.in_flight)}"
    for n in sorted(
        {*sorted(settings.in_flight)[1:2], max(settings.in_flight)} - {min(settings.in_flight)}
    ):
        for every in settings.in_flight_intervals:
            ours = _ratio(
                found.median(SLOWDOWN, one, every), found.median(SLOWDOWN, f"N = {n}", every)
            )
            what = f"{one} / N = {n}, every {every}: slowdown"
            yield _row(what, "section 5.4.1", None, ours, 'more than one is "consistently better"')


def _writers(found: Found, settings: PapersSettings) -> Compared:
    for n in settings.in_flight[:3]:
        ours = _ratio(
            found.median(SLOWDOWN, f"N = {n}", 1),
            found.median(SLOWDOWN, f"N = {n}", _PAPER_THREADS),
        )
        what = f"N = {n}: slowdown with p = 1 / with p = {_PAPER_THREADS}"
        yield _row(
            what, "section 5.4.2", pccheck_data.THREADS_GAIN.get(n), ours, "OPT-350M, every 10"
        )


def _memory(found: Found, settings: PapersSettings) -> Compared:
    for x in settings.chunks:
        line = f"{x} chunks"
        full = found.median(THROUGHPUT, line, _FULL_STATES)
        ours = _ratio(full, found.median(THROUGHPUT, line, 1.0))
        what = f"{line}: throughput with 2 m / with m"
        yield _row(what, "section 5.4.3", pccheck_data.LESS_DRAM, ours, "OPT-1.3B, at most")
    for x in settings.chunks:
        line = f"{x} chunks"
        full = found.median(THROUGHPUT, line, _FULL_STATES)
        ours = _ratio(full, found.median(THROUGHPUT, "not pipelined", _FULL_STATES))
        what = f"{line} / not pipelined, 2 m: throughput"
        yield _row(what, "section 5.4.3", None, ours, '"slightly higher"')


def _intervals(found: Found, settings: PapersSettings) -> Compared:
    model = next(model for model in lightcheck_data.MODELS if model.name == _MODEL)
    light, checkfreq, torch_save = model.every
    paper = {
        "lightcheck, memory": light,
        "lightcheck, disk": lightcheck_data.DISK_EVERY[_MODEL],
        "checkfreq": checkfreq,
        "torch_save_fsync": torch_save,
    }
    for line, every in paper.items():
        yield _row(
            f"{line}: interval", "table I", every, found.median(INTERVAL, line), f"{_MODEL}, 5 %"
        )
    base = found.median(INTERVAL, "checkfreq")
    for line in ("lightcheck, memory", "lightcheck, disk"):
        ours = _ratio(base, found.median(INTERVAL, line))
        yield _row(f"checkfreq / {line}: interval", "table I", checkfreq / paper[line], ours)


def _separated(found: Found, settings: PapersSettings) -> Compared:
    for place, paper, note in (
        (
            "memory",
            lightcheck_data.SEPARATED[1],
            f"persistent memory; at least {lightcheck_data.SEPARATED[0]}, at most this",
        ),
        ("disk", None, "not in the paper"),
    ):
        ours = _ratio(
            found.median(PERSIST, f"entry by entry, {place}"),
            found.median(PERSIST, f"separated, {place}"),
        )
        what = f"entry by entry / separated, {place}: time"
        yield _row(what, "section IV-D, figure 11", paper, ours, note)


def _breakdown(found: Found, settings: PapersSettings) -> Compared:
    rows = found.of(STALL)
    for first, row in [(rows[0], row) for row in rows[1:]]:
        what = f"{first.line} / {row.line}: stall of a save"
        yield _row(what, "Breakdown of Benefits", None, _ratio(first.median, row.median), _DRAWN)


_COMPARE: dict[PapersMeasure, Callable[[Found, PapersSettings], Compared]] = {
    PapersMeasure.THROUGHPUT: _throughput,
    PapersMeasure.PERSIST: _persist,
    PapersMeasure.IN_FLIGHT: _in_flight,
    PapersMeasure.WRITERS: _writers,
    PapersMeasure.MEMORY: _memory,
    PapersMeasure.INTERVALS: _intervals,
    PapersMeasure.SEPARATED: _separated,
    PapersMeasure.BREAKDOWN: _breakdown,
}
