"""docs/cli.md says what the command does: every command, option and JSON field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.several import GOLDEN

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
COMMANDS = (
    "ls",
    "show",
    "verify",
    "diff",
    "export",
    "rm",
    "pin",
    "unpin",
    "agent",
    "serve",
    "push",
    "pull",
    "doctor",
    "watch",
)
TITLES = {
    **dict.fromkeys(("pin", "unpin"), "pin and unpin"),
    **dict.fromkeys(("push", "pull"), "push and pull"),
}
NAMED_BY_PATH = ("left_out", "changed")


def _section(command: str) -> str:
    title = TITLES.get(command, command)
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/cli.md has no section {title}"
    return found[1]


def _fields(value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else []:
        yield from _fields(item)
    for key, item in value.items() if isinstance(value, dict) else []:
        yield key
        if key not in (*NAMED_BY_PATH, "value", "a_value", "b_value"):
            yield from _fields(item)


def _assert_documented(command: str, out: str) -> None:
    for field in set(_fields(json.loads(out))):
        assert f"`{field}`" in _section(command), f"docs/cli.md: {command} lacks `{field}`"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_names_every_option(cli: Callable[..., Any], command: str) -> None:
    for option in re.findall(r"^ +(?:-\w, )?(--[\w-]+)", cli(command, "--help").out, re.MULTILINE):
        if option != "--help":
            assert option in (PAGE if option == "--json" else _section(command)), option


def test_the_table_on_top_has_every_command(cli: Callable[..., Any]) -> None:
    table = PAGE[: PAGE.index("\n## ")]
    commands = re.findall(r"^  ([a-z]+)  +[A-Z]", cli("--help").out, re.MULTILINE)
    assert set(COMMANDS) <= set(commands)
    for command in commands:
        assert f"`{command} " in table or f"`{command}`" in table, command


def test_the_page_names_every_json_field(
    cli: Callable[..., Any],
    process: Callable[..., Any],
    ckpts: Path,
    tmp_path: Path,
    damage: Callable[[Path, int], None],
) -> None:
    (ckpts / ".inflight" / "000000000040-0123abcd").mkdir(parents=True)
    old = ckpts / "step-000000000010"
    arguments: dict[str, list[Any]] = {
        "ls": [ckpts],
        "show": [ckpts],
        "diff": [old, ckpts],
        "export": [ckpts, tmp_path / "x.pt"],
        "pin": [ckpts, 10],
        "unpin": [ckpts, 10],
        "push": [ckpts, "--to", tmp_path / "level"],
        "pull": [tmp_path / "level", "--to", tmp_path / "fresh"],
        "rm": [ckpts, "--step", 30, "--yes"],
        "doctor": ["--quick"],
    }
    for command, rest in arguments.items():
        _assert_documented(command, cli(command, *rest, "--json").out)
    # As a process of its own: it takes signals, and the lowest priority.
    level = [ckpts, "--level", tmp_path / "further", "--once", "--json"]
    _assert_documented("agent", process("agent", *level).out)
    for command in ("ls", "show", "diff", "export", "verify"):
        where = {
            "ls": [GOLDEN.parent],
            "diff": [GOLDEN, old],
            "export": [GOLDEN, tmp_path / "y.pt"],
        }
        rest = [*where.get(command, [GOLDEN])] + (["--only", "own"] if command == "export" else [])
        _assert_documented(command, cli(command, *rest, "--json").out)
    damage(old / "shard-00000-0.safetensors", 9000)
    _assert_documented("verify", cli("verify", ckpts, "--json").out)
