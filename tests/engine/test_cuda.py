"""The same promises with the state on a CUDA device; run where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_training import same

import ckpt_core
from ckpt_core import BarrierError, Checkpointer, Options, RngState

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES = ["host", "device", "auto"]


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.BatchNorm1d(2048), torch.nn.Linear(2048, 512)
    ).cuda()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ck: Checkpointer) -> None:
    optimizer.zero_grad()
    model(torch.randn(32, 512, device="cuda")).square().mean().backward()
    ck.wait_staged()
    optimizer.step()


def on_host(tree: object) -> object:
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: on_host(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [on_host(value) for value in tree]
    return tree


@pytest.mark.parametrize("mode", MODES)
def test_every_committed_step_is_the_state_at_its_step(tmp_path: Path, mode: str) -> None:
    model, optimizer = model_and_optimizer()
    options = Options(mode=mode, keep_last=None, chunk_bytes="1MiB", staging_bytes="8MiB")
    copies = {}
    with Checkpointer(tmp_path, options) as ck:
        for step in range(8):
            train(model, optimizer, ck)
            copies[step] = (on_host(model.state_dict()), on_host(optimizer.state_dict()))
            ck.save(step, {"model": model, "optimizer": optimizer, "rng": RngState()})
    for step, (weights, moments) in copies.items():
        tree = ckpt_core.load(tmp_path / f"step-{step:012d}")
        assert same(dict(tree["model"]), dict(weights))
        assert same(tree["optimizer"]["state"], moments["state"])


@pytest.mark.parametrize("mode", MODES)
def test_a_state_is_restored_in_place_on_the_device(tmp_path: Path, mode: str) -> None:
    model, optimizer = model_and_optimizer()
    with Checkpointer(tmp_path, Options(mode=mode)) as ck:
        train(model, optimizer, ck)
        ck.save(1, {"model": model, "optimizer": optimizer})
        ck.wait()
        expected = on_host(model.state_dict())
        places = [parameter.data_ptr() for parameter in model.parameters()]
        train(model, optimizer, ck)
        assert ck.restore({"model": model, "optimizer": optimizer}) is not None
    assert same(on_host(model.state_dict()), expected)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_strided_and_mixed_states_keep_their_bytes(tmp_path: Path) -> None:
    base = torch.randn(300, 400, device="cuda")
    state = {"t": base.t(), "rows": base[::3], "host": torch.randn(5000), "half": base.bfloat16()}
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    with Checkpointer(tmp_path) as ck:
        ck.save(1, state)
    tree = ckpt_core.load(tmp_path)
    assert all(torch.equal(tree[name], expected[name]) for name in state)


@pytest.mark.parametrize("mode", MODES)
def test_layer_by_layer_on_the_device(tmp_path: Path, mode: str) -> None:
    model, _ = model_and_optimizer()
    tensors = dict(model.named_parameters())
    with Checkpointer(tmp_path, Options(mode=mode)) as ck:
        save = ck.begin(1, tensors)
        expected = {}
        for name in reversed(list(tensors)):
            expected[name] = tensors[name].detach().cpu().clone()
            save.stage([name])
            ck.wait_staged([name])
            tensors[name].data.zero_()
        save.seal({"model": model}).committed.result(timeout=60)
    tree = ckpt_core.load(tmp_path)
    assert all(torch.equal(tree["model"][name], expected[name]) for name in tensors)


def test_a_missing_barrier_is_found_on_the_device(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(4_000_000, device="cuda") for number in range(16)}
    options = Options(mode="host", debug_barrier=True, chunk_bytes="64KiB", staging_bytes="256KiB")
    with Checkpointer(tmp_path, options) as ck:
        handle = ck.save(1, state)
        state["w15"].add_(1)
        with pytest.raises(BarrierError, match="w15"):
            handle.committed.result(timeout=120)
        with pytest.raises(BarrierError):
            ck.wait()
