"""What the distributions on the path bring, by their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_core.system import plugins

GROUP = "ckpt_core.tests"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, distribution: str, *lines: str) -> None:
    folder = site / f"{distribution}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))


def test_names_of_all_distributions_are_found_and_nothing_is_imported(site: Path) -> None:
    install(site, "one", "a = no_such_module:A", "b = no_such_module:B")
    install(site, "two", "c = no_such_module:C")
    assert sorted(plugins.names(GROUP)) == ["a", "b", "c"]


def test_what_stands_under_a_name_is_loaded(site: Path) -> None:
    (site / "brought.py").write_text("THING = 7\n")
    install(site, "one", "thing = brought:THING")
    assert plugins.load(GROUP, "thing") == 7


def test_a_name_that_nobody_brings_is_a_lookup_error(site: Path) -> None:
    with pytest.raises(LookupError, match="'thing' is not installed"):
        plugins.load(GROUP, "thing")


def test_a_module_that_fails_to_import_says_so_itself(site: Path) -> None:
    install(site, "one", "thing = no_such_module:THING")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        plugins.load(GROUP, "thing")
