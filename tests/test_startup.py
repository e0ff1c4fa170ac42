"""What processes of a run leave for later: they do the same, and only the imports differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.places import VARIABLE

TRAINED = """
import json, sys, torch
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(layer.parameters())
layer(torch.ones(2)).sum().backward()
optimizer.step()
told = {"before": "torch._dynamo.eval_frame" in sys.modules}
"""
COMPILED = """
doubled = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
told |= {"two": doubled(torch.ones(1)).item(), "after": "torch._dynamo.eval_frame" in sys.modules}
from torch._dynamo.utils import counters
told["graphs"] = counters["stats"]["unique_graphs"]
layer(torch.ones(2)).sum().backward()
torch.compile(optimizer.step, backend="eager")()
"""
TOLD = "\nprint(json.dumps(told))"


def told(code: str, **variables: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code + TOLD],
        stdout=subprocess.PIPE,
        env=os.environ | variables,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_process_that_compiles_nothing_imports_no_compiler_and_another_has_it_as_it_is() -> None:
    found = told(TRAINED + COMPILED, **{VARIABLE: "1"})
    assert found == {"before": False, "two": 2, "after": True, "graphs": 1}


def test_a_run_that_tries_everything_imports_what_torch_imports() -> None:
    assert told(TRAINED, **{VARIABLE: "all"})["before"]


def test_the_compiler_is_whole_for_whoever_asks_for_a_part_of_it() -> None:
    code = "import torch._dynamo.config as found\nfrom torch._dynamo import OptimizedModule\n"
    code += "import json\ntold = [found.__name__, OptimizedModule.__name__]"
    assert told(code, **{VARIABLE: "1"}) == ["torch._dynamo.config", "OptimizedModule"]


def test_a_part_of_the_compiler_that_is_asked_for_first_is_the_one_that_the_compiler_has() -> None:
    code = "import json, torch\nfrom torch._dynamo.convert_frame import input_codes, __spec__\n"
    code += "double = lambda x: 2 * x\ntorch.compile(double, backend='eager')(torch.ones(1))\n"
    code += "told = [__spec__.origin is not None, double.__code__ in input_codes]"
    assert told(code, **{VARIABLE: "1"}) == [True, True]


def test_asking_whether_a_module_is_compiled_imports_no_compiler_and_finds_one_that_is() -> None:
    code = "import json, sys, torch\nfrom torch._dynamo import OptimizedModule\n"
    code += "there = lambda: 'torch._dynamo.eval_frame' in sys.modules\n"
    code += "layer = torch.nn.Linear(1, 1)\ntold = [isinstance(layer, OptimizedModule), there()]\n"
    code += "compiled = torch.compile(layer, backend='eager')\n"
    code += "told += [isinstance(one, OptimizedModule) for one in (layer, compiled)]"
    assert told(code, **{VARIABLE: "1"}) == [False, False, False, True]


def test_a_function_that_was_marked_for_the_compiler_is_marked_once_it_is_there() -> None:
    code = "import json, sys, torch\n@torch._dynamo.allow_in_graph\ndef double(x): return 2 * x\n"
    code += "@torch.compiler.disable(recursive=False)\ndef same(x): return x\n"
    code += "told = ['torch._dynamo.eval_frame' in sys.modules, same(3)]\n"
    code += "compiled = torch.compile(lambda x: double(x), backend='eager', fullgraph=True)\n"
    code += "told += [compiled(torch.ones(1)).item(), "
    code += "torch._dynamo.trace_rules.is_callable_allowed(double)]"
    assert told(code, **{VARIABLE: "1"}) == [False, 3, 2, True]


WITHOUT_BYTES = """
import json, sys, torch
told = [torch.Generator().initial_seed() > 0, "torch._prims" in sys.modules]
"""


@pytest.mark.parametrize(
    "begin", ["torch.device('meta')", "torch._subclasses.FakeTensorMode()", "None"]
)
def test_whoever_has_tensors_without_bytes_has_what_computes_them(begin: str) -> None:
    code = WITHOUT_BYTES + "from contextlib import nullcontext\n"
    code += f"with {begin} or nullcontext():\n  x = torch.ones(2, 3)\n"
    code += "  told += [list(torch.nn.LayerNorm(3)(x).shape), 'torch._prims' in sys.modules]"
    assert told(code, **{VARIABLE: "1"}) == [True, False, [2, 3], begin != "None"]


def test_deterministic_algorithms_are_asked_for_without_the_compiler_which_is_told_later() -> None:
    code = "import json, sys, torch\ntorch.use_deterministic_algorithms(True)\n"
    code += (
        "told = [torch.are_deterministic_algorithms_enabled(), 'torch._inductor' in sys.modules]\n"
    )
    code += "import torch._inductor.config as settings\n"
    code += "told.append(getattr(settings, 'deterministic', True))"
    assert told(code, **{VARIABLE: "1"}) == [True, False, True]


@pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
def test_lightnings_metrics_come_without_the_packages_of_other_metrics() -> None:
    code = "import json, sys, torchmetrics\ntold = [torchmetrics.MeanMetric()(3.0).item(), "
    code += "*sorted({'matplotlib', 'scipy', 'transformers'} & sys.modules.keys())]"
    assert told(code, **{VARIABLE: "1"}) == [3.0]
