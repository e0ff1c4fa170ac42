"""docs/lightning.md agrees with Lightning and with the callback, and its code runs as it stands there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ckpt_core import ConfigError, committed_steps
from ckpt_core.observe import SaveCost
from ckpt_lightning import AsyncCheckpoint
from tests.docs.prepared import run_page

PAGE = (Path(__file__).parents[3] / "docs" / "lightning.md").read_text()
README = (Path(__file__).parents[3] / "README.md").read_text()


def _arguments(callback: type) -> list[str]:
    found = inspect.signature(callback.__init__).parameters.values()
    return [p.name for p in found if p.name != "self" and p.kind is not p.VAR_KEYWORD]


def _section(title: str) -> str:
    _, _, rest = PAGE.partition(f"## {title}\n")
    assert rest, title
    return re.split(r"^##+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def _rows(title: str) -> list[list[str]]:
    """Cells of the table of a section, without its head."""
    lines = [line for line in _section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_each_argument_of_modelcheckpoint_has_one_row_and_none_is_invented() -> None:
    names = [row[0].strip("`") for row in _rows("Coming from ModelCheckpoint")]
    assert names == _arguments(ModelCheckpoint)


def test_each_row_names_an_argument_that_exists_here_or_that_is_refused_with_a_hint(
    tmp_path: Path,
) -> None:
    for theirs, ours, difference in _rows("Coming from ModelCheckpoint"):
        assert difference
        name = ours.split(",")[0].strip("`")
        if name != "none":
            assert name in _arguments(AsyncCheckpoint), theirs
        if theirs.strip("`") not in _arguments(AsyncCheckpoint):
            with pytest.raises(ConfigError, match=r"has no argument.*: "):
                AsyncCheckpoint(tmp_path, **{theirs.strip("`"): None})


@pytest.mark.parametrize("name", _arguments(AsyncCheckpoint))
def test_each_argument_of_ours_is_on_the_page(name: str) -> None:
    assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", PAGE), name


def test_each_trap_says_whether_it_is_handled_or_told() -> None:
    rows = _rows("Traps")
    assert [row[0] for row in rows] == [f"T{number}" for number in range(1, 11)]
    for trap, _, here in rows:
        assert re.search(r"\b(handled|told)\b", here), trap


def test_each_metric_has_a_row() -> None:
    cost = SaveCost(step=1, interval_steps=1, stall_s=0.0, in_flight=1)
    assert [row[0].strip("`") for row in _rows("Metrics")] == list(cost.as_metrics())


def test_each_attribute_that_the_page_names_is_there(tmp_path: Path) -> None:
    callback = AsyncCheckpoint(tmp_path)
    _, _, sentence = PAGE.partition("The attributes that loggers")
    names = re.findall(r"`([a-z_]+)`", sentence.partition("\n")[0])
    assert len(names) > 8
    for name in names:
        assert hasattr(callback, name), name


def test_the_code_for_whoever_comes_from_modelcheckpoint_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("docs/from-model-checkpoint.md")
    assert committed_steps(Path("ckpts"))
    assert committed_steps(Path("moved"))[-1] == 20
    assert len(names["callback"].best_k_models) == 2


def test_the_readme_starts_it_with_the_same_line() -> None:
    line = 'AsyncCheckpoint("ckpts", every_n_steps=50)'
    assert line in PAGE
    assert line in README


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_the_code_of_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("docs/lightning.md")
    assert committed_steps(Path("ckpts")) == (15,)
    assert names["callback"].best_model_path
    assert committed_steps(Path("ckpts-data")) == (4, 5)
