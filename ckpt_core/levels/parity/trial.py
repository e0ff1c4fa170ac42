"""What `doctor` asks of parity: how fast it is computed here, and whether the nodes of a group answer."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from ckpt_core.errors import CkptError
from ckpt_core.levels.mailbox import Plan
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.opening import group_of, open_kept, open_root
from ckpt_core.levels.tokens import TOKEN_VARIABLE

_PIECE_BYTES = 1 << 20
_TIMES = 9


def parity_speed(text: str, *, times: int = _TIMES) -> tuple[str, float]:
    """By what the parity of a shape is computed, and how many bytes of data it takes for each second.

    All of a stripe's parity, in memory that is used again: the arithmetic alone.

    Raises:
        ImportError: NumPy is not installed.
    """
    import numpy as np

    from ckpt_core.levels.parity import isal
    from ckpt_core.levels.parity.codes import Code, combine

    shape = Shape.parse(text)
    code = Code(shape.k, shape.m)
    rows = [code.coefficients(range(shape.k), shape.k + number) for number in range(shape.m)]
    blocks = [np.full(_PIECE_BYTES, n + 1, np.uint8) for n in range(shape.k)]
    into = np.zeros(_PIECE_BYTES, np.uint8)
    took = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        for row in rows:
            combine(row, blocks, into)
        took.append(time.perf_counter() - begun)
    by = "ISA-L" if isal.is_there() else "NumPy"
    return by, shape.k * _PIECE_BYTES / median(took[1:])


def silent_nodes(plan: Plan) -> dict[str, str]:
    """The nodes of a plan's group that do not let this one read as after a loss, and why.

    With the token that the plan names, unless the environment names one.
    """
    group = group_of(plan)
    if plan.serve is None or group is None:
        return {}
    os.environ.setdefault(TOKEN_VARIABLE, plan.serve.token_file)
    parts = [part for part in group.parts if part != plan.part]
    with ThreadPoolExecutor(len(parts), thread_name_prefix="ckpt-parity") as threads:
        answers = threads.map(lambda part: _why(plan, part), parts)
        return {part: why for part, why in zip(parts, answers, strict=True) if why}


def _why(plan: Plan, part: str) -> str:
    try:
        with open_root(plan, part) as root, open_kept(plan, part) as kept:
            root.steps()
            kept.directories()
    except CkptError as exc:
        return str(exc)
    return ""
