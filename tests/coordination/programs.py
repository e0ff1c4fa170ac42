"""What members of a crew do. By name, since other processes must find it."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

from ckpt_core.coordination import Ballot, StoreOptions, TorchStore, client
from ckpt_core.coordination.bootstrap import GroupStore
from ckpt_core.coordination.channel import Channel
from ckpt_core.errors import CoordinationTimeout
from tests.coordination.crew import TIMEOUT_S, Seat

OPTIONS = StoreOptions(timeout=TIMEOUT_S)
SPARE, LATE_S = 3, 4.0
WAITS = "waits"


def commit(store: TorchStore, step: int, timeout_s: float = TIMEOUT_S) -> tuple[Any, ...]:
    attempt = store.attempt_id(step)
    data = store.agree(attempt, step, Ballot("plan", store.info.rank), timeout_s)
    store.settle(attempt, step, None, timeout_s)
    return data


def three_commits(store: TorchStore) -> list[Any]:
    with store:
        found = [commit(store, step) for step in range(3)]
        return [list(store.info.members), list(store.gather("x", store.info.rank, 60.0)), found]


def by_address(seat: Seat) -> list[Any]:
    return three_commits(seat.join())


def _environment(seat: Seat) -> None:
    os.environ |= {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.world_size),
        "MASTER_ADDR": seat.host,
        "MASTER_PORT": str(seat.port),
    } | seat.extra.get("environment", {})


def by_environment(seat: Seat) -> list[Any]:
    _environment(seat)
    return three_commits(TorchStore.from_env(**seat.extra.get("arguments", {}), options=OPTIONS))


def by_environment_with_a_late_connection(seat: Seat) -> str:
    """Rank 1 is slow to open one that it does not need yet; rank 0 closes at once."""
    _environment(seat)
    probes, closed = itertools.count(1), Path(seat.folder) / "closed"

    def probe(address: tuple[str, int], **more: Any) -> socket.socket:
        found = socket.create_connection(address, **more)
        deadline = time.monotonic() + LATE_S
        late = address[1] != seat.port and next(probes) == SPARE
        while late and not closed.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    if seat.rank == 1:
        client.socket = types.SimpleNamespace(create_connection=probe)  # type: ignore[assignment]
    TorchStore.from_env(options=OPTIONS).close()
    seat.leave_file("closed")
    return "met"


def without_rank_0(seat: Seat) -> None:
    """It keeps the store at MASTER_PORT, says nothing of ours, and goes while rank 1 waits for it."""
    _environment(seat)
    if seat.rank == 0:
        kept = client.open_store(seat.host, seat.port, TIMEOUT_S, is_master=True)
        kept.wait([WAITS], timedelta(seconds=TIMEOUT_S))
        os._exit(0)
    await_values = Channel.wait

    def tell_then(channel: Channel, *given: Any) -> Any:
        # The wait opens none: torch would try a store that has just gone for a minute.
        channel._clients.warm(2, channel.deadline)()
        channel.put(WAITS, "1")
        return await_values(channel, *given)

    Channel.wait = tell_then  # type: ignore[method-assign]
    TorchStore.from_env(options=OPTIONS)


def by_environment_with_a_group(seat: Seat) -> list[Any]:
    """A process group at the same MASTER_PORT, before or after, and destroyed while ours goes on."""
    import torch.distributed as dist

    _environment(seat)
    timeout = timedelta(seconds=TIMEOUT_S)
    if seat.extra["first"] == "group":
        dist.init_process_group("gloo", timeout=timeout)
        store = TorchStore.from_env(options=OPTIONS)
    else:
        store = TorchStore.from_env(options=OPTIONS)
        dist.init_process_group("gloo", timeout=timeout)
    dist.barrier()
    dist.destroy_process_group()
    return three_commits(store)


def by_group(seat: Seat) -> list[Any]:
    """From a process group, of all ranks or of the odd ones, over a TCPStore or a file."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=seat.extra["init"],
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = dist.new_group([1, 2]) if seat.extra.get("part") else None
    if group is not None and seat.rank == 0:
        dist.barrier()  # this process keeps the store
        return []
    options = StoreOptions(timeout=TIMEOUT_S, address="127.0.0.1")
    store = TorchStore.from_process_group(group, options=options)
    again = TorchStore.from_process_group(group, options=options)
    assert store.attempt_id(1) != again.attempt_id(1)
    again.close()
    if group is not None:
        found = three_commits(store)
        dist.barrier()
        return found
    dist.destroy_process_group()
    return three_commits(store)


def name_of_half(seat: Seat) -> str:
    """Under which half of the ranks would meet where both halves have one name: torch counts anew below
    each group that is split.
    """
    import torch.distributed as dist

    init = f"tcp://{seat.host}:{seat.port}"
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=init, rank=seat.rank, world_size=seat.world_size, timeout=timeout
    )
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[seat.rank // 2]
    dist.distributed_c10d._world.pg_names[mine] = "half"
    name = GroupStore.of(mine).name
    dist.barrier()
    dist.destroy_process_group()
    return name


def by_file_exchange(seat: Seat) -> list[Any]:
    """The ranks have a way of their own to broadcast: here a file."""
    place = Path(seat.folder) / "address"

    def exchange(text: str | None) -> str:
        if text is not None:
            place.with_suffix(".new").write_text(text)
            place.with_suffix(".new").rename(place)
        deadline = time.monotonic() + TIMEOUT_S
        while not place.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return place.read_text()

    options = StoreOptions(timeout=TIMEOUT_S, address="127.0.0.1")
    return three_commits(
        TorchStore.from_exchange(
            exchange, rank=seat.rank, world_size=seat.world_size, options=options
        )
    )


def forget_to_close(seat: Seat) -> str:
    """Ends with attempts under way, of threads that wait."""
    store = seat.join()
    commit(store, 1)
    if seat.extra["waiting"] and seat.rank == 1:
        threading.Thread(target=commit, args=(store, 2), daemon=True).start()
    seat.extra["kept alive"] = store
    return "done"


def forked_child_exits(seat: Seat) -> list[Any]:
    """A child made by a plain fork uses nothing of the parent's, and ends; the parent goes on."""
    store = seat.join()
    commit(store, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.decline("000000000002-00000000", 2, RuntimeError("not from here"))
            store.close()
            store.gather("x", 1, 1.0)
        except Exception as exc:
            code = 0 if "forked" in str(exc) else 2
        del store
        raise SystemExit(code)
    _, status = os.waitpid(child, 0)
    found = commit(store, 2)
    store.close()
    return [os.waitstatus_to_exitcode(status), found]


def commit_until_told(seat: Seat) -> Any:
    """Rank 1 votes for a step that rank 0, which is stopped, never decides."""
    store = seat.join()
    commit(store, 1)
    seat.leave_file(f"ready-{seat.rank}")
    if seat.rank == 0:
        threading.Event().wait(TIMEOUT_S)
        return None
    deadline = time.monotonic() + TIMEOUT_S
    while not (Path(seat.folder) / "stopped").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return commit(store, 2, seat.extra["timeout_s"])


def commit_behind_a_stop(seat: Seat) -> Any:
    """Rank 0 is stopped before its vote until rank 1 has ended the attempt without it; how long it took."""
    store = seat.join()
    commit(store, 1)
    if seat.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        commit(store, 2)
    except CoordinationTimeout as exc:
        return time.monotonic() - began, str(exc)
    finally:
        seat.leave_file(f"ended-{seat.rank}")


if __name__ == "__main__":
    # A process of its own, which ends as any Python does; those of a Crew skip the end of the interpreter.
    name, *numbers, folder, waiting = sys.argv[1:]
    port, rank, world_size = map(int, numbers)
    extra = {"waiting": waiting == "True"}
    seat = Seat(rank, world_size, "127.0.0.1", port, folder, dead_after=3.0, extra=extra)
    print("said", globals()[name](seat), flush=True)
