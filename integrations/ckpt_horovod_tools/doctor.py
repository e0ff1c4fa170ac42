"""Horovod, for `ckpt-core doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_core.cli.doctor import Finding, Framework, problem

_INSTALL = "build it as docs/horovod.md says"
_PROGRAM = """
import horovod.torch as hvd
import ckpt_horovod
told["controllers"] = [name for name in ("gloo", "mpi") if getattr(hvd, name + "_built")()]
"""


def _judge(told: Mapping[str, Any]) -> Iterator[Finding]:
    if told["controllers"] == []:
        yield problem("horovod", "built with neither Gloo nor MPI", _INSTALL)


FRAMEWORK = Framework(
    name="horovod", needs="ckpt_horovod", install=_INSTALL, place=3, program=_PROGRAM, judge=_judge
)
