"""`doctor`: the environment, and what holds for all its checks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_core.cli.doctor.environment import TORCH, check_environment
from ckpt_core.cli.doctor.machine import judge_memory
from ckpt_core.cli.doctor.trials import Trial, trials
from ckpt_core.cli.doctor.versions import is_older, is_there
from tests.cli.doctoring import Cli, Ended, diagnosis, ended

HIDING = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
HIDDEN = {"torch", "deepspeed", "hjson", "horovod", "lightning", "pytorch_lightning", "transformers"}
sys.meta_path.insert(0, Hidden())
from ckpt_core.cli import main
main()
"""


def _metadata(folder: Path, name: str, version: str, *requirements: str) -> None:
    """Let a package look as if this version of it were installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_what_is_installed_is_imported_and_what_is_broken_is_named(
    process: Cli, tmp_path: Path
) -> None:
    # Lightning, since the real one takes longest to import.
    broken = tmp_path / "lightning"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('half of it is missing')\n")
    made = diagnosis(process, PYTHONPATH=str(tmp_path), DS_ACCELERATOR="cpu")
    assert made.bad == ["lightning"]
    assert "ImportError: half of it is missing" in made.one("lightning")[1]
    assert made.one("torch")[0] == "ok"
    for name in ("deepspeed", "horovod"):
        if is_there(name):
            level, text = made.one(name)
            assert level == "ok"
            assert "not tried" not in text


def test_it_works_where_torch_and_the_frameworks_are_missing(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"checkpoint_engine": {"type": "ckpt_core", "in_flight": 0}}')

    def run(*arguments: object) -> Ended:
        return ended(sys.executable, "-c", HIDING, *arguments)

    made = diagnosis(run, "--config", config)
    assert made.bad == ["torch", "config"]
    assert "checkpoint_engine.in_flight=0" in made.one("config")[1]
    assert made.one("deepspeed")[0] == "warning"
    assert "lightning, horovod" in made.one("frameworks")[1]


def test_versions_are_compared_with_what_this_package_needs(process: Cli, tmp_path: Path) -> None:
    _metadata(tmp_path, "torch", "2.5.1+cu121")
    _metadata(tmp_path, "ckpt-core", "0.0.7", "typer>=0.20", "torch>=2.6 ; extra == 'x'")
    made = diagnosis(process, "--quick", PYTHONPATH=str(tmp_path))
    assert made.one("torch") == ("problem", "2.5.1+cu121 is too old; ckpt-core needs 2.6 or newer")
    level, text = made.one("ckpt-core")
    assert level == "warning"
    assert "the package installed is 0.0.7" in text


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("2.6.0+cu124", "2.6", False),
        ("2.10.0", "2.6", False),
        ("2.5.9", "2.6", True),
        ("0.18", "0.18.4", True),
        ("2.6.0.dev1", "2.6", False),
    ],
)
def test_versions_are_compared_by_number(version: str, least: str, older: bool) -> None:
    assert is_older(version, least) == older


def test_a_quick_run_imports_nothing(cli: Cli) -> None:
    made = diagnosis(cli, "--quick")
    assert "not tried" in made.one("torch")[1]
    assert made.of("devices") == []


@pytest.mark.parametrize(
    ("build", "devices", "level", "said"),
    [
        (None, [], "note", "built for CPUs alone"),
        ("12.6", [], "note", "built for 12.6 and sees no device: The driver is too old"),
        ("12.6", [["GPU X", 80 << 30]] * 2, "ok", "2 x GPU X (80.0 GiB)"),
        ("mps", [["mps", 0]], "ok", "1 x mps"),
    ],
)
def test_devices_are_told_as_torch_sees_them(
    build: str | None, devices: list[list[object]], level: str, said: str
) -> None:
    told = {"build": build, "devices": devices, "said": ["The driver\n is too old"]}
    checks = check_environment({"torch": Trial(told)}, (), asked=False)
    (found,) = [finding for finding in checks if finding.check == "devices"]
    assert found.level == level
    assert said in found.found


def test_people_get_a_table_and_the_count(cli: Cli, tmp_path: Path) -> None:
    answer = cli("doctor", "--quick", "--root", tmp_path)
    assert answer.code == 0
    assert answer.out.splitlines()[-1].startswith("no problem")
    (tmp_path / "file").touch()
    answer = cli("doctor", "--quick", "--root", tmp_path / "file")
    assert answer.code == 1
    (line,) = [line for line in answer.out.splitlines() if "PROBLEM" in line]
    assert "is no directory; name another" in line
    assert answer.out.splitlines()[-1].startswith("1 problem")


@pytest.mark.parametrize(
    "arguments", [["--config", "nowhere.json"], ["--script", "nowhere.py"], ["--script", "."]]
)
def test_what_cannot_be_read_ends_with_2(
    cli: Cli, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli("doctor", *arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("ckpt-core: ")
    assert arguments[1] in answer.err


# -- variables ---------------------------------------------------------------------------------


def test_a_variable_that_is_taken_is_told_with_who_takes_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_CORE_WRITERS", "4")
    made = diagnosis(cli, "--quick")
    level, text = made.one("variables")
    assert level == "note"
    assert "CKPT_CORE_WRITERS=4: read by Options.from_env()" in text


@pytest.mark.parametrize(
    ("name", "value", "level", "said"),
    [
        ("CKPT_CORE_WRITER", "4", "problem", "did you mean CKPT_CORE_WRITERS?"),
        ("CKPT_CORE_WRITERS", "many", "problem", "'many' is not a number"),
        ("CKPT_CORE_STAGING_BYTES", "2 GiBs", "problem", "is not a size"),
        ("ckpt_core_writers", "4", "warning", "write it in capitals"),
    ],
)
def test_a_variable_without_its_effect_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str, value: str, level: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    found = diagnosis(cli, "--quick").one("variables")
    assert found[0] == level
    assert said in found[1]


# -- the machine -------------------------------------------------------------------------------


def test_limits_of_the_process_are_seen(process: Cli) -> None:
    assert diagnosis(process, "--quick").one("limits")[0] == "ok"

    def limited(*arguments: object) -> Ended:
        command = 'ulimit -n 100 && ulimit -f 2048 && exec "$@"'
        return ended("bash", "-c", command, "bash", sys.executable, "-m", "ckpt_core", *arguments)

    texts = diagnosis(limited, "--quick").of("limits")
    assert [level for level, _ in texts] == ["warning", "warning"]
    assert "100 open files at most" in texts[0][1]
    assert "files of at most 2.0 MiB" in texts[1][1]


def test_a_name_server_that_does_not_answer_is_told(process: Cli, tmp_path: Path) -> None:
    assert diagnosis(process, "--quick").one("names")[0] == "ok"
    if os.geteuid() != 0:
        pytest.skip("another /etc/resolv.conf needs root")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\n")
    resolving = 'mount --bind "$1" /etc/resolv.conf && shift && exec "$@"'
    other = ["unshare", "--mount", "sh", "-c", resolving, "sh", tmp_path / "resolv.conf"]
    if subprocess.run([*other, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace is not allowed here")

    def lost(*arguments: object) -> Ended:
        patient = ["env", "RES_OPTIONS=timeout:5", sys.executable, "-m", "ckpt_core"]
        return ended(*other, *patient, *arguments)

    with socket.socket(type=socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.53", 53))
        level, text = diagnosis(lost, "--quick").one("names")
    assert level == "warning"
    assert "is looked up for 2.0 s or more" in text and "RES_OPTIONS" in text


@pytest.mark.parametrize(
    ("staging", "limited", "level"),
    [(None, True, "ok"), (None, False, "ok"), (4000, True, "ok"), (4001, True, "warning")],
)
def test_more_staging_memory_than_there_is_is_told(
    staging: int | None, limited: bool, level: str
) -> None:
    found = judge_memory(4000, staging, limited=limited)
    assert found.level == level
    assert ("in this control group" in found.found) is limited


def test_staging_bytes_of_the_environment_are_held_against_the_memory(process: Cli) -> None:
    level, text = diagnosis(process, "--quick", CKPT_CORE_STAGING_BYTES="900TiB").one("memory")
    assert level == "warning" and "lower CKPT_CORE_STAGING_BYTES" in text


def _told(program: str) -> Trial:
    with trials({"one": "import json", "other": program}) as running:
        assert running is not None
        results = running.results()
    assert results["one"] == Trial({})
    return results["other"]


@pytest.mark.parametrize(
    ("program", "trial"),
    [
        ("told['x'] = 1", Trial({"x": 1})),
        ("raise ImportError('half of it')", Trial({}, "ImportError: half of it")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Trial({}, "ended by SIGSEGV")),
        ("import os; os._exit(0)", Trial({}, "ended with 0")),
        ("import atexit, os; atexit.register(os._exit, 3)", Trial({}, "ended with 3")),
        ("import torch, sys; assert sys.argv == ['-c']", Trial({})),
    ],
)
def test_what_came_of_an_import_is_told_and_the_others_go_on(program: str, trial: Trial) -> None:
    assert _told(program) == trial


def test_a_torch_that_dies_is_told_of_all_and_no_process_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.syspath_prepend(tmp_path)
    programs = {"torch": TORCH.program, "other": "import json"}
    with trials(programs) as running:
        assert running is not None
        assert {trial.error for trial in running.results().values()} == {"ended by SIGSEGV"}
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    with trials(programs) as running:
        pass
    assert running is not None
    assert {trial.error for trial in running.results().values()} == {"ended by SIGKILL"}


def _wait_for(happened: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_imports_that_go_on_are_ended_with_the_command(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = f"""
import os, time
with open({str(pid)!r} + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename({str(pid)!r} + ".new", {str(pid)!r})
time.sleep(600)
"""
    with trials({"slow": program}) as running:
        assert running is not None
        _wait_for(pid.exists)
    _wait_for(lambda: not Path(f"/proc/{pid.read_text()}/exe").exists())
