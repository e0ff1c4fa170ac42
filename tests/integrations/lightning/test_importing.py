"""A run changes over in its middle, from Lightning's own checkpoints and back: to the same bits."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from ckpt_core import ConfigError, UntrustedData, committed_steps
from ckpt_core.cli import exported
from ckpt_core.cli.exporting import export_step
from ckpt_core.cli.importing import import_source
from ckpt_core.cli.requests import ExportRequest, ImportRequest
from tests.integrations.lightning.models import BATCH_SIZE, Net, Noisy, Plateau
from tests.integrations.lightning.running import differences, ending, fit, saver

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
PLACES = {7: torchdata.StatefulDataLoader, 10: DataLoader}
"""In the middle of the second epoch, where Lightning needs a loader that says where it is, and at its end,
where it goes on with one that does not."""


class Sure(Net):
    """Without random numbers, which Lightning does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].p = 0.0


class SurePlateau(Plateau, Sure):
    """Its schedule needs a metric at the end of an epoch."""


def loader_of(place: int) -> Callable[[], Any]:
    return lambda: PLACES[place](Noisy(augment=False), batch_size=BATCH_SIZE)


@pytest.fixture(autouse=True)
def without_advice() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        warnings.filterwarnings("ignore", "The dirpath has changed from")
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        yield


def _stock(folder: Path, make: Callable[[], Net], place: int, **more: Any) -> Any:
    keeps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    return fit(make, loader_of(place), keeps, val=loader_of(place)(), **more)


def _sure(ending: dict[str, Any]) -> dict[str, Any]:
    """But for generators, which Lightning does not save, and for its count of steps that loggers have seen,
    which it takes one too far when it goes on between two epochs."""
    return {name: value for name, value in ending.items() if name not in ("rng", "logged")}


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> int:
    step: int = request.param
    return step


@pytest.fixture(scope="module")
def stock(place: int, tmp_path_factory: pytest.TempPathFactory) -> dict[type[Net], Any]:
    """Runs under Lightning alone: a file from their middle, and how they ended."""
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make in (Sure, SurePlateau):
            folder = tmp_path_factory.mktemp(make.__name__)
            whole = ending(*_stock(folder, make, place))
            made[make] = folder / f"step={place}.ckpt", whole
    return made


@pytest.mark.parametrize("make", [Sure, SurePlateau])
def test_a_run_changes_over_in_its_middle(
    make: type[Net], place: int, stock: Any, tmp_path: Path
) -> None:
    file, whole = stock[make]
    import_source(ImportRequest(file, str(tmp_path / "r")))
    assert committed_steps(tmp_path / "r") == (place,)
    loader = loader_of(place)
    here = ending(*fit(make, loader, saver(tmp_path / "r", every_n_steps=2), val=loader()))
    there = ending(*_stock(tmp_path / "s", make, place, ckpt_path=str(file)))
    assert differences(here, there) == []
    if make is Sure:  # at the end of an epoch Lightning goes on without the plateau's step
        assert differences(_sure(here), _sure(whole)) == []
    assert committed_steps(tmp_path / "r")[-1] == 15


class _Full(exported._Named):
    def write(self, data: Any, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_step_goes_back_to_lightning(
    place: int, stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, loader = saver(tmp_path / "ckpts", every_n_steps=1, save_last=False), loader_of(place)
    fit(Sure, loader, every, val=loader())
    file = tmp_path / "back.ckpt"
    request = ExportRequest(str(tmp_path / "ckpts"), file, to="lightning", step=place)
    with monkeypatch.context() as full:
        full.setattr(exported, "_Named", _Full)
        with pytest.raises(OSError, match="No space left"):
            export_step(request)
    export_step(request)
    assert b"ckpt_lightning" not in file.read_bytes()
    back = ending(*_stock(tmp_path / "s", Sure, place, ckpt_path=str(file)))
    assert differences(_sure(back), _sure(stock[Sure][1])) == []


class Size:
    """A hyper-parameter of a class of one's own."""

    width = 3


def test_hyper_parameters_of_ones_own_classes_go_back_where_they_are_trusted(
    tmp_path: Path,
) -> None:
    plain = {"state_dict": {"w": torch.ones(3)}, "loops": {}, "optimizer_states": []}
    named = {"pytorch-lightning_version": "2.5.4", "global_step": 3, "callbacks": {}}
    torch.save(plain | named | {"hyper_parameters": {"size": Size()}}, tmp_path / "a.ckpt")
    root, file = str(tmp_path / "r"), tmp_path / "b.ckpt"
    import_source(ImportRequest(tmp_path / "a.ckpt", root, trusted=True))
    with pytest.raises(UntrustedData, match=r"Size.*add --trusted"):
        export_step(ExportRequest(root, file, to="lightning"))
    assert not file.exists()
    export_step(ExportRequest(root, file, to="lightning", trusted=True))
    found = torch.load(file, weights_only=False)
    assert found["hyper_parameters"]["size"].width == 3
    with pytest.raises(ConfigError, match="--trusted: in this format no object is built"):
        export_step(ExportRequest(root, tmp_path / "c.pt", trusted=True))


def test_what_no_run_goes_on_from_is_refused(tmp_path: Path) -> None:
    weights = {"state_dict": {}, "pytorch-lightning_version": "2.5.4", "global_step": 3}
    torch.save(weights, tmp_path / "w.ckpt")
    with pytest.raises(ConfigError, match="lacks loops, optimizer_states"):
        import_source(ImportRequest(tmp_path / "w.ckpt", str(tmp_path / "r")))
    (tmp_path / "sharded").mkdir()
    for name in (".metadata", "meta.pt"):
        (tmp_path / "sharded" / name).touch()
    with pytest.raises(ConfigError, match="consolidate_checkpoint"):
        import_source(ImportRequest(tmp_path / "sharded", str(tmp_path / "r")))
    with pytest.raises(ConfigError, match="written whole"):
        export_step(ExportRequest(str(tmp_path), tmp_path / "x", to="lightning", strip=True))
