"""The generators of Python, NumPy and torch belong to the program that trains: we draw from none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt_core

PACKAGE = Path(ckpt_core.__file__).parent
INTEGRATIONS = PACKAGE.parent / "integrations"

_OWN = {"Random", "SystemRandom", "Generator", "RandomState", "default_rng", "SeedSequence"}
_STATES = {"getstate", "setstate", "get_state", "set_state"}
_OF_TORCH = set(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson"
    " manual_seed seed".split()
)
_PUT_BACK = {"data/fetch.py", "ckpt_horovod/separable.py"}
"""These seed them, for a sample and for a trial, and put them back."""

_PROGRAMS = ("bench/", "tune/")
"""Commands, which run in processes of their own; so do packages of integrations that end in `_tools`."""


def _draws(text: str) -> Iterator[str]:
    """Calls that draw from a generator of the whole process, or seed it."""
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call):
            continue
        path = ast.unparse(call.func)
        of, _, name = path.rpartition(".")
        if of == "random" or of.endswith(
            ("np.random", "numpy.random", "sys.modules['numpy'].random")
        ):
            if name not in _OWN | _STATES:
                yield path
        elif of == "torch" and name in _OF_TORCH:
            named = [keyword.arg for keyword in call.keywords]
            if "generator" not in named:
                yield path


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path
    for path in sorted(INTEGRATIONS.glob("ckpt_*/**/*.py")):
        name = path.relative_to(INTEGRATIONS).as_posix()
        if not name.partition("/")[0].endswith("_tools"):
            yield name, path


def test_no_module_that_trains_along_draws_from_a_generator_of_the_program() -> None:
    found = {
        name: draws
        for name, path in _modules()
        if not name.startswith(_PROGRAMS) and (draws := [*_draws(path.read_text())])
    }
    assert set(found) == _PUT_BACK, found


@pytest.mark.parametrize(
    "text",
    [
        "random.uniform(0, 1)",
        "np.random.rand()",
        "sys.modules['numpy'].random.seed(0)",
        "torch.rand(3)",
    ],
)
def test_a_draw_is_found(text: str) -> None:
    assert [*_draws(text)]


@pytest.mark.parametrize(
    "text",
    [
        "random.Random(0).random()",
        "random.getstate()",
        "torch.rand(3, generator=own)",
        "own.random()",
    ],
)
def test_a_generator_of_ones_own_may_be_drawn_from(text: str) -> None:
    assert not [*_draws(text)]
