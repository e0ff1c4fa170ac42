"""`ls`."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, Options
from ckpt_core.store import entries
from ckpt_core.system.files import Files
from ckpt_core.units import size_text

Cli = Callable[..., Any]
_HOLD = """
import sys
from pathlib import Path
from ckpt_core.system.files import Files
from ckpt_core.store import StepStore
store = StepStore(Path(sys.argv[1]), files=Files(), keep_last=None, keep_every=None, spare_slots=0)
store.open()
store.begin(40)
print("held", flush=True)
sys.stdin.read()
"""


def test_every_step_is_a_row_with_its_state(cli: Cli, ckpts: Path) -> None:
    answer = cli("ls", ckpts)
    assert answer.code == 0
    rows = {line.split()[0]: line for line in answer.out.splitlines()[2:5]}
    assert list(rows) == ["10", "20", "30"]
    assert rows["10"].rstrip().endswith("committed")
    assert rows["20"].rstrip().endswith("committed, pinned")
    assert rows["30"].rstrip().endswith("committed, newest")
    assert answer.out.splitlines()[-1].startswith("3 committed steps, ")


def test_json_has_raw_numbers(cli: Cli, ckpts: Path) -> None:
    found = json.loads(cli("ls", ckpts, "--json").out)
    newest = found["steps"][-1]
    files = list((ckpts / "step-000000000030").iterdir())
    assert newest["file_bytes"] == sum(path.stat().st_size for path in files)
    assert newest["ranks"] == 1
    assert newest["newest"]
    assert not newest["pinned"]
    assert newest["problem"] is None
    assert found["writer"] is None


def _ranked(root: Path, **more: Any) -> None:
    """Three steps as of a run that keeps the two best."""
    kept: dict[int, float] = {}
    with Checkpointer(root, Options(keep_last=None)) as saver:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
            kept |= {step: loss} if loss < 0.7 else {}
            ranking = {"monitor": "val_loss", "kept": kept, "current_score": loss, **more}
            saver.save(step, {"callbacks": {"ckpt_lightning.AsyncCheckpoint": ranking}})
        saver.wait()
        saver.pin(1)
        saver.pin(2)


def test_steps_that_are_kept_for_a_metric_have_it_and_the_best_is_marked(
    cli: Cli, tmp_path: Path
) -> None:
    _ranked(tmp_path, mode="min")
    rows = [line.rstrip() for line in cli("ls", tmp_path).out.splitlines()[2:5]]
    assert rows[0].endswith("committed, pinned, val_loss 0.5")
    assert rows[1].endswith("committed, pinned, val_loss 0.25, best")
    assert rows[2].endswith("committed, newest")
    steps = json.loads(cli("ls", tmp_path, "--json").out)["steps"]
    assert steps[1]["score"] == {"metric": "val_loss", "value": 0.25, "best": True}
    assert steps[2]["score"] is None


def test_without_a_direction_no_step_is_called_the_best(cli: Cli, tmp_path: Path) -> None:
    _ranked(tmp_path)
    answer = cli("ls", tmp_path).out
    assert "val_loss 0.25" in answer
    assert "best" not in answer


def test_a_newest_step_that_cannot_be_read_leaves_the_others_listed(
    cli: Cli, tmp_path: Path
) -> None:
    _ranked(tmp_path, mode="min")
    (tmp_path / "step-000000000003" / "rank-00000.json").write_bytes(b"[" * 10_000)
    answer = cli("ls", tmp_path)
    assert answer.code == 0
    assert "val_loss" not in answer.out


def test_a_root_without_steps_says_so(cli: Cli, tmp_path: Path) -> None:
    answer = cli("ls", tmp_path)
    assert answer.code == 0
    assert answer.out == f"{tmp_path} holds no committed step\n"
    assert json.loads(cli("ls", tmp_path, "--json").out)["steps"] == []


def test_above_roots_each_is_listed_with_its_newest_step(
    cli: Cli, ckpts: Path, tmp_path: Path
) -> None:
    answer = cli("ls", tmp_path)
    assert answer.code == 0
    assert f"{ckpts} " in answer.out and " 30\n" in answer.out
    assert answer.out.endswith(f"{tmp_path} holds no committed step; 1 root right below it\n")
    assert json.loads(cli("ls", tmp_path, "--json").out)["roots_below"] == {str(ckpts): 30}


def test_a_step_is_no_root(cli: Cli, ckpts: Path) -> None:
    answer = cli("ls", ckpts / "step-000000000010")
    assert answer.code == 2
    assert "ckpt-core show" in answer.err


def test_a_step_is_no_root_however_it_is_named(
    cli: Cli, ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latest").symlink_to(ckpts / "step-000000000010")
    monkeypatch.chdir(ckpts / "step-000000000010")
    for name in (".", tmp_path / "latest"):
        answer = cli("ls", name)
        assert answer.code == 2 and "is one step, not a root" in answer.err


def test_a_file_is_no_root(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cli("ls", tmp_path / "file").code == 2


def test_leftovers_and_corrupt_steps_are_told_apart(cli: Cli, ckpts: Path) -> None:
    begun = ckpts / ".inflight" / "000000000040-0123abcd"
    begun.mkdir(parents=True)
    (begun / "shard-00000-0.safetensors").write_bytes(bytes(5000))
    aside = ckpts / ".corrupt" / "step-000000000005-000000000005-0123abcd"
    aside.mkdir(parents=True)
    answer = cli("ls", ckpts)
    rows = {line.split()[0]: line for line in answer.out.splitlines()[2:] if line.strip()}
    assert "left over" in rows["40"]
    assert "4.9 KiB" in rows["40"]
    assert "corrupt, moved aside" in rows["5"]
    found = json.loads(cli("ls", ckpts, "--json").out)
    assert [row["step"] for row in found["in_flight"]] == [40]
    assert [row["step"] for row in found["corrupt"]] == [5]
    assert [row["step"] for row in found["steps"]] == [10, 20, 30]


def test_a_live_writer_is_named_and_its_attempt_is_in_flight(cli: Cli, ckpts: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(ckpts)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdin is not None
        writer.stdout.readline()
        found = json.loads(cli("ls", ckpts, "--json").out)
        text = cli("ls", ckpts).out
        writer.stdin.close()
    assert found["writer"]["pid"] == writer.pid
    assert f"open for writing by pid {writer.pid}" in text
    assert "in flight" in text


def test_looking_does_not_cost_a_writer_its_lock(cli: Cli, ckpts: Path) -> None:
    with Checkpointer(ckpts, Options(keep_last=None)) as checkpointer:
        cli("ls", ckpts)
        checkpointer.save(31, {"x": 1}).committed.result(60)
    assert json.loads(cli("ls", ckpts, "--json").out)["steps"][-1]["step"] == 31


def test_a_step_whose_manifest_is_damaged_is_listed_as_unreadable(cli: Cli, ckpts: Path) -> None:
    (ckpts / "step-000000000020" / "manifest.json").write_bytes(b"{}")
    (ckpts / "step-000000000010" / "manifest.json").unlink()
    os.mkfifo(ckpts / "step-000000000010" / "manifest.json")
    answer = cli("ls", ckpts)
    assert answer.code == 0
    assert answer.out.count("unreadable") == 2
    assert "step 20: " in answer.out
    assert "step 10: " in answer.out
    rows = json.loads(cli("ls", ckpts, "--json").out)["steps"]
    assert rows[1]["problem"]
    assert rows[1]["ranks"] is None


def test_the_size_of_a_step_that_this_user_may_not_read_is_not_known(
    cli: Cli, ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = ckpts / "step-000000000030"
    whole = json.loads(cli("ls", ckpts, "--json").out)["file_bytes"]
    known = whole - sum(path.stat().st_size for path in newest.iterdir())
    _forbid(newest, monkeypatch)
    text = cli("ls", ckpts).out
    assert "0 B" not in text and re.search(r"30 .* \? .*unreadable", text)
    assert text.splitlines()[-1] == f"3 committed steps, at least {size_text(known)} in all"
    found = json.loads(cli("ls", ckpts, "--json").out)
    row = found["steps"][-1]
    assert (row["file_bytes"], row["added_bytes"], found["file_bytes"]) == (None, None, known)
    cli("report", ckpts, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"at least {size_text(known)}" in page and "<td>?</td>" in page
    watched = cli("watch", ckpts, "--once").out
    assert f"3 steps, at least {size_text(known)} in the root" in watched
    assert "Permission denied" in watched
    made = json.loads(cli("doctor", ckpts, "--quick", "--json").out)["checks"]
    space = next(check for check in made if check["check"] == "free space")
    assert space["level"] == "note"
    assert space["found"].endswith("what the newest checkpoint takes is not known")


def _forbid(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may look into it, the superuser neither."""

    def refuse(path: Path) -> None:
        if Path(path).is_relative_to(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def listed(path: Path) -> list[os.DirEntry[str]]:
        refuse(path)
        return entries(path)

    def opened(files: Files, path: Path, **more: Any) -> int:
        refuse(path)
        return opens(files, path, **more)

    opens = Files.open_read
    monkeypatch.setattr(Files, "open_read", opened)
    monkeypatch.setattr("ckpt_core.cli.same_files.entries", listed)


def test_pins_of_steps_that_are_not_there_are_told(cli: Cli, ckpts: Path) -> None:
    (ckpts / ".pins" / "000000000099").touch()
    assert "pinned and not there: 99" in cli("ls", ckpts).out


def test_recycled_files_are_counted(cli: Cli, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "r", Options(keep_last=1)) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"x": 1}).committed.result(60)
        checkpointer.wait()
    found = json.loads(cli("ls", tmp_path / "r", "--json").out)
    assert found["slots"]["files"] >= 1
    assert "for the next saves" in cli("ls", tmp_path / "r").out
