"""Any call to the operating system may be refused: what comes out of a call of ours is an error of ours."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import (
    Checkpointer,
    CkptError,
    Options,
    RestoreError,
    committed_directories,
    load,
    verify,
)
from ckpt_core.cli import main
from ckpt_core.restore import Restorer
from ckpt_core.system.files import Files
from tests import places
from tests.crash.layers import hooked
from tests.faults.refusals import CODES, Refusal, refusing
from tests.restore.ranks import Job, write_ranks

_MOST = 700
_LONG = ("save and share",)
STEPS = (1, 2, 3)


def state(step: int = 0) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "n": step}


def options() -> Options:
    return Options(
        keep_last=2, staging_bytes=1 << 20, chunk_bytes=1 << 18, on_error="warn", timeout=60
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two steps, a slot, a pin and a directory of files; tests work on copies."""
    root = tmp_path_factory.mktemp("prepared") / "root"
    with Checkpointer(root, options()) as ck:
        for step in STEPS:
            ck.save(step, state(step)).committed.result(60)
        ck.pin(2)
        files = ck.begin_files(3, "tag", pointer="latest")
        files.add("a.pt", state())
        files.seal().committed.result(60)
    return root


Call = Callable[[Path], Any]


def plainly(root: Path) -> Checkpointer:
    return Checkpointer(root, options())


def opened(
    act: Callable[[Checkpointer], Any], made: Callable[[Path], Checkpointer] = plainly
) -> Call:
    """A call of a Checkpointer that was made before; the refusal strikes the call alone."""

    def call(root: Path) -> Any:
        return act(_ck[root])

    call.made = made  # type: ignore[attr-defined]
    return call


_ck: dict[Path, Checkpointer] = {}


def make(root: Path) -> None:
    with Checkpointer(root, options()):
        pass


def save(ck: Checkpointer, step: int = 4) -> None:
    handle = ck.save(step, state(4))
    for future in (handle.staged, handle.committed):
        error = future.exception(60)
        if error is not None:
            raise error


def sharing(root: Path) -> Checkpointer:
    """One that has files which the next saves link."""
    settings = replace(options(), share_unchanged=True, frozen=["w"], eager_leaf_bytes=64)
    ck = Checkpointer(root, settings)
    save(ck)
    for number in range(2):
        save_named(ck, f"tag{number}")
    return ck


def share(ck: Checkpointer) -> None:
    """A plain save and one of named files, whatever becomes of the first."""
    try:
        save(ck, 5)
    finally:
        save_named(ck, "more")


def save_named(ck: Checkpointer, name: str) -> None:
    files = ck.begin_files(4, name)
    files.add("a.pt", state())
    error = files.seal().committed.exception(60)
    if error is not None:
        raise error


def command(*arguments: Any) -> Call:
    """The command line: it answers with a line of text and an exit status, never with a traceback."""

    def call(root: Path) -> None:
        before, sys.argv = (
            sys.argv,
            ["ckpt-core", *(str(a).replace("ROOT", str(root)) for a in arguments)],
        )
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            sys.argv = before
        assert ended.value.code in (0, 1, 2, None), ended.value.code

    return call


CALLS: dict[str, Call] = {
    "Checkpointer": make,
    "save": opened(save),
    "save and share": opened(share, sharing),
    "restore": opened(lambda ck: ck.restore(state())),
    "restore step": opened(lambda ck: ck.restore(state(), step=2)),
    "steps": opened(lambda ck: (ck.steps(), ck.latest_step())),
    "pin": opened(lambda ck: ck.pin(3)),
    "unpin": opened(lambda ck: ck.unpin(2)),
    "prepare": opened(lambda ck: ck.prepare(state())),
    "close": opened(lambda ck: ck.close()),
    "load": load,
    "load a step": lambda root: load(root / "step-000000000003"),
    "verify": verify,
    "verify a step": lambda root: verify(root / "step-000000000003"),
    "committed_directories": committed_directories,
    "ckpt-core ls": command("ls", "ROOT"),
    "ckpt-core show": command("show", "ROOT"),
    "ckpt-core verify": command("verify", "ROOT"),
    "ckpt-core diff": command("diff", "ROOT/step-000000000002", "ROOT/step-000000000003"),
    "ckpt-core pin": command("pin", "ROOT", "3"),
    "ckpt-core unpin": command("unpin", "ROOT", "2"),
    "ckpt-core rm": command("rm", "ROOT", "--step", "3", "--yes"),
}


def try_call(root: Path, call: Call, refusal: Refusal) -> BaseException | None:
    """What came out of the call, at once or for good."""
    made = getattr(call, "made", None)
    if made is not None:
        _ck[root] = made(root)
    try:
        with refusing(refusal):
            call(root)
    except CkptError as exc:
        return exc
    finally:
        if made is not None:
            _ck.pop(root).close()
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call_gives_an_error_of_ours_and_the_next_one_works(
    name: str, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    struck = []
    # One that takes long to prepare is refused a fifth of its calls, each run others.
    apart = 5 if name in _LONG and places.run_number() != "all" else 1
    for n in range(random.Random(f"{places.run_number()} {name}").randrange(apart), _MOST, apart):
        root = tmp_path / "root"
        shutil.copytree(prepared, root)
        code = CODES[n % len(CODES)]
        refusal = Refusal(n, code)
        try:
            error = try_call(root, CALLS[name], refusal)
        except BaseException as exc:
            raise AssertionError(f"{errno.errorcode[code]} for {refusal.struck}") from exc
        assert "Traceback" not in capsys.readouterr().err, refusal.struck
        if error is not None:
            assert len(str(error)) > 40, repr(error)
        with Checkpointer(root, options()) as again:
            assert again.steps()
            again.save(9, state(9)).committed.result(60)
        assert load(root)["n"] == 9
        shutil.rmtree(root)
        if refusal.struck is None:
            break
        struck.append(refusal.struck)
    assert refusal.struck is None
    print(f"{len(struck)} calls were refused")


def test_the_save_that_is_refused_to_share_does_share(prepared: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    with sharing(root) as ck:
        share(ck)
        still = root / "step-000000000005" / "shard-00000-1.safetensors"
        assert still.stat().st_nlink == 2
        assert (root / "more" / "a.pt").stat().st_nlink == 2


@contextlib.contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """No more than so many files may be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("free", range(4))
@pytest.mark.filterwarnings("ignore")
def test_without_descriptors_every_call_says_so(free: int, prepared: Path, tmp_path: Path) -> None:
    for name, call in CALLS.items():
        if name.startswith("ckpt-core"):
            continue
        root = tmp_path / name
        shutil.copytree(prepared, root)
        made = getattr(call, "made", None)
        if made is not None:
            _ck[root] = made(root)
        try:
            with few_descriptors(free), contextlib.suppress(CkptError):
                call(root)
        finally:
            if made is not None:
                _ck.pop(root).close()
        with Checkpointer(root, options()) as again:
            again.save(9, state(9)).committed.result(60)


def test_a_step_of_more_files_than_may_be_open_is_read(tmp_path: Path) -> None:
    written = Job(100, replicated={"w": torch.arange(100_000.0)})
    write_ranks(tmp_path / "root", 5, written)
    live = {"shared": {"w": torch.zeros(100_000)}, "own": {}, "boxed": {}}
    with few_descriptors(60):
        assert verify(tmp_path / "root").ok
        with Checkpointer(tmp_path / "root", options()) as ck:
            found = ck.restore(live)
    assert found is not None and found.step == 5
    assert torch.equal(live["shared"]["w"], written.replicated["w"])


@pytest.mark.filterwarnings("ignore")
def test_for_want_of_descriptors_no_older_step_is_restored(tmp_path: Path) -> None:
    root, few = tmp_path / "root", Job(2, replicated={"w": torch.ones(9000)})
    write_ranks(root, 1, few)
    write_ranks(root, 2, replace(few, world=9))
    live = {"shared": {"w": torch.zeros(9000)}, "own": {}, "boxed": {}}
    for free in range(3, 12):
        caught: RestoreError | None = None
        with few_descriptors(free):
            try:
                found = Restorer(root, files=Files(), readers=8, timeout_s=60).restore(live)
                assert found is not None and found.step == 2
                assert verify(root).ok
            except RestoreError as exc:
                caught = exc
        assert caught is None or "too many open files" in str(caught)


@pytest.mark.parametrize("parts", [[300], [200] * 30])
def test_a_path_that_is_too_long_is_refused_by_name(parts: list[int], tmp_path: Path) -> None:
    root = tmp_path.joinpath(*["x" * length for length in parts])
    for call in (
        make,
        load,
        verify,
        committed_directories,
        lambda path: load(path / "step-000000000001"),
    ):
        with pytest.raises(CkptError) as caught:
            call(root)
        assert "too long" in str(caught.value)


class OutOfMemory:
    """The n-th read finds no memory for its buffer."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.struck = False

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        self._n -= 1
        if self._n == -1:
            self.struck = True
            raise MemoryError
        return act()


def test_a_lack_of_memory_is_no_damage(prepared: Path, tmp_path: Path) -> None:
    reads = ("open_read", "preadv", "preadv_cached")
    calls: dict[str, Callable[[Files], Any]] = {
        "load": lambda files: load(prepared, files=files),
        "verify": lambda files: verify(prepared, files=files),
        "restore": lambda files: Restorer(prepared, files=files, readers=2, timeout_s=60).restore(
            state()
        ),
    }
    for name, call in calls.items():
        for n in range(_MOST):
            fault = OutOfMemory(n)
            try:
                call(hooked(Files, fault, reads))
            except RestoreError as exc:
                caught: RestoreError | None = exc
            else:
                caught = None
            if not fault.struck:
                break
            assert caught is not None, f"{name}, read {n}"
            assert "memory" in str(caught), f"{name}, read {n}"
            assert type(caught).__name__ == "NoMeans", f"{name}, read {n}"
        assert n > 3, name
