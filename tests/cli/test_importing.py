"""`import`: what torch.save and torch.distributed.checkpoint have written becomes a step."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt_core
from ckpt_core import Checkpointer, RngState, committed_steps
from ckpt_core.cli.importing import choosing
from ckpt_core.cli.importing.source import Source
from ckpt_core.system.files import Files
from tests.crash.layers import hooked
from tests.crash.warm import Warm

Cli = Callable[..., Any]
TOP = Path(__file__).parents[2]
HALF, WHOLE = 4, 8


class Own:
    """A class that nobody knows to be harmless."""

    def __init__(self) -> None:
        self.text = "own"


def network(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)]
    model = torch.nn.Sequential(*layers)
    first, last = [*layers[0].parameters()], [*layers[2].parameters()]
    return model, torch.optim.AdamW([{"params": first}, {"params": last, "lr": 0.01}])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((3, 4), float(step))).square().mean().backward()
        optimizer.step()


def ending(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that must be equal, bit by bit, when two runs are."""
    rows = optimizer.state_dict()["state"]
    kept = [rows[number][name] for number in sorted(rows) for name in sorted(rows[number])]
    return [*model.state_dict().values(), *kept, torch.get_rng_state()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """What a run has saved in its middle, each way; and how it ended."""
    folder = tmp_path_factory.mktemp("halfway")
    model, optimizer = network()
    train(model, optimizer, range(HALF))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": HALF}
    saved |= {"rng": RngState().state_dict(), "history": [{"loss": 1.5}, {"loss": np.float64(0.5)}]}
    torch.save(saved, folder / "last.pt")
    weights, moments = get_state_dict(model, optimizer)
    named = {"model": weights, "optimizer": moments, "step": HALF, "rng": saved["rng"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(named, checkpoint_id=folder / "named")
        dcp.save({**saved, "history": [{"w": torch.ones(2)}, 3]}, checkpoint_id=folder / "numbered")
    train(model, optimizer, range(HALF, WHOLE))
    return folder, ending(model, optimizer)


@pytest.mark.parametrize("name", ["last.pt", "named", "numbered"])
def test_a_run_changes_over_in_its_middle(
    name: str, cli: Cli, tmp_path: Path, halfway: tuple[Path, list[torch.Tensor]]
) -> None:
    answer = cli("import", halfway[0] / name, tmp_path / "ckpts", "--json")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert (said["format"], said["step"]) == ("torch" if "." in name else "dcp", HALF)
    assert said["trusted"] == []
    model, optimizer = network(seed=1)
    state = {"model": model, "optimizer": optimizer, "rng": RngState()}
    with Checkpointer(tmp_path / "ckpts") as ck:
        found = ck.restore(state, only=[*state])
        assert found is not None
        train(model, optimizer, range(found.step, WHOLE))
        assert same(ending(model, optimizer), halfway[1])
        ck.save(WHOLE, state).committed.result()
    assert committed_steps(tmp_path / "ckpts") == (HALF, WHOLE)


def test_load_gives_what_was_saved(
    cli: Cli, tmp_path: Path, halfway: tuple[Path, list[torch.Tensor]]
) -> None:
    assert "committed and verified" in cli("import", halfway[0] / "last.pt", tmp_path / "a").out
    cli("import", halfway[0] / "numbered", tmp_path / "b")
    tree = ckpt_core.load(tmp_path / "a")
    assert tree["history"] == [{"loss": 1.5}, {"loss": 0.5}]
    assert [*tree] == ["model", "optimizer", "step", "rng", "history"]
    listed = ckpt_core.load(tmp_path / "b")["history"]
    assert torch.equal(listed[0]["w"], torch.ones(2)) and listed[1] == 3


def save_dcp(saved: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved, checkpoint_id=path)
    return path


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_without_a_state_is_gone_on_from(
    named: bool, cli: Cli, tmp_path: Path
) -> None:
    model, _ = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    weights, moments = get_state_dict(model, optimizer)
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = {"model": weights, "optimizer": moments} if named else plain
    answer = cli("import", save_dcp(saved, tmp_path / "dcp"), tmp_path / "r", "--step", 1)
    assert answer.code == 0 and "optimizer (" in answer.err and "state is empty" in answer.err
    other, _ = network(seed=1)
    restored = torch.optim.SGD(other.parameters(), lr=0.5)
    with Checkpointer(tmp_path / "r") as ck:
        ck.restore({"model": other, "optimizer": restored})
    assert restored.state_dict() == optimizer.state_dict()
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_optimizers_in_a_list_know_parameters_by_number(cli: Cli, tmp_path: Path) -> None:
    model, optimizer = network()
    train(model, optimizer, range(2))
    rows = optimizer.state_dict()
    cli("import", save_dcp({"all": [rows], "step": 2}, tmp_path / "dcp"), tmp_path / "r")
    (found,) = ckpt_core.load(tmp_path / "r")["all"]
    assert [*found["state"]] == [*rows["state"]]
    assert found["param_groups"] == rows["param_groups"]


def test_items_of_a_list_keep_their_places_where_dcp_leaves_one_out(
    cli: Cli, tmp_path: Path
) -> None:
    saved = {
        "lst": [{}, {"a": torch.ones(2)}, [], torch.zeros(1)],
        "buf": [{"x": {}}, {"x": {"y": torch.ones(1)}}],
        "step": 5,
    }
    source = save_dcp(saved, tmp_path / "dcp")
    answer = cli("import", source, tmp_path / "r", "--json")
    tree = ckpt_core.load(tmp_path / "r")
    assert tree["lst"] == [{}, {"a": tree["lst"][1]["a"]}, [], torch.zeros(1)]
    assert tree["buf"] == [{}, {"x": {"y": torch.ones(1)}}]
    assert [*json.loads(answer.out)["changed"]] == ["lst.0", "buf.0"]


def test_what_is_no_dict_gets_a_key_and_what_says_no_step_is_told_it(
    cli: Cli, tmp_path: Path
) -> None:
    model, _ = network()
    torch.save(model.state_dict(), tmp_path / "weights.bin")
    torch.save([torch.ones(3)], tmp_path / "list.pt", _use_new_zipfile_serialization=False)
    assert "does not say which step" in cli("import", tmp_path / "weights.bin", tmp_path / "r").err
    answer = cli("import", tmp_path / "list.pt", tmp_path / "r", "--step", 1)
    assert answer.code == 2 and "--as model" in answer.err
    assert not (tmp_path / "r").exists(), "the root is opened for what can be saved alone"
    taken = cli("import", tmp_path / "weights.bin", tmp_path / "r", "--step", 5, "--as", "model")
    assert taken.code == 0
    assert cli("import", tmp_path / "list.pt", tmp_path / "r", "--step", 6, "--as", "l").code == 0
    other, _ = network(seed=1)
    with Checkpointer(tmp_path / "r") as ck:
        ck.restore({"model": other}, step=5)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_objects_that_may_run_code_are_built_where_they_are_trusted_alone(
    cli: Cli, tmp_path: Path
) -> None:
    torch.save({"step": 3, "w": torch.ones(2), "own": Own()}, tmp_path / "own.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"step": 3, "w": torch.ones(2), "own": Own()}, checkpoint_id=tmp_path / "own")
    for name in ("own.pt", "own"):
        refused = cli("import", tmp_path / name, tmp_path / "r")
        assert refused.code == 2 and f"{__name__}.Own" in refused.err and "--trusted" in refused.err
        assert not (tmp_path / "r").exists()
    for name, root in (("own.pt", tmp_path / "r"), ("own", tmp_path / "s")):
        taken = cli("import", tmp_path / name, root, "--trusted")
        assert taken.code == 0 and "trusted=True: pickled objects at own" in taken.err
        assert ckpt_core.load(root, trusted=True)["own"].text == "own"


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_a_metadata_file_that_asks_for_code_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(_Runs()))
    answer = cli("import", tmp_path / "evil", tmp_path / "r")
    assert answer.code == 2 and "system" in answer.err and "--trusted" in answer.err
    assert not (tmp_path / "ran").exists() and not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("last.pt", how) for how in ("cut", "flipped", "no pickle")),
        *(("named", how) for how in ("cut", "no pickle")),  # DCP has no checksums
    ],
)
def test_a_damaged_source_is_told_and_nothing_is_published(
    name: str, how: str, cli: Cli, tmp_path: Path, halfway: tuple[Path, list[torch.Tensor]]
) -> None:
    source = tmp_path / name
    if name == "named":
        shutil.copytree(halfway[0] / name, source)
        file = source / ".metadata" if how == "no pickle" else next(source.glob("*.distcp"))
    else:
        file = Path(shutil.copy(halfway[0] / name, source))
    whole = file.read_bytes()
    weights = (
        torch.load(halfway[0] / "last.pt", weights_only=False)["model"]["0.weight"]
        .numpy()
        .tobytes()
    )
    middle = whole.find(weights) + 8 if name == "last.pt" else len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    file.write_bytes({"cut": whole[:middle], "flipped": flipped, "no pickle": b"no"}[how])
    kind = "dcp" if name == "named" else "torch"
    answer = cli("import", source, tmp_path / "r", "--format", kind)
    assert answer.code == 2 and "cannot be read, and nothing was imported" in answer.err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("how", ["directory", "method", "front", "disks"])
@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_a_damaged_archive_is_told_whichever_format_is_asked_for(
    how: str, kind: str, cli: Cli, tmp_path: Path, halfway: tuple[Path, list[torch.Tensor]]
) -> None:
    whole = bytearray((halfway[0] / "last.pt").read_bytes())
    rows = whole.rindex(b"PK\1\2")
    if how == "directory":
        whole[rows : rows + 4] = b"oops"
    elif how == "method":
        first = whole.index(b"PK\1\2")
        whole[first + 10 : first + 12] = b"\x62\0"
    elif how == "disks":
        whole[whole.rindex(b"PK\6\7") + 16] = 9
    source = tmp_path / "s.pt"
    source.write_bytes(whole[100:] if how == "front" else whole)
    answer = cli("import", source, tmp_path / "r", "--format", kind)
    assert answer.code == 2 and "cannot be read, and nothing was imported" in answer.err
    assert not (tmp_path / "r").exists()


def test_what_is_not_of_the_format_that_is_asked_for_is_told(
    cli: Cli, tmp_path: Path, halfway: tuple[Path, list[torch.Tensor]]
) -> None:
    (tmp_path / "empty").mkdir()
    for source in (halfway[0] / "last.pt", tmp_path / "empty"):
        answer = cli("import", source, tmp_path / "r", "--format", "dcp")
        assert answer.code == 2 and "it has no .metadata" in answer.err
    answer = cli("import", halfway[0] / "named", tmp_path / "r", "--format", "torch")
    assert answer.code == 2 and "is no file of torch.save: it is a directory" in answer.err


def test_a_step_that_is_there_and_one_that_nobody_would_go_on_from_are_refused(
    cli: Cli, ckpts: Path, tmp_path: Path, halfway: tuple[Path, list[torch.Tensor]]
) -> None:
    taken = cli("import", halfway[0] / "last.pt", ckpts, "--step", 30)
    assert taken.code == 2 and "step 30 already" in taken.err
    older = cli("import", halfway[0] / "last.pt", ckpts)
    assert older.code == 2 and "newest 30" in older.err and "root of its own" in older.err
    assert committed_steps(ckpts) == (10, 20, 30)
    with Checkpointer(tmp_path / "busy"):
        busy = cli("import", halfway[0] / "last.pt", tmp_path / "busy")
        assert busy.code == 2 and "open for writing" in busy.err
    forced = cli("import", halfway[0] / "last.pt", ckpts, "--step", 30, "--force")
    assert forced.code == 0
    assert "history" in ckpt_core.load(ckpts)


def test_the_name_of_a_step_that_may_come_is_no_root(
    cli: Cli, ckpts: Path, halfway: tuple[Path, list[torch.Tensor]]
) -> None:
    refused = cli("import", halfway[0] / "last.pt", ckpts / "step-000000000040")
    assert refused.code == 2 and f"give the root, {ckpts}," in refused.err
    assert committed_steps(ckpts) == (10, 20, 30)


def _at_the_shard(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have this done when the save makes its file: all was read, and is still to be copied."""

    def hook(name: str, args: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        if args[0].name.startswith("shard-"):
            act()
        return do()

    monkeypatch.setattr("ckpt_core.checkpointer.Files", lambda: hooked(Files, hook, ("create",)))


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_source_that_changes_meanwhile_is_not_committed(
    kind: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(step: int) -> Path:
        state = {"step": step, "a": torch.full((1 << 20,), step), "b": torch.ones(1 << 20) * step}
        if kind == "dcp":
            return save_dcp(state, tmp_path / "s")
        torch.save(state, tmp_path / "s")
        return tmp_path / "s"

    source, root = saved(1), tmp_path / "r"
    with Checkpointer(root) as ck:
        ck.save(1, {"w": torch.zeros(10)}).committed.result()
    with monkeypatch.context() as patched:
        _at_the_shard(patched, lambda: saved(2))
        answer = cli("import", source, root, "--force")
    assert answer.code == 2 and "changed while it was read, and nothing was imported" in answer.err
    assert list(ckpt_core.load(root)) == ["w"], "the step that was to be replaced stays"
    assert cli("import", source, root).code == 0
    tree = ckpt_core.load(root)
    assert tree["step"] == 2 and bool((tree["a"] == tree["b"]).all())


def test_a_source_that_is_still_being_written_is_not_committed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, root = save_dcp({"step": 1, "w": torch.ones(9)}, tmp_path / "s"), tmp_path / "r"
    with monkeypatch.context() as patched:
        _at_the_shard(patched, (source / "later.distcp").touch)
        answer = cli("import", source, root)
    assert answer.code == 2 and "later.distcp changed while it was read" in answer.err
    assert committed_steps(root) == ()
    assert cli("import", source, root).code == 0


def test_a_link_that_leads_to_another_save_meanwhile_is_not_committed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [save_dcp({"step": n, "w": torch.ones(9)}, tmp_path / str(n)) for n in (1, 2)]
    link = tmp_path / "newest"
    link.symlink_to(folders[0])

    def move() -> None:
        (tmp_path / "new").symlink_to(folders[1])
        (tmp_path / "new").rename(link)

    _at_the_shard(monkeypatch, move)
    answer = cli("import", link, tmp_path / "r")
    assert answer.code == 2 and "changed while it was read" in answer.err


@pytest.mark.parametrize("where", ["r", ".", "..", "absolute"])
def test_a_root_may_lie_within_the_source_and_the_source_within_it(
    where: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(save_dcp({"step": 1, "w": torch.ones(9)}, tmp_path / "t" / "s"))
    root = Path.cwd() / "r" if where == "absolute" else Path(where)
    with monkeypatch.context() as patched:
        _at_the_shard(patched, Path("later.distcp").touch)
        assert cli("import", ".", root).code == 2
    assert cli("import", ".", root).code == 0
    assert committed_steps(root) == (1,)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_what_is_interrupted_is_not_committed(
    number: signal.Signals, code: int, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, root, over = tmp_path / "s.pt", tmp_path / "r", threading.Event()
    torch.save({"step": 1, "w": torch.ones(1 << 20)}, source)
    sent: list[int] = []

    def interrupt() -> None:
        if not sent:
            sent.append(1)
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            over.wait(
                20
            )  # for as long as the command waits, which is no longer than it takes to give up

    with monkeypatch.context() as patched:
        _at_the_shard(patched, interrupt)
        answer = cli("import", source, root)
        over.set()
    assert answer.code == code and "interrupted: nothing was imported" in answer.err
    assert committed_steps(root) == ()
    assert cli("import", source, root).code == 0
    assert committed_steps(root) == (1,)


def test_what_is_interrupted_while_it_is_verified_is_said_to_be_there(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"step": 1, "w": torch.ones(9)}, tmp_path / "s.pt")

    def interrupted(*args: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckpt_core.cli.importing.importing.verify", interrupted)
    answer = cli("import", tmp_path / "s.pt", tmp_path / "r")
    assert answer.code == 130 and committed_steps(tmp_path / "r") == (1,)
    assert "interrupted: step 1 is committed, and not verified: ckpt-core verify" in answer.err


def test_what_nobody_recognises_and_a_library_that_is_missing_are_named(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    answer = cli("import", tmp_path / "notes.txt", tmp_path / "r")
    assert answer.code == 2 and "torch: a file of torch.save" in answer.err
    assert "no such file" in cli("import", tmp_path / "nothing", tmp_path / "r").err
    assert "dcp or torch" in cli("import", tmp_path, tmp_path / "r", "--format", "x").err

    def read(asked: Any) -> Any:
        import no_such_library  # noqa: F401

    made = Source("x", "a thing", 1, lambda path: True, read, "pip install 'ckpt-core[x]'")
    monkeypatch.setattr(choosing, "sources", lambda: [made])
    answer = cli("import", tmp_path / "notes.txt", tmp_path / "r")
    assert answer.code == 2 and "no_such_library is not installed: pip install" in answer.err


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """A process with torch imported, whose children are killed, or are ranks."""
    with Warm() as process:
        yield process


def test_killed_at_any_operation_the_root_has_the_step_whole_or_not_at_all(
    tmp_path: Path, warm: Warm
) -> None:
    torch.save({"step": 7, "w": torch.arange(50_000.0)}, tmp_path / "s.pt")
    with Checkpointer(tmp_path / "prepared") as ck:
        ck.save(3, {"w": torch.zeros(10)}).committed.result()
    call = "tests.cli.importing_kills:kill_imports"
    where = {"source": tmp_path / "s.pt", "prepared": tmp_path / "prepared", "place": tmp_path}
    assert warm.call(call, **{name: str(path) for name, path in where.items()}) >= 3


def test_one_process_reads_what_two_ranks_wrote_in_parts(
    cli: Cli, tmp_path: Path, warm: Warm
) -> None:
    warm.call("tests.cli.importing_kills:save_in_two_parts", folder=str(tmp_path))
    assert len(list((tmp_path / "two").glob("*.distcp"))) == 2
    assert cli("import", tmp_path / "two", tmp_path / "r").code == 0
    tree = ckpt_core.load(tmp_path / "r")
    assert torch.equal(tree["w"], torch.arange(35.0).reshape(7, 5)) and tree["step"] == 9


@pytest.mark.parametrize("wrong", ["gap", "none", "outside"])
def test_a_dcp_directory_whose_chunks_do_not_make_up_a_tensor_is_refused(
    cli: Cli, tmp_path: Path, wrong: str
) -> None:
    folder = tmp_path / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"step": 3, "w": torch.ones(4, 3)}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["w"]
    if wrong == "gap":
        entry.size = torch.Size([6, 3])
    elif wrong == "none":
        entry.chunks = []
    else:
        entry.chunks[0].offsets = torch.Size([2, 0])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    answer = cli("import", folder, tmp_path / "r")
    assert answer.code == 2 and "of w" in answer.err
    assert not (tmp_path / "r").exists()
