"""Commands and settings on the pages are such that the command and the readers of settings take them."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from ckpt_core import Options
from ckpt_core.cli.app import app
from ckpt_core.observe import figures
from tests.docs.snippets import BLOCKS, PAGES, TOP, Block, blocks_of, commands_of, words_of
from tests.integrations.frameworks import installed

CLI: Any = typer.main.get_command(app)
COMMANDS = [page for page in PAGES if commands_of(page)]
SPANS = {
    (page.name, span)
    for page in PAGES
    for span in re.findall(r"(?<!`)`ckpt-core ([^`\n]+)`", page.read_text())
}
CONFIGURATIONS = [block for block in BLOCKS if block.language in ("json", "yaml")]


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_the_command_takes_each_command_of_a_page(page: Path) -> None:
    for command in commands_of(page):
        name, *arguments = words_of(command)
        try:
            # Parsed as when it runs, and not run.
            CLI.commands[name].make_context(name, list(arguments))
        except Exception as exc:
            pytest.fail(f"{command}: {exc!r}")


def test_the_commands_of_the_tutorial_run_on_what_it_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = TOP / "docs" / "start.md"
    program = next(block for block in blocks_of(page) if block.language == "python")
    exec(compile(program.text, program.name, "exec"), {})
    for command in sorted(commands_of(page)):
        # A difference is a finding.
        found = int(words_of(command)[0] == "diff")
        assert CLI.main(words_of(command), standalone_mode=False) in (found or None, found), command
    assert "300" in capsys.readouterr().out


def test_the_options_that_a_sentence_gives_to_a_command_exist() -> None:
    for page, span in SPANS:
        name, *arguments = span.partition(" -- ")[0].split()
        if name.startswith("-"):
            name, arguments = "", [name, *arguments]
        command = CLI.commands[name] if name else CLI
        known = {option for parameter in command.params for option in parameter.opts}
        given = {word.partition("=")[0] for word in arguments if re.match("--?[a-z]", word)}
        assert given <= {*known, "--help"}, f"{page}: {span}"


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=lambda block: block.name)
def test_a_configuration_is_one_that_its_reader_takes(block: Block) -> None:
    found = json.loads(block.text) if block.language == "json" else yaml.safe_load(block.text)
    if [*found] == ["groups"]:  # rules of Prometheus
        rules = [rule for group in found["groups"] for rule in group["rules"]]
        names = {name for rule in rules for name in re.findall(r"ckpt_core_(\w+)", rule["expr"])}
        assert names and names <= set(figures._FAMILIES)
        return
    assert [*found] == ["checkpoint_engine"], "of whom is it?"
    if not installed("deepspeed"):
        pytest.skip("deepspeed is not installed")
    from ckpt_deepspeed.settings import EngineSettings

    EngineSettings.of(found["checkpoint_engine"])


def test_variables_with_values_are_taken() -> None:
    texts = "\n".join(page.read_text() for page in PAGES)
    spans = re.findall(r"`(CKPT_CORE_[A-Z_]+=[^`]+)`", texts)
    assert spans
    for span in spans:
        name, _, value = " ".join(shlex.split(span)).partition("=")
        Options.from_env({name: value})


def test_the_page_of_versions_says_what_is_asked_for_and_what_is_tested() -> None:
    project = (TOP / "pyproject.toml").read_text()
    asked = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', project))
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (TOP / ".ci/constraints.txt").read_text(), re.M))
    page = (TOP / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\|[^|]*\(`(\w+)`\) \| (\S+) or newer \| ([\d.]+\d)", page, re.MULTILINE)
    assert {name for name, *_ in rows} >= {"torch", "lightning", "deepspeed", "horovod", "obstore"}
    assert [(name, asked[name], tested[name]) for name, *_ in rows] == rows


def test_extras_and_examples_that_are_named_exist() -> None:
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = "\n".join(page.read_text() for page in [*PAGES, TOP / "CONTRIBUTING.md"])
    named = re.findall(r"(?:ckpt-core|'?\.)\[([a-z,]+)\]", texts)
    assert {name for names in named for name in names.split(",")} <= extras.keys()
    for example in set(re.findall(r"\bexamples/\w+\.py", texts)):
        assert (TOP / example).exists(), example


def test_each_example_takes_the_options_that_the_pages_give_it() -> None:
    texts = "\n".join(page.read_text() for page in PAGES)
    shared = (TOP / "examples" / "common.py").read_text()
    for example, given in re.findall(r"(examples/\w+\.py) (--[^\n`#]+)", texts):
        program = (TOP / example).read_text() + shared
        for option in re.findall(r"--[a-z-]+", given.partition("&&")[0]):
            assert f'"{option}"' in program, f"{example} has no {option}"


def test_a_command_of_an_example_gives_it_what_it_requires() -> None:
    required = re.findall(r'"(--\w+)"[^\n]*required=True', (TOP / "examples/common.py").read_text())
    assert required == ["--root", "--result"]
    files = [*PAGES, *(TOP / "docs/img").glob("*.py")]
    files += [
        file
        for room in ("examples", "ckpt_core", "integrations")
        for file in (TOP / room).rglob("*.py")
    ]
    found = 0
    for file in files:
        text = file.read_text().replace("\\\\\n", " ").replace("\\\n", " ")
        for name, value in re.findall(r'(\w+)="([^"\n]*examples/\w+\.py [^"\n]*)"', text):
            # A variable of a shell: its value is a command where it is used.
            text = text.replace(value, "").replace(f"${name} ", f"{value} ")
        for command in re.findall(r"examples/\w+\.py(?= --)[^\n`]*", text):
            found += 1
            lacking = [option for option in required if f"{option} " not in command]
            assert not lacking, f"{file.relative_to(TOP)}: {command}"
    assert found > 12
