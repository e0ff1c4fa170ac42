"""The text format 0.0.4 of Prometheus, read strictly: what it says must be so, or it is an error."""

from __future__ import annotations

import re
from collections import defaultdict

Labels = frozenset[tuple[str, str]]
_LABEL = r'[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"'
_SAMPLE = re.compile(rf"(\w+)\{{({_LABEL}(?:,{_LABEL})*)\}} (\S+)")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parsed(text: str) -> dict[str, dict[Labels, float]]:
    """Values by the name and the labels of their sample."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    found: dict[str, dict[Labels, float]] = defaultdict(dict)
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ", 3)[2]
            assert family not in kinds, f"{family} comes in two places"
        elif line.startswith("# TYPE "):
            _, _, name, kinds[family] = line.split(" ")
            assert name == family
        else:
            _add(found, line, family, kinds[family])
    for name, kind in kinds.items():
        if kind == "histogram":
            _check_histogram(name, found)
        assert kind != "counter" or name.endswith("_total")
    return dict(found)


def _add(found: dict[str, dict[Labels, float]], line: str, family: str, kind: str) -> None:
    match = _SAMPLE.fullmatch(line)
    assert match is not None, line
    name, labels, value = match.groups()
    suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
    assert name in [family + suffix for suffix in suffixes], line
    pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)
    unescaped = [(key, re.sub(r"\\.", lambda at: _ESCAPES[at[0]], text)) for key, text in pairs]
    assert frozenset(unescaped) not in found[name], f"twice: {line}"
    found[name][frozenset(unescaped)] = float(value)


def _check_histogram(name: str, found: dict[str, dict[Labels, float]]) -> None:
    rows: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, value in found[f"{name}_bucket"].items():
        bound = float(dict(labels)["le"])
        rows[frozenset(pair for pair in labels if pair[0] != "le")].append((bound, value))
    for labels, row in rows.items():
        counts = [count for _, count in sorted(row)]
        assert counts == sorted(counts)
        assert sorted(row)[-1] == (float("inf"), found[f"{name}_count"][labels])
        assert found[f"{name}_sum"][labels] >= 0
