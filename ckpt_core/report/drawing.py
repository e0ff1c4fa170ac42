"""Charts as SVG, whose colours are those of the page. Pure; text is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ckpt_core.report.facts import Facts
from ckpt_core.report.ranks import RankFacts, Save
from ckpt_core.units import clean, time_text

WIDTH = 1100
_LEFT, _RIGHT = 150, 12
_ROW, _BAR = 22, 14
_TICKS = 8
_PLOT_HEIGHT = 130
_MARKS = {
    "retired": ("retired", "○"),
    "level_reached": ("reached", "●"),
    "level_passed_over": ("passed", "△"),
    "level_problem": ("failed", "!"),
    "failed": ("failed", "×"),
}


def shown(text: str) -> str:
    """Text from a file, as a page may hold it."""
    return html.escape(clean(text))


def timeline(facts: Facts) -> str:
    """A group of rows for each rank: training, each place in flight, what happened else."""
    scale = _Scale(facts.seconds)
    items: list[str] = []
    top = 0
    for rank in facts.ranks:
        items.append(f'<text class="rank" x="0" y="{top + 15}">{shown(_title(rank))}</text>')
        top = _group(items, rank, scale, top + _ROW)
    axis = scale.axis(top + 4)
    return _svg(top + 30, axis + items, "When saves were under way, and when training waited")


def plot(points: Sequence[tuple[float, float]], unit: str, *, seconds: float, what: str) -> str:
    """A dot for each (moment, value), on the same axis of time."""
    most = _round_up(max((value for _, value in points), default=0.0))
    scale = _Scale(seconds)
    items = scale.axis(_PLOT_HEIGHT)
    for part in (0.0, 0.5, 1.0):
        y = _PLOT_HEIGHT - part * (_PLOT_HEIGHT - 12)
        items.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        label = shown(f"{_plain(most * part)} {unit}")
        items.append(f'<text class="end" x="{_LEFT - 8}" y="{y + 4:.1f}">{label}</text>')
    for moment, value in points:
        x, y = scale.x(moment), _PLOT_HEIGHT - value / most * (_PLOT_HEIGHT - 12)
        items.append(f'<line class="stem" x1="{x}" x2="{x}" y1="{_PLOT_HEIGHT}" y2="{y:.1f}"/>')
        title = shown(f"{_plain(value)} {unit}")
        items.append(
            f'<circle class="dot" cx="{x}" cy="{y:.1f}" r="4"><title>{title}</title></circle>'
        )
    return _svg(_PLOT_HEIGHT + 26, items, what)


class _Scale:
    def __init__(self, seconds: float) -> None:
        self._seconds = max(seconds, 1e-6)

    def x(self, moment: float) -> float:
        return round(_LEFT + moment / self._seconds * (WIDTH - _LEFT - _RIGHT), 2)

    def axis(self, bottom: float) -> list[str]:
        unit = _round_up(self._seconds / _TICKS)
        items = []
        for number in range(int(self._seconds / unit) + 1):
            x, text = self.x(number * unit), shown(time_text(number * unit) if number else "0")
            items.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{bottom}"/>')
            items.append(f'<text class="tick" x="{x}" y="{bottom + 16}">{text}</text>')
        return items

    def bar(self, kind: str, span: tuple[float, float], top: float, title: str) -> str:
        """At least so wide that it is seen."""
        x = self.x(span[0])
        width = max(round(self.x(span[1]) - x, 2), 1.5)
        about = f"<title>{shown(title)}</title>"
        return (
            f'<rect class="{kind}" x="{x}" y="{top}" width="{width}" height="{_BAR}">{about}</rect>'
        )


def _group(items: list[str], rank: RankFacts, scale: _Scale, top: int) -> int:
    _name(items, "training waits", top)
    for kind, spans in (("wait", rank.calls), ("wait", rank.waits), ("restore", rank.restores)):
        text = "restore" if kind == "restore" else "training waits"
        items += [
            scale.bar(kind, span, top, f"{text} {time_text(span[1] - span[0])}") for span in spans
        ]
    places = 1 + max((save.place for save in rank.saves), default=-1)
    for place in range(places):
        _name(items, f"place in flight {place + 1}", top + _ROW * (place + 1))
    for save in rank.saves:
        _save(items, save, scale, top + _ROW * (save.place + 1))
    top += _ROW * (places + 1)
    if not rank.marks:
        return top
    _name(items, "retired, levels", top)
    for mark in rank.marks:
        kind, sign = _MARKS.get(mark.name, ("failed", "?"))
        about = (
            f"{mark.name.replace('_', ' ')} {'' if mark.step is None else mark.step} {mark.detail}"
        )
        title = f"<title>{shown(about)}</title>"
        items.append(
            f'<text class="mark {kind}" x="{scale.x(mark.time_s)}" y="{top + 12}">{sign}{title}</text>'
        )
    return top + _ROW


def _save(items: list[str], save: Save, scale: _Scale, top: int) -> None:
    moments = [("staging", save.staged_s), ("persist", save.persisted_s), ("commit", None)]
    began = save.begin_s
    for phase, ended in moments:
        until = save.until_s if ended is None else ended
        lasted = f"{time_text(until - began)}{'' if save.over else ', no end is told'}"
        # Events of one save come from several threads: a phase may end before the one ahead of it.
        if until > began:
            items.append(scale.bar(phase, (began, until), top, f"{save.step}: {phase} {lasted}"))
        if ended is None:
            break
        began = max(began, until)
    if save.failure is not None:
        title = f"<title>{shown(f'{save.step} failed: {save.failure}')}</title>"
        items.append(
            f'<text class="mark failed" x="{scale.x(save.until_s)}" y="{top + 12}">×{title}</text>'
        )
    if scale.x(save.until_s) - scale.x(save.begin_s) > 34:
        items.append(
            f'<text class="inside" x="{scale.x(save.begin_s) + 4}" y="{top + 11}">{save.step}</text>'
        )


def _name(items: list[str], text: str, top: int) -> None:
    items.append(f'<text class="end" x="{_LEFT - 8}" y="{top + 11}">{shown(text)}</text>')


def _title(rank: RankFacts) -> str:
    return f"rank {rank.rank}" + (f" on {', '.join(rank.hosts)}" if rank.hosts else "")


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, ...; of nothing, 1."""
    if value <= 0:
        return 1.0
    size = 10.0 ** (len(f"{int(value)}") - 1)
    while size > value:
        size /= 10
    return next(size * step for step in (1, 2, 5, 10, 20) if size * step >= value)


def _svg(height: float, items: Sequence[str], what: str) -> str:
    label = shown(what)
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    return "\n".join([head, *items, "</svg>"])
