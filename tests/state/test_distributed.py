"""Local parts of DTensors: saved with their place in the whole, and filled from any other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt_core.state import RngState, flatten
from tests.crash.warm import Warm
from tests.multirank.crew import all_well

TOP = Path(__file__).parents[2]
PROGRAMS = "tests.state.distributed_programs"
LIMIT = 16 * 1024


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """A process that has imported the programs, whose children are the ranks."""
    environ = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    # torch imports the second one for the first optimizer of a process, which takes each rank a second.
    with Warm(PROGRAMS, "torch._dynamo.config", environ=environ) as process:
        yield process


@pytest.mark.parametrize(
    ("program", "world"),
    [
        ("fsdp2_leaves_tile_the_whole", 2),
        ("fsdp2_leaves_tile_the_whole", 4),
        ("fsdp2_state_restores_in_place", 4),
        ("fsdp2_and_plain_states_exchange", 2),
        ("custom_modules_load_dtensors", 2),
        ("hybrid_sharding_counts_replicas", 4),
        ("tensor_parallel_boxes_are_where_the_data_is", 4),
        ("tensor_parallel_state_restores", 4),
        ("trees_of_dtensors", 4),
        ("on_the_device_of_the_mesh", 2),
        ("refused", 2),
    ],
)
def test_on_every_rank(warm: Warm, program: str, world: int, tmp_path: Path) -> None:
    arguments = {"program": f"{PROGRAMS}:{program}", "folder": str(tmp_path)}
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call="tests.state.ranks:in_a_group",
        world_size=world,
        arguments=arguments,
    )
    all_well(outcomes)


def test_a_state_without_dtensors_does_not_import_them() -> None:
    code = (
        "import sys, torch\n"
        "from ckpt_core.state import flatten\n"
        "flatten({'m': torch.nn.Linear(2, 2), 't': torch.ones(2)}, eager_leaf_bytes=0)\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=TOP, check=True, timeout=60)


# -- where leaves came from ----------------------------------------------------------------------

BUFFERS = {"running_mean", "running_var", "num_batches_tracked"}


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def buffers_of(state: Any) -> frozenset[str]:
    return flatten(state, eager_leaf_bytes=LIMIT).names_of_buffers()


def test_buffers_of_modules_are_known_by_name() -> None:
    model = batch_norm()
    state = {"m": model, "o": torch.optim.SGD(model.parameters()), "t": torch.ones(2)}
    assert buffers_of(state) == {f"m.1.{name}" for name in BUFFERS}
    assert buffers_of(model) == {f"1.{name}" for name in BUFFERS}


def test_buffers_of_a_state_dict_are_not_known() -> None:
    assert buffers_of({"m": batch_norm().state_dict()}) == frozenset()


def test_buffers_are_known_wherever_the_tree_shows_them_first() -> None:
    model = batch_norm()
    state = {"first": model.state_dict(), "then": model}
    assert buffers_of(state) == {f"first.1.{name}" for name in BUFFERS}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_buffers_of_a_wrapped_module_are_known() -> None:
    class Holder:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def state_dict(self) -> Any:
            return self.module.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.module.load_state_dict(state)

    wrapped = nn.parallel.DistributedDataParallel(batch_norm())
    state = {"ddp": wrapped, "held": Holder(batch_norm())}
    ddp = {f"ddp.module.1.{name}" for name in BUFFERS}
    assert buffers_of(state) == ddp | {f"held.1.{name}" for name in BUFFERS}


def test_what_is_a_parameter_too_is_no_buffer() -> None:
    model = batch_norm()
    model.register_buffer("alias", model[0].weight.data)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    expected = {f"m.1.{name}" for name in BUFFERS} | {"m.sparse", "m.sparse.indices"}
    assert buffers_of({"m": model}) == expected


def test_leaves_of_rng_states_are_known_wherever_they_are() -> None:
    class Loader:
        def __init__(self) -> None:
            self.rng, self.weights = RngState(), torch.ones(3)

        def state_dict(self) -> Any:
            return {"weights": self.weights, "rng": self.rng, "more": self.weights * 2}

        def load_state_dict(self, state: Any) -> None:
            self.rng.load_state_dict(state["rng"])

    flat = flatten({"a": RngState(), "data": Loader(), "t": torch.ones(1)}, eager_leaf_bytes=LIMIT)
    names = {leaf.spec.name for leaf in flat.leaves}
    rng = {name for name in names if name.startswith(("a.", "data.rng."))}
    assert {"a.torch", "data.rng.torch"} <= rng
    assert flat.names_of_rng() == rng and not flat.names_of_buffers()
    assert not flatten({"t": torch.ones(1)}, eager_leaf_bytes=LIMIT).names_of_rng()
