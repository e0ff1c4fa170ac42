"""The pages agree with the code and with each other."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt_core
from ckpt_core import errors

TOP = Path(__file__).parents[1]
PAGES = sorted([*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md")])
ERRORS = [
    name
    for name, item in vars(errors).items()
    if inspect.isclass(item) and issubclass(item, errors.CkptError)
]
TERMS = [
    *("state", "leaf", "eager leaf", "slice", "chunk", "skeleton"),
    *("root", "shard", "manifest", "attempt", "slot", "retire", "pin"),
    *("directory of files", "pointer"),
    *("step", "interval", "snapshot", "staging", "persist", "commit", "in-flight"),
    *("barrier", "stall", "back-pressure", "restore", "rank", "world size"),
]


def _page(path: str) -> str:
    return (TOP / path).read_text()


def _page_name(path: Path) -> str:
    return str(path.relative_to(TOP))


@pytest.fixture(params=PAGES, ids=_page_name)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_internal_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in _anchors(path.read_text()), f"{link}: no such heading"


def test_the_front_page_of_the_site_leads_to_every_page() -> None:
    listed = _page("docs/index.md") + _page("docs/decisions.md")
    for path in (TOP / "docs").rglob("*.md"):
        name = str(path.relative_to(TOP / "docs"))
        assert name == "index.md" or f"]({name})" in listed, f"docs/index.md does not list {name}"


def test_every_path_of_the_package_that_a_page_names_exists(page: Path) -> None:
    for path in re.findall(r"`(ckpt_core/[\w/]*(?:\.py)?)`", page.read_text()):
        assert (TOP / path).exists(), f"{path} does not exist"


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in ckpt_core.__all__:
        item = getattr(ckpt_core, name)
        if inspect.isclass(item) or inspect.isroutine(item):
            assert inspect.getdoc(item), f"ckpt_core.{name} has no docstring"


def test_every_public_method_has_a_docstring() -> None:
    for name in ckpt_core.__all__:
        item = getattr(ckpt_core, name)
        if not inspect.isclass(item):
            continue
        for method, function in inspect.getmembers(item, inspect.isfunction):
            ours = function.__module__.startswith("ckpt_core")
            if ours and not method.startswith("_"):
                assert inspect.getdoc(function), f"ckpt_core.{name}.{method} has no docstring"


@pytest.mark.parametrize("name", ERRORS)
def test_the_page_of_errors_has_a_row_for_each(name: str) -> None:
    rows = re.findall(rf"^\| `{name}` \|(.*)\|$", _page("docs/errors.md"), re.MULTILINE)
    assert len(rows) == 1
    happened, _safe, to_do = (cell.strip() for cell in rows[0].split("|"))
    assert happened
    assert to_do


def test_the_page_of_errors_has_no_row_for_what_does_not_exist() -> None:
    rows = re.findall(r"^\| `(\w+)` ", _page("docs/errors.md"), re.MULTILINE)
    assert sorted(rows) == sorted(ERRORS)


@pytest.mark.parametrize("term", TERMS)
def test_the_glossary_defines_each_term_once(term: str) -> None:
    rows = re.findall(rf"^\| \*{re.escape(term)}\* \|", _page("docs/glossary.md"), re.MULTILINE)
    assert len(rows) == 1


def test_the_page_of_options_lists_each_with_its_default() -> None:
    page = _page("docs/options.md")
    for field in dataclasses.fields(ckpt_core.Options):
        row = re.search(rf"^\| `{field.name}` \| `?([^|`]*)`? \|", page, re.MULTILINE)
        assert row is not None, f"docs/options.md has no row for Options.{field.name}"
        assert row[1], f"docs/options.md gives no default for Options.{field.name}"


def test_the_readmes_table_is_of_the_run_that_its_picture_is_of(tmp_path: Path) -> None:
    command = ["bench", "--from", "docs/img/bench.json", "--headline", str(tmp_path / "drawn.svg")]
    said = subprocess.run(
        [sys.executable, "-m", "ckpt_core", *command],
        check=True,
        cwd=TOP,
        capture_output=True,
        text=True,
    ).stdout
    table = [line for line in said.splitlines() if line.startswith("|")]
    assert len(table) == 6
    assert "\n".join(table) in _page("README.md")


def test_the_readme_is_short() -> None:
    assert len(_page("README.md").split()) <= 1000


def test_the_readme_runs_the_tests_as_ci_does() -> None:
    line = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/python -m nox"
    assert line in _page("README.md")
    assert line in _page(".ci/run")


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{ckpt_core.__version__}]" in _page("CHANGELOG.md")


def test_the_installed_version_is_the_one_in_the_code() -> None:
    from importlib.metadata import version

    assert version("ckpt-core") == ckpt_core.__version__


def test_architecture_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in sorted((TOP / "docs" / "adr").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_main_example_is_short_enough_to_read() -> None:
    assert len(_page("examples/train_gpt.py").splitlines()) <= 80
