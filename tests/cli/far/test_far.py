"""The commands on an object store and on a directory as a level, as a user calls them."""

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

from ckpt_core import Checkpointer, Level, Options
from ckpt_core.levels import open_far
from ckpt_core.store import committed_steps, step_path
from tests.cli.far_places import Place
from tests.levels.servers.faulty import SECRET, FaultServer, always, at
from tests.levels.servers.moto import needs_store
from tests.levels.trainers import end_agent, until

Cli = Callable[..., Any]
SHARD = "shard-00000-0.safetensors"


def _bytes_of(path: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()
    }


def _answer(answer: Any) -> Any:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


# -- push, and reading what was pushed -------------------------------------------------------------


def test_a_pushed_step_reads_as_in_the_root_by_every_command(
    alone: Cli, cli: Cli, ckpts: Path, place: Place, tmp_path: Path
) -> None:
    for step in (20, 30):
        assert f"step {step} is at {place.url}" in alone("push", ckpts, step, "--to", place.url).out
    there = _answer(alone("ls", place.url, "--json"))
    assert there["root"] == place.url
    assert [(row["step"], row["problem"]) for row in there["steps"]] == [(20, None), (30, None)]
    assert there["file_bytes"] == sum(row["file_bytes"] for row in there["steps"]) > 0
    here = {row["step"]: row for row in _answer(cli("ls", ckpts, "--json"))["steps"]}
    for row in there["steps"]:
        for name in ("attempt", "file_bytes", "added_bytes", "state_bytes", "ranks", "pinned"):
            assert row[name] == here[row["step"]][name]
        assert row["path"] == f"{place.url}/step-{row['step']:012d}"
    first = _answer(alone("show", place.url, "--json"))
    second = _answer(cli("show", ckpts, "--json"))
    assert first.pop("path") == f"{place.url}/step-000000000030"
    second.pop("path")
    assert first == second
    found = _answer(alone("verify", place.url, "--json"))
    assert [step["ok"] for step in found["steps"]] == [True, True]
    assert found["steps"][0]["path"] == f"{place.url}/step-000000000020"
    assert alone("diff", f"{place.url}/step-000000000020", ckpts / "step-000000000020").code == 0
    assert alone("diff", place.url, f"{place.url}/step-000000000020").code == 1
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for run, root, file in zip((alone, cli), (place.url, ckpts), files, strict=True):
        assert run("export", root, file, "--only", "model").code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_push_sends_the_newest_step_once(at_place: Cli, ckpts: Path, place: Place) -> None:
    first = _answer(at_place("push", ckpts, "--to", place.url, "--json"))
    assert (first["step"], first["reached"], first["already"]) == (30, True, False)
    again = _answer(at_place("push", ckpts, "--to", place.url, "--json"))
    assert (again["reached"], again["already"]) == (True, True)
    assert f"step 30 is at {place.url} already" in at_place("push", ckpts, "--to", place.url).out


def test_push_of_another_run_replaces_a_step_only_where_that_is_said(
    at_place: Cli, ckpts: Path, save: Callable[..., Path], place: Place, tmp_path: Path
) -> None:
    first = _answer(at_place("push", ckpts, "--to", place.url, "--json"))
    other = tmp_path / "other"
    with Checkpointer(other) as ck:
        ck.save(30, {"w": torch.zeros(9)})
    refused = at_place("push", other, "--to", place.url)
    assert refused.code == 2 and "--force replaces it. Nothing was sent" in refused.err
    (row,) = _answer(at_place("ls", place.url, "--json"))["steps"]
    assert row["attempt"] == first["attempt"]
    second = _answer(at_place("push", other, "--to", place.url, "--force", "--json"))
    (row,) = _answer(at_place("ls", place.url, "--json"))["steps"]
    assert second["reached"] and row["attempt"] == second["attempt"] != first["attempt"]


def test_push_of_a_damaged_step_shows_nothing_there(
    at_place: Cli, ckpts: Path, place: Place, damage: Callable[[Path, int], None]
) -> None:
    damage(step_path(ckpts, 30) / SHARD, 5000)
    answer = at_place("push", ckpts, "--to", place.url)
    assert answer.code == 2
    assert "expected xxh3" in answer.err
    with open_far(place.url) as far:
        assert far.steps() == {}


def test_push_says_what_is_missing_or_cannot_be(at_place: Cli, ckpts: Path, place: Place) -> None:
    for arguments, text in [
        ([ckpts, 31, "--to", place.url], "nearest: 10, 20, 30"),
        ([ckpts], "--to s3://bucket/run"),
        ([ckpts, "--to", "ftp://host/x"], "unknown scheme"),
        (["s3://bucket/run", "--to", place.url], "takes a directory"),
        ([ckpts, "--to", place.url, "--bandwidth", "fast"], "bandwidth"),
    ]:
        answer = at_place("push", *arguments)
        assert answer.code == 2
        assert text in answer.err
        assert answer.err.count("\n") == 1


def test_push_to_a_place_of_another_run_is_refused(
    at_place: Cli, ckpts: Path, place: Place
) -> None:
    with open_far(place.url) as far:
        far.write_word("run.json", b'{"run": "abcd1234", "session": 1}', over=None)
    answer = at_place("push", ckpts, "--to", place.url)
    assert answer.code == 2
    assert "holds another run" in answer.err


@pytest.mark.parametrize("name", ["step-000000000030", "step-000000000040", "step-000000000030/x"])
def test_no_root_is_written_where_a_step_is_or_may_come(
    at_place: Cli, ckpts: Path, place: Place, name: str
) -> None:
    assert at_place("push", ckpts, "--to", place.url).code == 0
    for words in (["push", "--to"], ["agent", "--once", "--level"]):
        answer = at_place(words[0], ckpts, *words[1:], f"{place.url}/{name}")
        assert answer.code == 2
        assert re.search(f"(name|give) (the|that) root.*{place.url}|root {place.url}", answer.err)
    assert _answer(at_place("verify", place.url, "--json"))["ok"]
    with open_far(f"{place.url}/{name}") as far:
        assert far.steps() == {} and far.read_word("run.json") is None


# -- pull ------------------------------------------------------------------------------------------


def test_a_pulled_step_is_the_one_that_was_pushed(
    at_place: Cli, ckpts: Path, place: Place, tmp_path: Path
) -> None:
    for step in (10, 30):
        assert at_place("push", ckpts, step, "--to", place.url).code == 0
    root = tmp_path / "fresh"
    assert _answer(at_place("pull", place.url, "--to", root, "--json"))["step"] == 30
    assert at_place("pull", f"{place.url}/step-000000000010", "--to", root).code == 0
    assert committed_steps(root) == (10, 30)
    for step in (10, 30):
        assert _bytes_of(step_path(root, step)) == _bytes_of(step_path(ckpts, step))
    assert not (root / ".pulling").exists()
    assert f"step 10 is there already: {root}" in at_place("pull", place.url, 10, "--to", root).out


def test_no_step_is_pulled_to_where_a_step_may_come(
    at_place: Cli, ckpts: Path, place: Place
) -> None:
    assert at_place("push", ckpts, "--to", place.url).code == 0
    answer = at_place("pull", place.url, "--to", ckpts / "step-000000000040")
    assert answer.code == 2 and f"give the root, {ckpts}," in answer.err
    assert committed_steps(ckpts) == (10, 20, 30)


def test_pull_replaces_another_save_only_if_it_is_told_to(
    at_place: Cli, ckpts: Path, place: Place, save: Callable[..., Path]
) -> None:
    mine = save({"x": 1}, "one")
    theirs = save({"x": 2}, "two")
    assert at_place("push", theirs.parent, "--to", place.url).code == 0
    before = _bytes_of(mine)
    answer = at_place("pull", place.url, "--to", mine.parent)
    assert answer.code == 2
    assert "--force replaces it" in answer.err
    assert _bytes_of(mine) == before
    assert at_place("pull", place.url, "--to", mine.parent, "--force").code == 0
    assert _bytes_of(mine) == _bytes_of(theirs)


def test_pull_says_what_is_there_instead(
    at_place: Cli, ckpts: Path, place: Place, tmp_path: Path
) -> None:
    answer = at_place("pull", place.url, "--to", tmp_path / "r")
    assert (answer.code, "holds no committed step" in answer.err) == (2, True)
    assert at_place("push", ckpts, 20, "--to", place.url).code == 0
    answer = at_place("pull", place.url, 21, "--to", tmp_path / "r")
    assert (answer.code, "nearest: 20" in answer.err) == (2, True)
    assert not (tmp_path / "r").exists()


# -- directories of files ----------------------------------------------------------------------------


def _with_tags(root: Path) -> Path:
    """Two directories of files; `latest` names the newer one."""
    with Checkpointer(root, Options()) as checkpointer:
        for step in (1, 2):
            files = checkpointer.begin_files(step, f"tag{step}", pointer="latest")
            files.add("model/mp.pt", {"x": torch.full((5000,), float(step))})
            files.seal().committed.result(60)
    return root


def test_a_directory_of_files_goes_there_and_comes_back_with_its_pointer(
    at_place: Cli, place: Place, tmp_path: Path
) -> None:
    root, fresh = _with_tags(tmp_path / "tags"), tmp_path / "fresh"
    for tag in ("tag1", "tag2"):
        assert at_place("push", root, tag, "--to", place.url).out.startswith(f"{tag} is at ")
    answer = at_place("pull", place.url, "--to", fresh)
    assert answer.code == 2
    assert "it holds directories of files: tag1, tag2" in answer.err
    assert at_place("pull", place.url, "tag2", "--to", fresh).out.startswith("tag2 is ")
    assert _bytes_of(fresh / "tag2") == _bytes_of(root / "tag2")
    assert (fresh / "latest").read_text() == "tag2"
    assert "tag2 is there already" in at_place("pull", place.url, "tag2", "--to", fresh).out
    assert at_place("pull", place.url, "tag1", "--to", fresh).code == 0
    assert (fresh / "latest").read_text() == "tag2"
    assert at_place("pull", place.url, "tag3", "--to", fresh).code == 2
    (report,) = _answer(at_place("verify", f"{place.url}/tag2", "--json"))["steps"]
    assert (report["ok"], report["path"]) == (True, f"{place.url}/tag2")
    assert "is no step but a directory of 1 file" in at_place("show", f"{place.url}/tag2").err


# -- pins ------------------------------------------------------------------------------------------


def test_a_step_is_pinned_at_a_level(at_place: Cli, ckpts: Path, place: Place) -> None:
    assert at_place("push", ckpts, 20, "--to", place.url).code == 0
    assert at_place("push", ckpts, 30, "--to", place.url).code == 0
    rows = _answer(at_place("ls", place.url, "--json"))["steps"]
    assert [row["pinned"] for row in rows] == [True, False], "a pin goes with its step"
    assert at_place("pin", place.url, 30).out == "step 30 is pinned\n"
    assert at_place("unpin", place.url, 20).out == "step 20 is not pinned\n"
    rows = _answer(at_place("ls", place.url, "--json"))["steps"]
    assert [row["pinned"] for row in rows] == [False, True]
    answer = at_place("pin", place.url, 31)
    assert answer.code == 2
    assert "step 31 is not committed" in answer.err


# -- a store that fails ----------------------------------------------------------------------------


@needs_store
@pytest.mark.parametrize(
    "command",
    [
        *(
            ["ls"],
            ["show"],
            ["verify"],
            ["diff"],
            ["export"],
            ["report"],
            ["scrub"],
            ["pull"],
            ["pin"],
        ),
        ["export", "--to", "lightning"],
    ],
    ids=" ".join,
)
def test_a_store_that_is_gone_ends_each_command_with_one_clear_line(
    at_faulty: Cli, faulty: FaultServer, ckpts: Path, tmp_path: Path, command: list[str]
) -> None:
    assert at_faulty("push", ckpts, "--to", faulty.url()).code == 0
    faulty.fault = always("403")
    more: dict[str, list[Any]] = {
        "diff": [ckpts],
        "export": [tmp_path / "x.safetensors"],
        "report": ["--out", tmp_path / "x.safetensors"],
        "pull": ["--to", tmp_path / "fresh"],
        "pin": [30],
    }
    answer = at_faulty(*command, faulty.url(), *more.get(command[0], []))
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert faulty.url() in answer.err
    assert SECRET not in answer.err
    assert not (tmp_path / "x.safetensors").exists()
    assert committed_steps(tmp_path / "fresh") == ()


@needs_store
@pytest.mark.parametrize("command", ["verify", "export", "diff"])
def test_a_store_that_goes_in_the_middle_is_no_damage(
    at_faulty: Cli, faulty: FaultServer, ckpts: Path, tmp_path: Path, command: str
) -> None:
    assert at_faulty("push", ckpts, "--to", faulty.url()).code == 0
    faulty.fault = always("403", like=SHARD)
    more = {"export": [tmp_path / "x.safetensors"], "diff": [ckpts]}
    answer = at_faulty(command, faulty.url(), *more.get(command, []))
    assert answer.code == 2
    assert "DAMAGED" not in answer.out + answer.err
    assert faulty.url() in answer.err
    assert not list(tmp_path.glob("*x.safetensors*"))


@needs_store
def test_a_push_that_is_cut_short_shows_nothing_and_the_next_one_goes_on(
    at_faulty: Cli, faulty: FaultServer, ckpts: Path
) -> None:
    faulty.fault = always("403", like="PUT bucket/run/step-000000000030/manifest.json")
    assert at_faulty("push", ckpts, "--to", faulty.url()).code == 2
    faulty.fault = lambda request: None
    assert _answer(at_faulty("ls", faulty.url(), "--json"))["steps"] == []
    faulty.requests.clear()
    assert at_faulty("push", ckpts, "--to", faulty.url()).code == 0
    assert not [one for one in faulty.requests if one.startswith("PUT") and SHARD in one]
    assert at_faulty("verify", faulty.url()).code == 0


@needs_store
def test_a_push_waits_for_a_store_that_stumbles(
    at_faulty: Cli, faulty: FaultServer, ckpts: Path
) -> None:
    faulty.fault = at(1, "503", like="PUT")
    assert at_faulty("push", ckpts, "--to", faulty.url()).code == 0
    assert at_faulty("verify", faulty.url()).code == 0


@needs_store
def test_a_pull_that_is_cut_short_shows_nothing_and_the_next_one_goes_on(
    at_faulty: Cli, faulty: FaultServer, save: Callable[..., Path], tmp_path: Path
) -> None:
    step = save({"x": torch.arange(3_000_000.0)}, chunk_bytes=1 << 20)
    assert at_faulty("push", step.parent, "--to", faulty.url()).code == 0
    (shard,) = [one for one in faulty.keys("") if SHARD in one]
    sound = faulty.objects[shard].data
    # The last chunk is not what was saved: all others have come before that is found, or may have.
    faulty.objects[shard].data = sound[:-1] + bytes([sound[-1] ^ 1])
    root = tmp_path / "fresh"
    answer = at_faulty("pull", faulty.url(), "--to", root)
    assert answer.code == 2
    assert committed_steps(root) == ()
    faulty.objects[shard].data = sound
    found = _answer(at_faulty("pull", faulty.url(), "--to", root, "--json"))
    assert found["resumed_bytes"] <= found["nbytes"]
    assert _bytes_of(step_path(root, 7)) == _bytes_of(step)


@needs_store
def test_what_an_earlier_pull_left_is_verified_and_not_fetched_again(
    at_faulty: Cli, faulty: FaultServer, save: Callable[..., Path], tmp_path: Path
) -> None:
    step = save({"x": torch.arange(12_000_000.0)}, chunk_bytes=4 << 20)
    assert at_faulty("push", step.parent, "--to", faulty.url()).code == 0
    attempt = json.loads((step / "manifest.json").read_text())["attempt"]
    left = tmp_path / "fresh" / ".pulling" / attempt
    left.mkdir(parents=True)
    other = left.with_name("000000000001-0123abcd")
    other.mkdir()
    (other / "x").write_bytes(b"x")
    data = bytearray((step / SHARD).read_bytes())
    data[5_000_000] ^= 1
    (left / SHARD).write_bytes(data)
    (left / "rank-00000.json").write_text("torn")
    found = _answer(at_faulty("pull", faulty.url(), "--to", tmp_path / "fresh", "--json"))
    assert found["nbytes"] - found["resumed_bytes"] == 4 << 20, "the chunk that was not right"
    assert _bytes_of(step_path(tmp_path / "fresh", 7)) == _bytes_of(step)
    assert not (tmp_path / "fresh" / ".pulling").exists()


_FORK = """
import os, sys
import ckpt_core
url = sys.argv[1]
print(ckpt_core.committed_steps(url), ckpt_core.load(url)["epoch"], flush=True)
if os.fork() == 0:
    try:
        ckpt_core.load(url)
    except ckpt_core.ConfigError as exc:
        print("refused", "fork" in str(exc), flush=True)
    os._exit(0)
os.wait()
"""


@needs_store
def test_python_reads_a_url_and_a_fork_of_it_is_refused_at_once(
    at_faulty: Cli, faulty: FaultServer, ckpts: Path
) -> None:
    assert at_faulty("push", ckpts, "--to", faulty.url()).code == 0
    command = [sys.executable, "-W", "ignore", "-c", _FORK, faulty.url()]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert made.stdout == "(30,) 3\nrefused True\n", made.stderr


@needs_store
def test_no_command_says_a_credential(at_faulty: Cli, faulty: FaultServer, ckpts: Path) -> None:
    said = [at_faulty("push", ckpts, "--to", faulty.url()), at_faulty("ls", faulty.url(), "--json")]
    assert all(SECRET not in one.out + one.err for one in said)


@needs_store
def test_nothing_that_a_run_says_or_writes_holds_a_credential(
    at_faulty: Cli, faulty: FaultServer, tmp_path: Path
) -> None:
    root, url, events = tmp_path / "root", faulty.url(), tmp_path / "events.jsonl"
    options = Options(events_file=str(events))
    try:
        with Checkpointer(root, options, levels=[Level(url)]) as ck:
            ck.save(1, {"w": torch.ones(8)}).reached(1).result(60)
            faulty.fault = always("403")
            ck.save(2, {"w": torch.ones(8)}).committed.result(60)
            until(lambda: ck.gauges.levels()[0].problem, "the problem")
            said = [str(ck.gauges.levels()), *map(str, ck.events.events())]
        page = tmp_path / "page.html"
        for command in (
            ("report", events, "--out", page),
            *(("ls", place, *more) for place in (root, url) for more in ((), ("--json",))),
            ("show", root),
            ("doctor", "--quick", "--root", root),
        ):
            answer = at_faulty(*command)
            said += [answer.out, answer.err]
        assert "not permitted" in said[0] and "not permitted" in page.read_text()
    finally:
        end_agent(root)
    said += [one.data.decode(errors="replace") for one in faulty.objects.values()]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    said += [path.read_text(errors="replace") for path in files]
    assert {"plan.json", "status.json", "agent.log", events.name} <= {path.name for path in files}
    assert not [text for text in said if SECRET in text or "Signature=" in text]


def test_a_url_without_the_extra_names_it(process: Cli, ckpts: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\nf = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'obstore' else f(name, package)\n"
    )
    path = os.pathsep.join([str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])])
    for arguments in (["ls", "s3://b/run"], ["push", ckpts, "--to", "s3://b/run"]):
        answer = process(*arguments, PYTHONPATH=path)
        assert answer.code == 2
        assert "pip install 'ckpt-core[remote]'" in answer.err
