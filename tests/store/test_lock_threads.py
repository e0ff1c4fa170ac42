"""A root's lock that threads of one process take and give back all the time."""

from __future__ import annotations

import threading
from pathlib import Path

from ckpt_core.errors import RootBusy
from ckpt_core.store import RootLock


def test_threads_take_turns_and_never_hold_it_together(tmp_path: Path) -> None:
    inside, most, turns = [0], [0], [0] * 4
    errors: list[BaseException] = []

    def take(number: int) -> None:
        lock = RootLock(tmp_path)
        try:
            while turns[number] < 100:
                try:
                    lock.acquire()
                except RootBusy:
                    continue
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                turns[number] += 1
                inside[0] -= 1
                lock.release()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and turns == [100] * 4
    assert most == [1]
