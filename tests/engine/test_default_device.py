"""What the engine makes for itself is in host memory, whatever `torch.set_default_device` says.

Tested with "meta", whose tensors have no bytes: whatever is made there by mistake is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, Options, RngState
from ckpt_core.data.order import order_of
from tests.state.state_helpers import same

SMALL = {"chunk_bytes": "64KiB", "staging_bytes": "4MiB"}


@contextmanager
def default_device(kind: str) -> Iterator[None]:
    torch.set_default_device(kind)
    try:
        yield
    finally:
        torch.set_default_device(None)


def tensors(seed: int) -> dict[str, Any]:
    """Leaves of every form that a restore puts together."""
    torch.manual_seed(seed)
    base, dense = torch.randn(200, 300), seed * torch.eye(5)
    complex_ = torch.randn(30, dtype=torch.complex64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = {"csr": dense.to_sparse_csr(), "coo": dense.to_sparse().coalesce()}
        quantized = torch.quantize_per_tensor(torch.randn(50), 0.1, 0, torch.qint8)
    return {
        "base": base,
        "view": base[3:5],
        "strided": torch.randn(40, 50).t(),
        "conj": complex_.conj(),
        "negative": complex_.conj().imag,
        "quantized": quantized,
        "empty": torch.empty(0, 3),
        "scalar": torch.randn(()),
        "array": np.arange(20.0) + seed,
        **sparse,
    }


def plain(tree: dict[str, Any]) -> dict[str, Any]:
    """The values of sparse and quantized tensors as dense ones."""
    dense = {"csr": tree["csr"].to_dense(), "coo": tree["coo"].to_dense()}
    return {**tree, **dense, "quantized": tree["quantized"].int_repr()}


@pytest.mark.parametrize("mode", ["host", "direct"])
def test_every_form_of_leaf_is_saved_loaded_and_restored(root: Path, mode: str) -> None:
    state, live = tensors(1), tensors(2)
    with default_device("meta"):
        with Checkpointer(root, Options(mode=mode, **SMALL)) as ck:
            for step in range(2):
                ck.save(step, state)
            ck.wait()
            assert ck.restore(live) is not None
        loaded = ckpt_core.load(root)
    assert same(plain(loaded), plain(state))
    assert same(plain(live), plain(state))


def test_a_fresh_optimizer_and_generators_are_restored(root: Path) -> None:
    model = torch.nn.Linear(8, 9)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    fresh = torch.optim.AdamW(model.parameters())
    with default_device("meta"), Checkpointer(root) as ck:
        ck.save(1, {"model": model, "optimizer": optimizer, "rng": RngState()})
        ck.wait()
        ck.restore({"model": model, "optimizer": fresh, "rng": RngState()})
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_layers_and_named_files_are_saved(root: Path) -> None:
    state = {"w": torch.randn(3_000), "t": torch.randn(30, 40).t()}
    with default_device("meta"), Checkpointer(root, Options(**SMALL)) as ck:
        save = ck.begin(1, {"w": state["w"]})
        save.stage(["w"])
        save.seal(state)
        files = ck.begin_files(2, "tag")
        files.add("all", state, eager=True)
        files.seal()
        ck.wait()
    assert same(ckpt_core.load(root), state)
    assert same(torch.load(root / "tag" / "all"), state)


def test_leaves_that_share_memory_here_alone_are_compared_in_host_memory(root: Path) -> None:
    one = torch.randn(10)
    with default_device("meta"), Checkpointer(root) as ck:
        ck.save(1, {"a": one.clone(), "b": one.clone()}).committed.result(60)
        shared = torch.zeros_like(one, device="cpu")
        assert ck.restore({"a": shared, "b": shared}) is not None
    assert torch.equal(shared, one)


def test_the_order_of_samples_is_drawn_in_host_memory() -> None:
    expected = [order_of(40, stream=stream).tolist() for stream in (None, 7)]
    with default_device("meta"):
        assert [order_of(40, stream=stream).tolist() for stream in (None, 7)] == expected
