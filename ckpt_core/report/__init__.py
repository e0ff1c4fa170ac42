"""One HTML page of a run, made from the events that it wrote down (`Options.events_file`).

    gather(paths) -> facts.py     lines of all ranks on one clock, as data classes; `Following`: as they come
                  -> ranks.py     those of each rank: saves, waits, iterations
                  -> advice.py    figures in words, and what follows from them
                  -> drawing.py   charts as SVG
                  -> page.py      page(facts): the whole text; plain_page(...) where there are no events

Idea: the page needs nothing but itself: no network, no script. What a file says is shown, never trusted:
all of its text is escaped. Sees no tensors.
"""

from ckpt_core.report.facts import Facts, Following, gather
from ckpt_core.report.page import page, plain_page
from ckpt_core.report.ranks import Mark, RankFacts, Save

__all__ = ["Facts", "Following", "Mark", "RankFacts", "Save", "gather", "page", "plain_page"]
