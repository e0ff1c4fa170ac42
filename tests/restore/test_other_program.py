"""Steps that are whole, and that this program cannot make: it is another one than saved them."""

from __future__ import annotations

import dataclasses
import enum
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ckpt_core import Checkpointer, CorruptCheckpoint, RestoreError


class Phase(enum.Enum):
    MAIN = 2


class Bits(enum.Flag):
    LOW = 1
    HIGH = 2


class Mine:
    def __init__(self) -> None:
        self.x = 1


@dataclasses.dataclass
class Settings:
    rate: int = 1


class Pair(NamedTuple):
    left: int


@dataclasses.dataclass
class OtherSettings:
    rate: int = 1
    decay: int = 2


class OtherPair(NamedTuple):
    left: int
    right: int


class OtherPhase(enum.Enum):
    FULL = 2


class OtherBits(enum.Flag):
    LOW = 1


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("Phase", Phase.MAIN, OtherPhase),
        ("Bits", Bits.HIGH, OtherBits),
        ("Mine", Mine(), None),
        ("Settings", Settings(), None),
        ("Settings", Settings(), OtherSettings),
        ("Pair", Pair(1), OtherPair),
    ],
)
def test_what_a_class_of_today_cannot_hold_is_not_called_damaged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
    other: type | None,
    trusted: bool,
) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"v": value, "w": torch.ones(3)}).committed.result(60)
    module = sys.modules[__name__]
    if other is None:
        monkeypatch.delattr(module, name)
    else:
        monkeypatch.setattr(module, name, other)
    live = {"v": None, "w": torch.zeros(3)}
    with Checkpointer(tmp_path) as ck:
        with pytest.raises(RestoreError, match=name) as caught:
            ck.restore(live, trusted=trusted)
        assert not isinstance(caught.value, CorruptCheckpoint)
        assert ("trusted=True" in str(caught.value)) == (other is None and not trusted)
        assert ("with the fields" in str(caught.value)) == (other in (OtherSettings, OtherPair))
        ck.save(2, {"w": torch.ones(3)}).committed.result(60)
        assert ck.steps() == (1, 2)
    assert not live["w"].any() and not (tmp_path / ".corrupt").exists()
