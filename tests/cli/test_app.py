"""The command as a whole: what it promises whichever command is run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import committed_steps
from ckpt_core.cli import main
from ckpt_core.cli.text import age_text, shorten
from ckpt_core.units import clean, count_text, size_text

TOP = Path(__file__).parents[2]
COMMANDS = (
    *("ls", "show", "verify", "diff", "export", "rm", "pin", "unpin"),
    *("doctor", "bench", "tune", "simulate", "report"),
)
_WITHOUT_TORCH = """
import sys
sys.argv = ["ckpt-core", *sys.argv[1:]]
from ckpt_core.cli import main
try:
    main()
finally:
    loaded = [name for name in ("torch", "numpy") if name in sys.modules]
    assert not loaded, loaded
"""

Cli = Callable[..., Any]


def test_version_is_the_one_in_the_code(cli: Cli) -> None:
    answer = cli("--version")
    assert (answer.code, answer.out) == (0, f"ckpt-core {ckpt_core.__version__}\n")


def test_help_lists_every_command(cli: Cli) -> None:
    answer = cli("--help")
    assert answer.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in answer.out


def test_no_summary_of_a_command_is_cut_at_80_columns(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli("--help").out
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"\.\.\.$", shown.partition("Commands:")[2], re.MULTILINE)


def test_a_shell_can_complete_commands() -> None:
    asked = {"COMP_WORDS": "ckpt-core ex", "COMP_CWORD": "1", "PYTHONPATH": str(TOP)}
    script = "import sys; sys.argv[0] = 'ckpt-core'; from ckpt_core.cli import main; main()"
    made = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **asked, "_CKPT_CORE_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.stdout.split() == ["export"], made.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(cli: Cli, command: str) -> None:
    answer = cli(command, "--help")
    assert answer.code == 0
    assert "Options:" in answer.out


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["ls", "--nonsense"], ["nonsense"], ["show", "x", "--step", "-1"], ["pin", "x", "y"]],
)
def test_wrong_usage_ends_with_2_and_says_why(cli: Cli, arguments: list[str]) -> None:
    answer = cli(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert "Error: " in answer.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "nowhere"],
        ["show", "nowhere"],
        ["verify", "nowhere"],
        ["diff", "nowhere", "nowhere"],
        ["export", "nowhere", "x.pt"],
        ["rm", "nowhere", "--after", "1"],
        ["pin", "nowhere", "1"],
        ["unpin", "nowhere", "1"],
    ],
)
def test_a_root_that_is_not_there_is_one_clear_line(
    cli: Cli, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("ckpt-core: ")
    assert answer.err.count("\n") == 1
    assert "nowhere" in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["ls"], ["show"], ["show", "--json"], ["verify"]])
def test_looking_works_without_torch(ckpts: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH, arguments[0], str(ckpts), *arguments[1:]]
    made = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False, timeout=60)
    assert made.returncode == 0, made.stderr


def test_piped_output_is_plain_and_its_lines_are_whole(process: Cli, ckpts: Path) -> None:
    answer = process("show", ckpts, "--offsets", COLUMNS="")
    assert answer.code == 0
    assert "\x1b" not in answer.out
    line = next(line for line in answer.out.splitlines() if "running_mean" in line)
    assert "float32 [16]" in line
    assert ".safetensors at " in line


def test_a_narrow_terminal_loses_nothing(process: Cli, ckpts: Path) -> None:
    for width in ("60", "40"):
        answer = process("ls", ckpts, COLUMNS=width)
        assert answer.code == 0
        assert max(map(len, answer.out.splitlines()[:5])) <= int(width)
        assert "pinned" in answer.out


def test_a_terminal_without_unicode_gets_ascii(process: Cli, ckpts: Path) -> None:
    for command in ("ls", "show"):
        answer = process(command, ckpts, PYTHONIOENCODING="ascii", LC_ALL="C")
        assert answer.code == 0
        assert answer.out.isascii()


@pytest.mark.parametrize(("reader", "read"), [("head -n 1", "{\n"), ("true", "")])
def test_a_reader_that_goes_away_is_no_crash(ckpts: Path, reader: str, read: str) -> None:
    command = f"{sys.executable} -m ckpt_core show {ckpts} --json | {reader}"
    made = subprocess.run(
        ["bash", "-c", command], cwd=TOP, capture_output=True, text=True, check=False, timeout=60
    )
    assert made.stdout == read
    assert made.stderr == ""


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("words", "code"), [("ls .", 0), ("diff {0}10 {0}20", 1), ("show . --step 7", 2)]
)
def test_the_exit_code_is_right_where_a_stream_is_closed(
    ckpts: Path, closed: str, words: str, code: int
) -> None:
    command = f"{sys.executable} -m ckpt_core {words.format('step-0000000000')} {closed}"
    made = subprocess.run(
        ["bash", "-c", command], cwd=ckpts, capture_output=True, text=True, check=False, timeout=60
    )
    assert (made.returncode, "Traceback" in made.stderr) == (code, False), made.stderr


def test_python_dash_m_is_the_same_command(process: Cli, ckpts: Path) -> None:
    answer = process("ls", ckpts, "--json")
    assert [row["step"] for row in json.loads(answer.out)["steps"]] == [10, 20, 30]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_sizes_are_for_people(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3600, "in the future"), (5.9, "5 s ago"), (150, "2 minutes ago"), (90000, "25 hours ago")],
)
def test_ages_are_for_people(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_names_from_files_cannot_command_a_terminal() -> None:
    assert clean("a\x1b[2Jb\n") == "a\\x1b[2Jb\\n"
    assert clean("gnp.\u202etxt") == "gnp.\\u202etxt"
    assert clean("größe") == "größe"


def test_counts_and_long_texts() -> None:
    assert count_text(1, "leaf") == "1 leaf"
    assert count_text(2000, "leaf") == "2,000 leaves"
    assert shorten("abcdef", 5) == "ab..."


@pytest.mark.parametrize(
    "words",
    [
        *(["ls", "ROOT"], ["ls", "ROOT", "--json"], ["show", "ROOT"], ["watch", "ROOT", "--once"]),
        *(["diff", "ROOT/step-000000000010", "ROOT"], ["doctor", "--quick"], ["verify", "ROOT"]),
        *(["ls", "--help"], ["--help"], ["--version"]),
    ],
)
def test_a_reader_that_has_gone_is_no_finding(
    ckpts: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["ckpt-core", *(word.replace("ROOT", str(ckpts)) for word in words)]
    )
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2


@pytest.mark.parametrize("words", ["verify nowhere", "ls nowhere", "ls --no-such-option"])
@pytest.mark.parametrize("sink", ["2>&1 | true", "2>/dev/full"])
def test_an_error_that_nobody_reads_is_no_finding(tmp_path: Path, words: str, sink: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux")
    command = f"({sys.executable} -m ckpt_core {words}; echo $? >code) {sink}"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False, timeout=60)
    assert (tmp_path / "code").read_text() == "2\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["export", "ROOT", ""], "FILE is empty"),
        (["report", "ROOT", "--out", ""], "--out is empty"),
        (["import", "", "ROOT"], "SOURCE is empty"),
        (["doctor", "--quick", "--script", ""], "--script is empty"),
        (["bench", "--from", ""], "--from is empty"),
        (["ls", ""], "names no place"),
        (["export", "", "x.pt"], "names no place"),
        (["rm", "", "--keep-last", "1", "--yes"], "names no place"),
        (["import", "SOURCE", ""], "names no place"),
        (["ls", "~nobody.of.that.name/x"], "give the whole path"),
        (["rm", "~nobody.of.that.name", "--step", "10", "--yes"], "give the whole path"),
    ],
)
def test_a_path_that_is_empty_or_of_nobody_is_one_line(
    cli: Cli, ckpts: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.chdir(ckpts)
    torch.save({"step": 40}, ckpts.parent / "source.pt")
    places = {"ROOT": ckpts, "SOURCE": ckpts.parent / "source.pt"}
    answer = cli(*(places.get(word, word) for word in words))
    assert answer.code == 2 and text in answer.err and answer.err.count("\n") == 1
    assert committed_steps(ckpts) == (10, 20, 30)
