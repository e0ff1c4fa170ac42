"""What training calls inside a compiled function: the compiler traces nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import nn

import ckpt_core
from ckpt_core import Checkpointer

ENGINE = Path(ckpt_core.__file__).parent
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the compiler's own
    pytest.mark.skipif(
        not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
        reason="this torch cannot be told what not to trace",
    ),
]


def traced(call: FunctionType) -> set[str]:
    """What is traced of the engine where a compiled function makes this call, step after step."""
    from torch._dynamo.convert_frame import input_codes

    def trained(x: torch.Tensor, step: int) -> torch.Tensor:
        doubled = x * 2
        call(step)
        return doubled + 1

    torch._dynamo.reset()
    compiled = torch.compile(trained, backend="eager")
    for step in (1, 2, 3):
        assert torch.equal(compiled(torch.ones(2), step), torch.full((2,), 3.0))
    codes = {code for reference in input_codes.seen if (code := reference()) is not None}
    assert {trained.__code__, call.__code__} <= codes
    return {code.co_qualname for code in codes if ENGINE in Path(code.co_filename).parents}


def save(ck: Checkpointer, model: nn.Linear, step: int) -> None:
    ck.save(step, {"m": model})


def save_by_layers(ck: Checkpointer, model: nn.Linear, step: int) -> None:
    made = ck.begin(step, {"w": model.weight})
    made.stage(["w"])
    made.seal()


def save_files(ck: Checkpointer, model: nn.Linear, step: int) -> None:
    made = ck.begin_files(step, f"at-{step}")
    made.add("model.pt", {"w": model.weight})
    made.seal()


def others(ck: Checkpointer, model: nn.Linear, step: int) -> None:
    ck.prepare({"m": model})
    ck.wait_staged()
    ck.wait()
    ck.restore({"m": model})


@pytest.mark.parametrize("call", [save, save_by_layers, save_files, others])
def test_calls_in_a_compiled_function_are_not_traced(
    tmp_path: Path, call: Callable[[Checkpointer, nn.Linear, int], None]
) -> None:
    model = nn.Linear(3, 3)
    with Checkpointer(tmp_path) as ck:
        assert traced(lambda step: call(ck, model, step)) == set()
        ck.wait()
        saved = {save_files: 0, others: 0}.get(call, 2)
        assert len(ck.steps()) == saved
