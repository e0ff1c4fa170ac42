"""The page itself. Pure; every text that comes from a file is escaped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ckpt_core.report.advice import Step, advice, headline, lone_failures, rate_text, steps_of
from ckpt_core.report.drawing import plot, shown, timeline
from ckpt_core.report.facts import Facts
from ckpt_core.units import count_text, size_text, time_text

_MOST_ROWS = 1000
_STYLE = """
:root { color-scheme: light dark; --fg: #1b1f24; --dim: #5c6670; --bg: #fff; --tile: #f3f5f7;
  --grid: #dfe3e8;
  --staging: #7aa9e6; --persist: #f0a955; --commit: #6dbb7b; --wait: #8a63c9; --restore: #4fb3bf;
  --bad: #cf2f3a; }
@media (prefers-color-scheme: dark) { :root { --fg: #e3e7eb; --dim: #98a2ad; --bg: #15181c;
  --tile: #20252b;
  --grid: #30363d; --staging: #4a7fc4; --persist: #c07f2f; --commit: #3f8f51; --wait: #a487dd;
  --bad: #f2707a; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 1140px; margin: 24px auto; padding: 0 20px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 30px 0 8px; } p { margin: 6px 0; }
.dim { color: var(--dim); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }
.tile { background: var(--tile); border-radius: 8px; padding: 10px 14px; flex: 1 1 100px; }
.tile b { display: block; font-size: 21px; }
.tile span { color: var(--dim); font-size: 13px; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 12px; fill: var(--fg); }
svg .rank { font-weight: 600; } svg .end { text-anchor: end; fill: var(--dim); }
svg .tick { text-anchor: middle; fill: var(--dim); } svg .mark { text-anchor: middle;
  font-weight: 700; }
svg .inside { font-size: 11px; fill: #111; } svg .grid { stroke: var(--grid); }
  svg .stem { stroke: var(--wait); }
svg .dot { fill: var(--wait); } svg .mark.failed { fill: var(--bad); font-size: 17px; }
svg .mark.passed { fill: var(--persist); } svg .mark.reached { fill: var(--commit); }
.staging { fill: var(--staging); background: var(--staging); } .persist { fill: var(--persist);
  background: var(--persist); }
.commit { fill: var(--commit); background: var(--commit); } .wait { fill: var(--wait);
  background: var(--wait); }
.restore { fill: var(--restore); background: var(--restore); }
.key { font-size: 13px; } .key i { display: inline-block; width: 12px; height: 12px; border-radius: 2px;
  margin: 0 5px -1px 14px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%;
  font-variant-numeric: tabular-nums; }
th { text-align: right; color: var(--dim); font-weight: 500; } td { text-align: right; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--grid); } .text { text-align: left;
  overflow-wrap: anywhere; }
.bad { color: var(--bad); }
"""
_KEY = (
    ("wait", "training waits"),
    ("staging", "staging: the state is copied"),
    ("persist", "persist: written and synced"),
    ("commit", "commit: published"),
    ("restore", "restore"),
)
_LEVELS = {
    "level_reached": "reached",
    "level_passed_over": "passed over",
    "level_problem": "problem",
}


def page(facts: Facts, *, title: str) -> str:
    """One HTML document that needs nothing but itself."""
    steps = steps_of(facts)
    body = [
        f"<h1>{shown(title)}</h1>",
        f'<p class="dim">{shown(_about(facts))}</p>',
        _tiles(headline(facts, steps)),
        *(f"<p>{shown(text)}</p>" for text in advice(facts)),
        "<h2>Saves over the run</h2>",
        _key(),
        timeline(facts),
        *_plots(facts, steps),
        *_failures(facts, steps),
        *_levels(facts),
        *_table_of_saves(steps),
    ]
    return _document(title, body)


def plain_page(
    title: str,
    about: str,
    tiles: Sequence[tuple[str, str]],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    notes: Sequence[str] = (),
) -> str:
    """A page of figures and one table, its headings and its rows, for what has no moments to draw."""
    body = [
        f"<h1>{shown(title)}</h1>",
        f'<p class="dim">{shown(about)}</p>',
        _tiles(tiles),
        *(f"<p>{shown(text)}</p>" for text in notes),
        _table(*table),
    ]
    return _document(title, body)


def _document(title: str, body: Iterable[str]) -> str:
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{shown(title)}</title><style>{_STYLE}</style></head><body>"
    )
    return "\n".join([head, *body, "</body></html>\n"])


def _about(facts: Facts) -> str:
    runs = max(len(rank.runs) for rank in facts.ranks)
    texts = [count_text(len(facts.ranks), "rank"), time_text(facts.seconds)]
    if runs > 1:
        texts.append(f"opened {runs} times")
    if facts.began_unix_s is not None and 0 <= facts.began_unix_s < 2**40:
        began = time.gmtime(min(facts.began_unix_s, 253402300799))
        texts.insert(0, time.strftime("%Y-%m-%d %H:%M:%S UTC", began))
    return ", ".join(texts)


def _tiles(tiles: Iterable[tuple[str, str]]) -> str:
    cells = [
        f'<div class="tile"><b>{shown(value)}</b><span>{shown(what)}</span></div>'
        for value, what in tiles
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _key() -> str:
    parts = [f'<i class="{kind}"></i>{text}' for kind, text in _KEY]
    return f'<p class="key dim">{"".join(parts)} &#160; ○ retired, ● at a level, △ passed over, × failed</p>'


def _plots(facts: Facts, steps: Sequence[Step]) -> list[str]:
    waits = [(step.begin_s, step.waited_s * 1e3) for step in steps if step.waited_s is not None]
    rates = [(step.begin_s, step.nbytes / step.seconds / 1e9) for step in steps if step.seconds]
    charts = (
        ("What training waited for each save", waits, "ms"),
        ("Throughput of each save, from its begin until it is durable", rates, "GB/s"),
    )
    return [
        f"<h2>{what}</h2>\n" + plot(points, unit, seconds=facts.seconds, what=what)
        for what, points, unit in charts
        if points
    ]


def _failures(facts: Facts, steps: Sequence[Step]) -> list[str]:
    texts = [f"{step.step}: {text}" for step in steps for text in step.failures]
    texts += lone_failures(facts)
    if not texts:
        return []
    return ["<h2>Failures</h2>", *(f'<p class="bad">{shown(text)}</p>' for text in texts)]


def _levels(facts: Facts) -> list[str]:
    marks = sorted(
        (mark for rank in facts.ranks for mark in rank.marks if mark.name in _LEVELS),
        key=lambda mark: mark.time_s,
    )
    if not marks:
        return []
    rows = [
        (time_text(m.time_s), "" if m.step is None else str(m.step), _LEVELS[m.name], m.detail)
        for m in marks
    ]
    return ["<h2>Levels</h2>", _table(("at", "step", "what", "level"), rows)]


def _table_of_saves(steps: Sequence[Step]) -> list[str]:
    left_out = len(steps) - _MOST_ROWS
    note = f'<p class="dim">The last {_MOST_ROWS:,} of {len(steps):,}.</p>' if left_out > 0 else ""
    names = "step,began at,staged after,durable after,bytes,throughput,waited,outcome".split(",")
    return ["<h2>Saves</h2>", note, _table(names, map(_row, steps[-_MOST_ROWS:]))]


def _row(step: Step) -> tuple[str, ...]:
    fate = "; ".join(step.failures)
    if not fate:
        fate = "no end is in the file" if step.seconds is None else "saved"
    return (
        str(step.step),
        time_text(step.begin_s),
        time_text(step.staged_s),
        time_text(step.seconds),
        size_text(step.nbytes) if step.seconds is not None else "",
        rate_text(step.nbytes / step.seconds) if step.seconds else "",
        time_text(step.waited_s),
        fate,
    )


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The last column is text."""
    lines = ['<div class="wide"><table><tr>']
    last = len(names) - 1
    kinds = [' class="text"' if place == last else "" for place in range(len(names))]
    lines += [f"<th{kind}>{name}</th>" for kind, name in zip(kinds, names, strict=True)]
    for row in rows:
        cells = [f"<td{kind}>{shown(text)}</td>" for kind, text in zip(kinds, row, strict=True)]
        lines.append(f"</tr>\n<tr>{''.join(cells)}")
    return "".join([*lines, "</tr></table></div>"])
