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
