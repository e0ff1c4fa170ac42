"""Every command that takes a path, with the URL of an object store: it works there, or says why not."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from ckpt_core.cli.app import app
from tests.levels.servers.faulty import FaultServer, always
from tests.levels.servers.moto import needs_store

Cli = Callable[..., Any]
URL = "s3://bucket/run"
STEP = f"{URL}/step-000000000007"

MANGLED = re.compile(r"s3:/(?!/)")

WORKS = {
    "ls": ["ls", URL],
    "show": ["show", STEP],
    "verify": ["verify", URL],
    "verify --level": ["verify", "{root}", "--level", URL],
    "diff": ["diff", URL, "{root}"],
    "export": ["export", URL, "{new}.safetensors", "--only", "model"],
    "export --to torch": ["export", STEP, "{new}", "--to", "torch"],
    "export --to lightning": ["export", URL, "{new}", "--to", "lightning"],
    "export --to lightning --step": ["export", URL, "{new}", "--to", "lightning", "--step", 7],
    "export --to transformers": ["export", STEP, "{new}", "--to", "transformers"],
    "report": ["report", URL, "--out", "{new}"],
    "watch": ["watch", URL, "--once"],
    "doctor": ["doctor", URL, "--quick"],
    "doctor --root": ["doctor", "--root", URL, "--quick"],
    "doctor --level": ["doctor", "--level", URL, "--quick"],
    "pin": ["pin", URL, 7],
    "unpin": ["unpin", URL, 7],
    "push --to": ["push", "{root}", "--to", URL],
    "pull": ["pull", URL, "--to", "{new}"],
    "scrub": ["scrub", "{root}", URL],
    "agent --level": ["agent", "{root}", "--level", URL, "--once"],
}
"""What is asked for -> the command."""

OF_FILES = r"^ +(?:-\w, )?(--[\w-]+) +(?:PATH|FILE|DIR)\b"
"""An option that takes a path, as `--help` has it."""

_TUNE = ["--model-bytes", "1MB", "--iteration-s", "0.1"]
REFUSED = {
    "export FILE": ["export", "{root}", URL],
    "import SOURCE": ["import", URL, "{root}"],
    "import ROOT": ["import", "{file}", URL],
    "rm ROOT": ["rm", URL, "--step", 7],
    "agent ROOT": ["agent", URL],
    "push ROOT": ["push", URL, "--to", "{root}"],
    "pull --to": ["pull", "{root}", "--to", URL],
    "serve DIR": ["serve", URL, "--bind", "127.0.0.1:0", "--token-file", "{file}"],
    "doctor --config": ["doctor", "--quick", "--config", URL],
    "doctor --script": ["doctor", "--quick", "--script", "{file}", "--script", URL],
    "report --out": ["report", "{file}", "--out", URL],
    "tune --root": ["tune", "--root", URL, *_TUNE],
    "tune --plot": ["tune", "--plot", URL, *_TUNE],
    **{
        f"bench --{name}": ["bench", "--quick", f"--{name}", URL]
        for name in ("root", "json", "plot", "from")
    },
    "bench --headline": ["bench", "--quick", "--headline", URL],
    "bench --memory-root": ["bench", "--suite", "levels", "--memory-root", URL],
    "bench --out": ["bench", "--suite", "papers", "--out", URL],
    "simulate --trace": ["simulate", "--trace", URL],
    "simulate --bench": ["simulate", "--bench", URL],
    "simulate --csv": ["simulate", "--csv", URL],
    "simulate --plot": ["simulate", "--plot", URL],
}
"""What takes a path of this machine alone -> a command that gives it a URL."""

NAMED = {
    "export FILE": "FILE",
    "import SOURCE": "SOURCE",
    "pull --to": "ckpt-core pull --to",
    **{f"{name} ROOT": f"ckpt-core {name}" for name in ("import", "rm", "agent", "push")},
    "serve DIR": "ckpt-core serve",
}
"""What the text calls it, where that is not the option alone."""


@pytest.fixture
def root(save: Callable[..., Path], tmp_path: Path) -> Path:
    """A root of one step, which every layout can be made of; a file beside it."""
    weights = {"w": torch.arange(5000.0)}
    files = {"note.txt": torch.zeros(3, dtype=torch.uint8)}
    (tmp_path / "file").write_text("x")
    return save({"state_dict": weights, "model": weights, "files": files}).parent


def _filled(words: list[Any], root: Path) -> list[str]:
    named = {"root": root, "file": root.parent / "file", "new": root.parent / "new"}
    return [str(word).format(**named) for word in words]


@needs_store
@pytest.mark.parametrize("asked", WORKS)
def test_a_url_works_in_each_command_that_reads_or_sends(
    at_faulty: Cli, process: Cli, faulty: FaultServer, root: Path, asked: str
) -> None:
    for framework in ("lightning", "transformers"):
        if framework in WORKS[asked]:
            pytest.importorskip(framework)
    assert faulty.url() == URL
    first = (
        ["agent", root, "--level", URL, "--once"]
        if asked == "verify --level"
        else ["push", root, "--to", URL]
    )
    assert process(*first).code == 0
    before = faulty.keys("run/step-")
    run = process if WORKS[asked][0] == "agent" else at_faulty
    answer = run(*_filled(WORKS[asked], root))
    assert answer.code == 0, answer.err
    assert not MANGLED.search(answer.out + answer.err)
    assert faulty.keys("run/step-") == before
    made = list(root.parent.glob("new*"))
    assert len(made) == ("{new}" in "".join(map(str, WORKS[asked])))
    assert not any(MANGLED.search(one.read_text("latin1")) for one in made if one.is_file())


@pytest.mark.parametrize("asked", REFUSED)
def test_a_url_where_a_path_of_this_machine_is_wanted_is_named_with_what_to_give(
    cli: Cli, root: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    before = sorted(root.parent.rglob("*"))
    answer = cli(*_filled(REFUSED[asked], root))
    taken = NAMED.get(asked, asked.partition(" ")[2])
    assert answer.code == 2
    assert f"{URL} is in an object store: `{taken}` takes a directory" in answer.err
    assert answer.err.count("\n") == 1
    assert sorted(root.parent.rglob("*")) == before


def test_each_command_and_option_is_tried_and_no_url_becomes_a_path_unseen(cli: Cli) -> None:
    tried = {words[0] for words in [*WORKS.values(), *REFUSED.values()]}
    assert tried == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for command in app.registered_commands:
        assert command.callback is not None
        assert "Path" not in str(inspect.signature(command.callback))
    options = {
        f"{command} {option}"
        for command in tried
        for option in re.findall(OF_FILES, cli(command, "--help").out, re.MULTILINE)
    }
    assert "bench --json" in options
    assert options - {*REFUSED, "serve --token-file"} == set()


@needs_store
def test_report_of_a_url_has_its_steps_and_says_where_the_rest_is(
    at_faulty: Cli, faulty: FaultServer, root: Path, tmp_path: Path
) -> None:
    empty = at_faulty("report", URL, "--out", tmp_path / "page.html")
    assert (empty.code, f"{URL} holds no committed step" in empty.err) == (2, True)
    assert at_faulty("push", root, "--to", URL).code == 0
    answer = at_faulty("report", URL, "--out", tmp_path / "page.html")
    assert "events_file=" in answer.err
    text = (tmp_path / "page.html").read_text()
    assert "Checkpoints of run" in text and URL in text and ">7<" in text
    both = at_faulty("report", URL, tmp_path / "file", "--out", tmp_path / "page.html")
    assert (both.code, "name it alone" in both.err) == (2, True)


@needs_store
def test_what_frameworks_read_is_the_same_from_a_url(
    at_faulty: Cli, faulty: FaultServer, root: Path, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    assert at_faulty("push", root, "--to", URL).code == 0
    found = json.loads(
        at_faulty("export", URL, tmp_path / "far.ckpt", "--to", "lightning", "--json").out
    )
    assert (found["path"], found["step"]) == (STEP, 7)
    assert at_faulty("export", root, tmp_path / "near.ckpt", "--to", "lightning").code == 0
    near, far = (torch.load(tmp_path / f"{name}.ckpt") for name in ("near", "far"))
    assert near.keys() == far.keys()
    assert torch.equal(near["state_dict"]["w"], far["state_dict"]["w"])


@needs_store
def test_watch_of_a_url_that_cannot_be_read_does_not_say_that_nothing_is_there(
    at_faulty: Cli, faulty: FaultServer
) -> None:
    assert "none is committed yet" in at_faulty("watch", URL, "--once").out
    faulty.fault = always("403")
    told = at_faulty("watch", URL, "--once").out
    assert "not known" in told and "none is committed" not in told
