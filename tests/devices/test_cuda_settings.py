"""What training on CUDA devices sets up around a save: each setting here with one save and one restore."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt_core
from ckpt_core import Checkpointer, Options, RngState

TOP = Path(__file__).parents[2]
SMALL = {"chunk_bytes": "64KiB", "staging_bytes": "2MiB", "keep_last": None}

pytestmark = [
    pytest.mark.cuda,
    # CUDA's own context may come with the first product of a thread, which warns.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]


class Training:
    """A model with buffers, an optimizer and a scaler, all on one device."""

    def __init__(self, device: str = "cuda", *, seed: int = 0, **adamw: Any) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(128, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 128)]
        self.device = torch.device(device)
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **adamw)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)

    def step(self, number: int, *, dtype: torch.dtype | None = None, scaled: bool = False) -> None:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(32, 128, generator=generator).to(self.device)
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = self.model(inputs).square().mean()
        if not scaled:
            loss.backward()
            self.optimizer.step()
            return
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def copies(self) -> Any:
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict())
        return on_host(dict(zip(("model", "optimizer", "scaler"), parts, strict=True)))


def on_host(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: on_host(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [on_host(value) for value in tree]
    return tree


def differences(found: Any, expected: Any) -> list[str]:
    left, right = dict(parts(found)), dict(parts(expected))
    assert left.keys() == right.keys()
    return [name for name, value in right.items() if not same(left[name], value)]


def parts(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict | list | tuple):
        yield name, tree
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield from parts(value, f"{name}.{key}")


def same(found: Any, expected: Any) -> bool:
    return torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected


def check_resumes(root: Path, make: Callable[[int], Training], **step: Any) -> None:
    """What was saved at step 3 goes on, in place and in a fresh job, as the run did that saved it."""
    run = make(0)
    with Checkpointer(root, Options(**SMALL)) as ck:
        for number in range(1, 4):
            run.step(number, **step)
        ck.save(3, run.state())
        run.step(4, **step)
        ck.wait()
        expected = run.copies()
        run.step(5, **step)
        assert ck.restore(run.state()) is not None
        run.step(4, **step)
        assert differences(run.copies(), expected) == []
    fresh = make(1)
    with Checkpointer(root, Options(**SMALL)) as ck:
        assert ck.restore(fresh.state()) is not None
        fresh.step(4, **step)
    assert differences(fresh.copies(), expected) == []


# -- optimizers, scalers, precisions --------------------------------------------------------------


@pytest.mark.parametrize(
    "adamw",
    [
        {"fused": True},
        {"capturable": True},
        {"foreach": True},
        {"foreach": False},
        {"amsgrad": True},
    ],
    ids=str,
)
def test_every_kind_of_adamw_resumes_bit_for_bit(root: Path, adamw: dict[str, bool]) -> None:
    check_resumes(root, lambda seed: Training(seed=seed, **adamw))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_and_half_precision_resume_bit_for_bit(root: Path, fused: bool) -> None:
    check_resumes(
        root, lambda seed: Training(seed=seed, fused=fused), dtype=torch.float16, scaled=True
    )


def test_autocast_to_bfloat16_resumes_bit_for_bit(root: Path) -> None:
    check_resumes(root, lambda seed: Training(seed=seed), dtype=torch.bfloat16)


def test_random_numbers_of_the_device_go_on(root: Path) -> None:
    state = {"rng": RngState(), "weight": torch.randn(1000, device="cuda")}
    with Checkpointer(root) as ck:
        ck.save(1, state)
        expected = torch.randn(1000, device="cuda").cpu()
        ck.wait()
        assert ck.restore(state) is not None
        assert torch.equal(torch.randn(1000, device="cuda").cpu(), expected)


# -- streams and devices --------------------------------------------------------------------------


def test_training_in_a_stream_of_its_own_saves_what_that_stream_made(root: Path) -> None:
    weight = torch.zeros(8_000_000, device="cuda")
    beside, expected = torch.cuda.Stream(), {}
    with Checkpointer(root, Options(keep_last=None)) as ck:
        for step in range(1, 6):
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                torch.cuda._sleep(20_000_000)
                ck.wait_staged()
                weight.add_(step)
            torch.cuda.current_stream().wait_stream(beside)
            ck.save(step, {"weight": weight})
            expected[step] = sum(range(1, step + 1))
    for step, value in expected.items():
        found = ckpt_core.load(root / f"step-{step:012d}")["weight"]
        assert torch.equal(found, torch.full_like(found, value))


def test_a_save_inside_another_stream_belongs_to_that_stream(root: Path) -> None:
    weight, beside = torch.zeros(8_000_000, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with Checkpointer(root) as ck, torch.cuda.stream(beside):
        torch.cuda._sleep(100_000_000)
        weight.add_(7)
        ck.save(1, {"weight": weight})
        ck.wait_staged()
        weight.zero_()
    found = ckpt_core.load(root)["weight"]
    assert torch.equal(found, torch.full_like(found, 7))


@pytest.fixture
def by_default_on_the_device() -> Iterator[None]:
    torch.set_default_device("cuda")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.usefixtures("by_default_on_the_device")
def test_tensors_are_where_they_were_whatever_the_default_device(root: Path) -> None:
    state = {
        "device": torch.randn(50_000),
        "host": torch.randn(50_000, device="cpu"),
        "number": torch.tensor(3.0),
        "bits": torch.ones(100, dtype=torch.bool).cpu(),
    }
    assert state["device"].is_cuda
    expected = on_host(state)
    with Checkpointer(root, Options(**SMALL)) as ck:
        ck.save(1, state)
        ck.wait()
        for tensor in state.values():
            tensor.zero_()
        assert ck.restore(state) is not None
    assert differences(on_host(state), expected) == []
    loaded = ckpt_core.load(root)
    assert all(tensor.is_cpu for tensor in loaded.values())
    assert differences(loaded, expected) == []


_TWO = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")


@_TWO
def test_a_state_on_all_devices_is_saved_and_restored(root: Path) -> None:
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    runs = {device: Training(device, seed=index) for index, device in enumerate(devices)}
    state = {device.replace(":", ""): run.state() for device, run in runs.items()}
    with Checkpointer(root, Options(**SMALL)) as ck:
        for run in runs.values():
            run.step(1)
        expected = [run.copies() for run in runs.values()]
        ck.save(1, state)
        for run in runs.values():
            run.step(2)
        ck.wait()
        assert torch.cuda.current_device() == 0
        assert ck.restore(state) is not None
    for run, copy in zip(runs.values(), expected, strict=True):
        assert differences(run.copies(), copy) == []


ON_ITS_OWN = """
import sys, torch
from ckpt_core import Checkpointer
torch.cuda.set_device(1)
state = {"weight": torch.ones(4_000_000, device="cuda:1")}
with Checkpointer(sys.argv[1]) as ck:
    ck.save(1, state); ck.wait(); ck.restore(state); ck.save(2, state); ck.wait()
print(torch._C._cuda_hasPrimaryContext(0))
"""


@_TWO
def test_a_rank_opens_no_context_on_another_device(root: Path) -> None:
    assert python(ON_ITS_OWN, root) == "False"


UNTOUCHED = """
import sys, torch
from ckpt_core import Checkpointer, Options
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
with Checkpointer(sys.argv[1], Options(mode="auto")) as ck:
    ck.prepare(state)
    for step in range(1, 4):
        model(torch.randn(4, 300)).sum().backward()
        optimizer.step()
        ck.save(step, state)
    ck.wait()
    ck.restore(state)
print(torch.cuda.is_initialized())
"""


def test_a_state_on_the_host_leaves_cuda_alone(root: Path) -> None:
    assert python(UNTOUCHED, root) == "False"


def python(code: str, root: Path) -> str:
    command = [sys.executable, "-c", code, str(root)]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- memory ---------------------------------------------------------------------------------------


def test_a_device_without_room_for_clones_is_staged_through_the_host_and_says_so(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.cuda.empty_cache()
    state = {f"weight{index}": torch.randn(8_000_000, device="cuda") for index in range(16)}
    expected = on_host(state)
    free = torch.cuda.mem_get_info()[0]
    filling = torch.empty(free - 256 * 2**20, dtype=torch.uint8, device="cuda")
    caplog.set_level(logging.WARNING, "ckpt_core")
    with Checkpointer(root, Options(mode="device", keep_last=None)) as ck:
        ck.save(1, state)
        ck.wait()
        assert ck.gauges.mode == "host"
        del filling
        torch.cuda.empty_cache()
        ck.save(2, state)
        ck.wait()
        assert ck.gauges.mode == "device"
    told = [record for record in caplog.records if "no room for clones" in record.message]
    assert len(told) == 1
    for step in (1, 2):
        loaded = ckpt_core.load(root / f"step-{step:012d}")
        assert differences(loaded, expected) == []
