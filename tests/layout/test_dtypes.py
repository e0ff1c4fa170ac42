from __future__ import annotations

import pytest
import torch

from ckpt_core.errors import ConfigError
from ckpt_core.layout import itemsize, nbytes
from ckpt_core.layout.dtypes import CODE_BITS, STORAGE
from ckpt_core.types import LeafSpec

ALL = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
QUANTIZED = sorted(name for name in ALL if name.startswith(("qint", "quint")))


@pytest.mark.parametrize("name", sorted(ALL.keys() - set(QUANTIZED)))
def test_itemsize_is_what_torch_says(name: str) -> None:
    assert itemsize(name) == ALL[name].itemsize


@pytest.mark.parametrize("name", sorted(STORAGE))
def test_a_stored_element_has_as_many_bytes_as_a_torch_element(name: str) -> None:
    kept = STORAGE[name]
    assert CODE_BITS[kept.code] * (kept.trailing or 1) == 8 * kept.itemsize


def test_every_itemsize_is_a_power_of_two() -> None:
    assert {kept.itemsize for kept in STORAGE.values()} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_dtype_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(ConfigError, match="int_repr"):
        itemsize(name)


@pytest.mark.parametrize("name", ["", "float", "torch.float32", "F32", "float128"])
def test_an_unknown_dtype_is_named_in_the_error(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        itemsize(name)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float32", (), 4),
        ("float32", (0,), 0),
        ("bfloat16", (3, 5), 30),
        ("complex128", (2,), 32),
        ("complex32", (7,), 28),
        ("bool", (2**60,), 2**60),
        ("int64", (2**62, 0), 0),
    ],
)
def test_nbytes_is_elements_times_itemsize(dtype: str, shape: tuple[int, ...], size: int) -> None:
    assert nbytes(LeafSpec("a", dtype, shape)) == size


@pytest.mark.parametrize(
    "shape", [(-1,), (-1, -1), (2**60,), (2**40, 2**40, 0), (1,) * 300], ids=lambda s: str(s)[:20]
)
def test_a_shape_outside_the_limits_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="dimensions"):
        nbytes(LeafSpec("a", "float32", shape))
