"""What `nox -s compat` installs is what pyproject.toml asks for at the least."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

TOP = Path(__file__).parents[1]

OF_EXTRAS = ("test", "bench", "lightning", "deepspeed", "remote")
"""As the session installs them."""


def asked_for() -> dict[str, Version]:
    """The lower bound of each requirement; the highest where several ask."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][extra] for extra in OF_EXTRAS]
    found: dict[str, Version] = {}
    for text in sum(extras, project["dependencies"]):
        requirement = Requirement(text)
        (bound,) = requirement.specifier
        assert bound.operator == ">=", text
        found[requirement.name] = max(
            found.get(requirement.name, Version("0")), Version(bound.version)
        )
    return found


def test_the_oldest_releases_are_those_that_are_asked_for() -> None:
    lines = (TOP / ".ci" / "oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for companion in ("click", "pyparsing", "pytorch-lightning"):
        del pins[companion]
    assert {name: Version(pin) for name, pin in pins.items()} == asked_for()
