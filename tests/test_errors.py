"""Errors cross processes and are copied as they are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_core import errors
from ckpt_core.errors import CkptError
from ckpt_core.levels.far.door import Away
from ckpt_core.restore.failures import Retired

WHERE = Path("root", "step-000000000001")
PLAIN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CkptError) and "__init__" not in vars(kind)
]
ERRORS = [
    *[kind("it failed", step=1, rank=2, path=WHERE) for kind in PLAIN],
    errors.CommitError("failed", failures={2: errors.PersistError("full", rank=2)}, step=1),
    errors.StateMismatch("differs", problems=["w: a", "b: b"], path=WHERE),
    errors.CorruptCheckpoint("damaged", path=WHERE, expected="12", got="34", rank=0),
    errors.UnknownFormat("newer", version=9, path=WHERE),
    errors.UntrustedData("calls", type_name="os.system", path=WHERE),
    Away("is away", hopeless=True),
    Retired(WHERE),
]


@pytest.mark.parametrize(
    "again", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy]
)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_out_of_a_pickle_and_a_copy_as_it_was(
    error: CkptError, again: Callable[[CkptError], CkptError]
) -> None:
    error.add_note("a note")
    found = again(error)
    assert type(found) is type(error) and str(found) == str(error) and found.args == error.args
    assert repr(vars(found)) == repr(vars(error))
