"""FSDP2 under torchrun: what 4 ranks save, 2 restore, each reading its part; the same bits as with DCP.

The test starts this very file under torchrun: `save FOLDER` on 4 ranks, `restore FOLDER` on 2.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt_core
from ckpt_core import Checkpointer, Options, RngState, TorchStore
from tests.state.distributed_helpers import FSDP2_RUNS_ON_CPU, Net, optimizer_of, train

REPO = Path(__file__).parents[2]
TIMEOUT_S = 120
STEP = 2
OPTIONS = Options(chunk_bytes=16384, writers=2, timeout=60.0)

pytestmark = pytest.mark.skipif(
    not FSDP2_RUNS_ON_CPU,
    reason="FSDP2 of this torch does not run on a CPU",
)


def build(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    net = Net(seed, words=1001, width=64)
    for part in (net.narrow, net.wide, net.frozen, net.brief, net):
        fully_shard(part)
    return net, optimizer_of(net)


def tensors_of(net: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {f"model.{name}": tensor for name, tensor in net.state_dict().items()}
    for key, rows in opt.state_dict()["state"].items():
        found |= {f"optimizer.state.{key}.{name}": tensor for name, tensor in rows.items()}
    return found


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        for name, tensor in tensors.items()
    }


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype is right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def state_of(net: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": net, "optimizer": opt, "rng": RngState(), "step": STEP}


def engine(folder: Path) -> Checkpointer:
    return Checkpointer(folder / "ours", OPTIONS, coordination=TorchStore.from_env())


# -- on each rank --------------------------------------------------------------------------------


def save(folder: Path) -> None:
    """Save with the engine and with DCP, and note the whole tensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net, opt = build(0)
    train(net, opt, STEP)
    with engine(folder) as ck:
        ck.save(STEP, state_of(net, opt)).committed.result(TIMEOUT_S)
    model, optimizer = get_state_dict(net, opt)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder / "dcp"))
    truth = whole(tensors_of(net, opt))
    if dist.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")


def restore(folder: Path) -> None:
    """Restore with the engine and with DCP; every leaf is equal, and so are further steps."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net, opt = build(1)
    places = {name: t.to_local().data_ptr() for name, t in net.named_parameters()}
    with engine(folder) as ck:
        found = ck.restore(state_of(net, opt))
    assert found is not None and (found.step, found.world_size) == (STEP, 4)
    assert found.state["step"] == STEP
    assert places == {name: t.to_local().data_ptr() for name, t in net.named_parameters()}
    stored = sum(path.stat().st_size for path in found.path.glob("shard-*"))
    assert found.read_bytes < 0.7 * stored, (found.read_bytes, stored)

    other, other_opt = build(2)
    model, optimizer = get_state_dict(other, other_opt)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder / "dcp"))
    set_state_dict(other, other_opt, model_state_dict=model, optim_state_dict=optimizer)

    ours, theirs = tensors_of(net, opt), tensors_of(other, other_opt)
    assert {name: type(t) for name, t in ours.items()} == {n: type(t) for n, t in theirs.items()}
    assert_same(whole(ours), whole(theirs))
    assert_same(whole(ours), torch.load(folder / "truth.pt"))
    train(net, opt, 2)
    train(other, other_opt, 2)
    assert_same(whole(tensors_of(net, opt)), whole(tensors_of(other, other_opt)))


def stages(folder: Path) -> None:
    """Ranks of a part of a mesh save to a root of their own: a stage of a pipeline, a group of HSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    stage = mesh.get_local_rank("outer")
    torch.manual_seed(stage)
    own, common = torch.randn(601, 200), torch.arange(64.0 * 800).reshape(64, 800)
    own_part = distribute_tensor(own, mesh["inner"], [Shard(0)])
    common_part = distribute_tensor(common, mesh, [Replicate(), Shard(0)])
    group = TorchStore.from_process_group(mesh["inner"].get_group())
    with Checkpointer(folder / f"stage{stage}", OPTIONS, coordination=group) as ck:
        ck.save(1, {"own": own_part, "common": common_part}).committed.result(TIMEOUT_S)
    dist.barrier()
    for stage, seed in enumerate((0, 1)):
        torch.manual_seed(seed)
        assert ckpt_core.verify(folder / f"stage{stage}").ok
        loaded = ckpt_core.load(folder / f"stage{stage}")
        assert torch.equal(loaded["own"], torch.randn(601, 200))
        assert torch.equal(loaded["common"], common)


def halves(folder: Path) -> None:
    """Two of four ranks save what all four hold: no step may come of it, also where they are asked again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    part = distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)])
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    half = dist.get_rank() // 2
    group = TorchStore.from_process_group(groups[half])
    root, options = folder / f"half{half}", replace(OPTIONS, on_error="warn")
    with Checkpointer(root, options, coordination=group) as ck:
        for step in (1, 2):
            with pytest.raises(ckpt_core.CommitError, match=r"'w'.*nothing of elements \[\d+:\d+"):
                ck.save(step, {"w": part}).committed.result(TIMEOUT_S)
    assert not list(root.glob("step-*"))


# -- the test ------------------------------------------------------------------------------------


def torchrun(ranks: int, task: str, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), __file__, task, str(folder)]
    environment = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        # torchrun ends its ranks when it is told to end; what still lives then is killed.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output


def test_four_ranks_save_and_two_restore_the_same_bits_as_with_dcp(tmp_path: Path) -> None:
    torchrun(4, "save", tmp_path)
    torchrun(2, "restore", tmp_path)
    truth = torch.load(tmp_path / "truth.pt")
    tree = ckpt_core.load(tmp_path / "ours")
    states = tree["optimizer"]["state"]
    loaded = {f"model.{name}": tensor for name, tensor in tree["model"].items()}
    for key, rows in states.items():
        loaded |= {f"optimizer.state.{key}.{name}": tensor for name, tensor in rows.items()}
    assert_same(loaded, truth)
    assert ckpt_core.verify(tmp_path / "ours").ok


def test_ranks_of_a_part_of_a_mesh_save_whole_steps_to_roots_of_their_own(tmp_path: Path) -> None:
    torchrun(4, "stages", tmp_path)


def test_ranks_that_do_not_hold_all_of_a_tensor_commit_no_step(tmp_path: Path) -> None:
    torchrun(4, "halves", tmp_path)


def main(task: str, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tasks = {"save": save, "restore": restore, "stages": stages, "halves": halves}
    tasks[task](folder)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # DTensor's caches keep the process group, and so gloo's threads: one that drops the last collective's
    # tensors while Python ends aborts the process, also without the engine (docs/ranks.md). All that is
    # tested is done by now.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
