"""Figures and tables of the papers, from their own numbers: paper's value beside ours.

The numbers are in `pccheck_data` and `lightcheck_data`, each with its source; `ckpt_core.bench.papers` uses
them too.
"""

from collections.abc import Callable, Iterator

from ckpt_core.errors import ConfigError
from ckpt_core.simulate.failures import Trace
from ckpt_core.simulate.papers import lightcheck, lightcheck_data, pccheck, pccheck_data
from ckpt_core.simulate.papers.comparison import Comparison

PAPERS: dict[str, Callable[[Trace | None], Iterator[Comparison]]] = {
    "pccheck-5.2.3": pccheck.example,
    "pccheck-fig8": pccheck.figure_8,
    "pccheck-fig9": pccheck.figure_9,
    "pccheck-eq4": pccheck.equation_4,
    "lightcheck-table2": lightcheck.table_2,
    "lightcheck-fig9": lightcheck.figure_9,
    "lightcheck-table3": lightcheck.table_3,
}


def compare(name: str, trace: Trace | None = None) -> list[Comparison]:
    """A figure or table of a paper beside what we get; with `trace`, figures of runs on one use it.

    Raises:
        ConfigError: no such figure is known.
    """
    if name not in PAPERS:
        raise ConfigError(f"paper={name!r} is not known: choose of {', '.join(PAPERS)}")
    return list(PAPERS[name](trace))


__all__ = ["PAPERS", "Comparison", "compare", "lightcheck_data", "pccheck_data"]
