"""What training calls inside a compiled function: the compiler traces nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest
import torch
from engine_training import Gate
from torch import nn

import ckpt_core
from ckpt_core import Checkpointer, Options

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


def test_a_save_in_the_closure_of_a_compiled_step_is_of_the_state_before_it(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.zeros(4000)) for _ in range(20)]
    for param in params:
        param.grad = -torch.ones(4000)
    optimizer = torch.optim.SGD(params, lr=1.0)
    options = Options(chunk_bytes=4096, staging_bytes="64KiB", eager_leaf_bytes=0, mode="host")
    gate = Gate()
    with Checkpointer(tmp_path, options, files=gate) as ck:

        def closure() -> None:
            gate.shut_for(0.1)
            ck.save(1, dict(enumerate(params)))

        torch._dynamo.reset()
        torch.compile(lambda: optimizer.step(closure), backend="eager")()  # type: ignore[arg-type]
        ck.wait()
    tree = ckpt_core.load(tmp_path)
    assert all((leaf == 0).all() for leaf in tree.values())
    assert all((param == 1).all() for param in params)
