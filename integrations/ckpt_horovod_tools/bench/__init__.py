"""The suite `horovod`: the same training on 2 ranks under Horovod, with each way to save, and with none.

LightCheck's comparison over Gloo, on real Horovod: iteration time with a save every 1, 5, 10, 20 iterations
over that of stock Horovod, and over that of the same without its spinning wait, which every way that saves
has too; and how often each way can save below 5 % overhead (its Table I).

    settings -> pair (one launch of `horovodrun`, which serves requests) -> rounds -> figures -> frequency

Horovod and `ckpt_horovod` are imported by the ranks alone; where they are missing, the run says how to
install them.
"""

from __future__ import annotations

from ckpt_horovod_tools.bench.suite import SUITE, HorovodSettings

__all__ = ["SUITE", "HorovodSettings"]
