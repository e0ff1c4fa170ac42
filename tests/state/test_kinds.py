"""One table of containers, for readers with torch and without."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ckpt_core.state
from ckpt_core.state import KINDS
from ckpt_core.state.nodes import Map, Record, Seq


def test_whoever_only_looks_at_a_skeleton_starts_without_torch_and_numpy() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from ckpt_core.state import KINDS; assert KINDS['list'].type is list"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_name_of_the_door_is_there() -> None:
    assert all(hasattr(ckpt_core.state, name) for name in ckpt_core.state.__all__)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_is_of_one_form_and_of_a_type_of_its_name(kind: ckpt_core.state.kinds.Kind) -> None:
    assert kind.form in (Seq, Map, Record)
    assert (kind.form is Record) == (not kind.module)
    assert not kind.module or kind.type.__name__ == kind.tag
