"""Real processes: every way to find each other, a store that stops answering, processes that end or fork."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.bench.meeting import free_port
from ckpt_core.coordination.client import serve
from tests.coordination import programs
from tests.coordination.crew import TIMEOUT_S, Crew, Program, Said, Seat

TOP = Path(__file__).parents[2]


def seats(folder: Path, world_size: int, **extra: Any) -> list[Seat]:
    port = free_port()
    return [
        Seat(rank, world_size, "127.0.0.1", port, str(folder), extra=dict(extra))
        for rank in range(world_size)
    ]


def run(program: Program, found: Sequence[Seat]) -> list[Said | None]:
    with Crew(program, found) as crew:
        return crew.said()


def committed(world_size: int, members: Sequence[Sequence[int]] = ()) -> list[Said]:
    everyone = list(range(world_size))
    groups = [list(one) for one in members] or [everyone] * world_size
    return [
        Said([group, everyone, [tuple(group) if group[0] == rank else ()] * 3])
        for rank, group in enumerate(groups)
    ]


def test_ranks_that_know_host_and_port_meet_there(tmp_path: Path) -> None:
    assert run(programs.by_address, seats(tmp_path, 4)) == committed(4)


def test_ranks_that_can_broadcast_text_need_no_port(tmp_path: Path) -> None:
    assert run(programs.by_file_exchange, seats(tmp_path, 3)) == committed(3)


def test_the_environment_of_a_launcher_without_a_store_is_enough(tmp_path: Path) -> None:
    assert run(programs.by_environment, seats(tmp_path, 2)) == committed(2)


def test_rank_0_may_close_while_rank_1_opens_a_connection_that_it_does_not_need(
    tmp_path: Path,
) -> None:
    said = run(programs.by_environment_with_a_late_connection, seats(tmp_path, 2))
    assert said == [Said("met")] * 2


def test_a_rank_0_that_goes_before_it_has_told_its_address_is_named(tmp_path: Path) -> None:
    _, said = run(programs.without_rank_0, seats(tmp_path, 2))
    assert said is not None and said.kind == "CommitError"
    assert "rank 1 could not connect" in said.text and "kept by rank 0 is gone" in said.text


def test_the_environment_tells_which_ranks_share_a_machine(tmp_path: Path) -> None:
    found = [
        replace(
            seat,
            extra={
                "environment": {"GROUP_RANK": str(seat.rank // 2)},
                "arguments": {"roots": "node"},
            },
        )
        for seat in seats(tmp_path, 4)
    ]
    expected = committed(4, [(0, 1), (0, 1), (2, 3), (2, 3)])
    assert run(programs.by_environment, found) == expected


def test_the_agents_store_is_used_and_may_hold_keys_of_an_earlier_run(tmp_path: Path) -> None:
    agent = serve("127.0.0.1", 0)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}
    found = [
        replace(seat, port=agent.port, extra={"environment": environment})
        for seat in seats(tmp_path, 2)
    ]
    with Crew(programs.by_environment, found[1:]) as alone:
        # Killed while it waits for rank 0: what it left in the store is stale.
        deadline = time.monotonic() + TIMEOUT_S
        while agent.num_keys() == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        alone.signal(0, signal.SIGKILL)
    for _ in range(2):
        assert run(programs.by_environment, found) == committed(2)


@pytest.mark.parametrize("first", ["group", "store"])
def test_a_process_group_may_use_the_same_master_port(tmp_path: Path, first: str) -> None:
    found = run(programs.by_environment_with_a_group, seats(tmp_path, 2, first=first))
    assert found == committed(2)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_process_group_leads_to_the_store_and_may_be_destroyed(tmp_path: Path, kind: str) -> None:
    port = free_port()
    init = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{tmp_path}/group"
    assert run(programs.by_group, seats(tmp_path, 2, init=init)) == committed(2)


def test_the_members_of_a_part_of_the_world_save_together(tmp_path: Path) -> None:
    init = f"tcp://127.0.0.1:{free_port()}"
    found = run(programs.by_group, seats(tmp_path, 3, init=init, part=True))
    assert found[1:] == committed(2)


def test_groups_to_which_torch_has_given_one_name_do_not_meet(tmp_path: Path) -> None:
    said = run(programs.name_of_half, seats(tmp_path, 4))
    names = [one.value for one in said if one is not None and one.ok]
    assert len(names) == 4, said
    assert names[0] == names[1] != names[2] == names[3]


def test_torchrun_starts_ranks_that_meet(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from ckpt_core.coordination import TorchStore\n"
        "from tests.coordination.programs import OPTIONS, three_commits\n"
        "store = TorchStore.from_env(options=OPTIONS)\n"
        "import os\n"
        "line = f'found {store.info.rank} {three_commits(store)[1]}\\n'\n"
        "os.write(1, line.encode())  # at once: lines of two ranks must not mix\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [*command, str(script)],
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "found" in line) == [
        f"found {rank} [0, 1]" for rank in range(2)
    ]


def run_alone(name: str, folder: Path, waiting: bool = False) -> list[tuple[int, str]]:
    """Exit code and last words of two processes of their own."""
    port = free_port()
    started = []
    try:
        for rank in range(2):
            words = [name, port, rank, 2, folder, waiting]
            command = [sys.executable, "-m", "tests.coordination.programs", *map(str, words)]
            started.append(subprocess.Popen(command, cwd=TOP, stdout=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize("waiting", [False, True])
def test_a_process_that_forgets_to_close_still_ends(tmp_path: Path, waiting: bool) -> None:
    assert run_alone("forget_to_close", tmp_path, waiting) == [(0, "said done\n")] * 2


def test_a_forked_child_neither_hangs_nor_disturbs_its_parent(tmp_path: Path) -> None:
    found = run_alone("forked_child_exits", tmp_path)
    assert found == [(0, "said [0, (0, 1)]\n"), (0, "said [0, ()]\n")]


@pytest.mark.parametrize("kept", ["by rank 0", "elsewhere"])
def test_a_rank_0_that_is_stopped_holds_nobody_beyond_the_deadline(
    tmp_path: Path, kept: str
) -> None:
    agent = serve("127.0.0.1", 0)
    found = [replace(seat, dead_after=300.0) for seat in seats(tmp_path, 2, timeout_s=3.0)]
    if kept == "elsewhere":
        found = [replace(seat, port=agent.port, hosted=False) for seat in found]
    with Crew(programs.commit_until_told, found) as crew:
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        crew.signal(0, signal.SIGSTOP)
        began = time.monotonic()
        (tmp_path / "stopped").touch()
        crew.processes[1].join(TIMEOUT_S)
        # Far below what a stopped store would hold it without a deadline, which is for ever.
        assert time.monotonic() - began < 60.0
        crew.processes[0].kill()
        said = crew.said()[1]
    assert said is not None
    assert said.kind in ("CoordinationTimeout", "CommitError")
    assert "rank 0" in said.text


def test_a_rank_0_that_was_stopped_hears_at_once_how_the_attempt_has_ended(tmp_path: Path) -> None:
    agent = serve("127.0.0.1", 0)
    found = [
        replace(seat, port=agent.port, hosted=False, dead_after=2.0) for seat in seats(tmp_path, 2)
    ]
    with Crew(programs.commit_behind_a_stop, found) as crew:
        deadline = time.monotonic() + TIMEOUT_S
        while not (tmp_path / "ended-1").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        crew.signal(0, signal.SIGCONT)
        said = [one.value for one in crew.said() if one is not None and one.ok]
    assert len(said) == 2
    assert said[0][0] < TIMEOUT_S / 2
    assert said[0][1] == said[1][1]
    assert "rank 0: it has been silent" in said[0][1]


SLOW = """
import time
from ckpt_core.coordination import client

opened = client.open_store

def slow(*args, **settings):
    time.sleep(3)
    print("opened late", flush=True)
    return opened(*args, **settings)

server = client.serve("127.0.0.1", 0)
client.open_store = slow
clients = client.Clients(client.Address("127.0.0.1", server.port, "me"), patience_s=30)
clients._new().start(lambda store: None)
clients.close()
print("closed", flush=True)
"""


def test_the_end_of_a_process_waits_for_a_connection_that_is_slow_to_open() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLOW],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["closed", "opened late"]
