"""The code of the README and of the pages does what they say: it runs, or it is compared with the API."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from ckpt_core import Checkpointer
from ckpt_core.store import committed_steps
from tests.docs.api import Excerpt, Instance
from tests.docs.prepared import PREPARED, pages_of, run_page
from tests.docs.snippets import BLOCKS, EXCERPT, Block
from tests.integrations.frameworks import installed

PYTHON = [block for block in BLOCKS if block.language == "python"]
DATA = "docs/data.md"
EXCERPTS = [block for block in PYTHON if block.kind == EXCERPT]


def _name(block: Block) -> str:
    return block.name


def test_each_block_of_python_is_of_a_kind_that_a_test_knows() -> None:
    assert {block.kind for block in PYTHON} <= {"", EXCERPT}
    assert {block.page for block in PYTHON if not block.kind} == {*PREPARED, "README.md"}


@pytest.mark.parametrize("page", [page for page in pages_of("") if page != DATA])
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        with patch.dict(os.environ):
            run_page(page)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_the_example_about_data_resumes_at_the_end_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        names = run_page(DATA)
        assert names["step"] == 39
        assert names["total"].item() == 3 * sum(range(100))


def test_the_example_about_policies_saves_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("docs/policy.md")
    assert committed_steps(tmp_path / "ckpts")[-1] == names["total_steps"]


def test_the_example_about_costs_prints_those_of_all_its_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("docs/metrics.md")
    printed = re.findall(r"^(\d+) {", capsys.readouterr().out, re.MULTILINE)
    assert sorted(printed) == ["2", "4", "6"]


@pytest.mark.parametrize("block", EXCERPTS, ids=_name)
def test_an_excerpt_uses_what_the_api_has(block: Block) -> None:
    for framework in ("deepspeed", "horovod", "lightning", "transformers"):
        if f"ckpt_{framework}" in block.text and not installed(framework):
            pytest.skip(f"{framework} is not installed")
    names = {name: Instance(Checkpointer) for name in ("ck",)}
    earlier = [item for item in PYTHON if item.page == block.page and item.line < block.line]
    for item in earlier:
        Excerpt(names).check(item.text)
    assert Excerpt(names).check(block.text) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from ckpt_core import Chekpointer", "ckpt_core has no Chekpointer"),
        ("Checkpointer('ckpts', in_flight=3)", "unexpected keyword argument 'in_flight'"),
        ("ck.restores({})", "Checkpointer has no restores"),
        ("ck.save(1)", "missing a required argument: 'state'"),
        ("Level('s3://bucket/run')", "Level is not imported"),
        ("handle = ck.save(1, {})\nhandle.finished.result()", "SaveHandle has no finished"),
        ("with Checkpointer('ckpts', Options(inflight=3)) as c:\n    c.keep(1)", "no keep"),
    ],
)
def test_what_the_api_does_not_have_is_found(source: str, wrong: str) -> None:
    names = {"ck": Instance(Checkpointer)}
    found = Excerpt(names).check(f"from ckpt_core import Checkpointer, Options\n{source}")
    assert any(wrong in item for item in found), found
