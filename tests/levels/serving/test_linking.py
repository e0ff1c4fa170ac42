"""A file of a step that is here gets one more key: only if all is what was saved, and at once."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import pytest

from ckpt_core.levels import PeerServer
from ckpt_core.store import step_path
from tests.levels.making import make_store, save
from tests.levels.serving.asking import Heard, ask, files_below, put, served
from tests.restore.harness import flip

FILE = "shard-00000-0.safetensors"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory that has a step as a peer keeps it."""
    store = make_store(tmp_path / "root")
    save(store, 1)
    store.close()
    folder = tmp_path / "kept" / "run" / "step-000000000001"
    attempt = folder / "0123abcd"
    attempt.mkdir(parents=True)
    for path in step_path(tmp_path / "root", 1).iterdir():
        (folder if path.name == "manifest.json" else attempt).joinpath(path.name).write_bytes(
            path.read_bytes()
        )
    return tmp_path / "kept"


STEP, NEXT = "run/step-000000000001/0123abcd", "run/step-000000000002/89abcdef"


def link(server: PeerServer, source: str, key: str, **more: str) -> Heard:
    told = {"x-amz-copy-source": f"/steps/{quote(source)}", **more}
    return ask(server, "PUT", f"/steps/{key}", more=told)


def test_a_file_of_a_step_is_linked_and_outlives_the_step(kept: Path) -> None:
    with served(kept) as server:
        answer = link(server, f"{STEP}/{FILE}", f"{NEXT}/other.bin")
        assert answer.status == 200 and b"<CopyObjectResult><ETag>" in answer.body
        made, known = kept / NEXT / "other.bin", kept / STEP / FILE
        assert os.path.samefile(made, known)
        data = known.read_bytes()
        for _ in range(2):  # asked once more, since the answer was lost
            assert link(server, f"{STEP}/{FILE}", f"{NEXT}/other.bin").status == 200
        assert made.stat().st_nlink == 2 and not list((kept / ".incoming").iterdir())
        assert ask(server, "DELETE", f"/steps/{STEP}/{FILE}").status == 204
        assert made.read_bytes() == data
        assert link(server, f"{STEP}/{FILE}", f"{NEXT}/x").status == 404


def test_a_link_is_made_only_where_the_condition_of_the_request_holds(kept: Path) -> None:
    with served(kept) as server:
        assert put(server, f"{NEXT}/x", b"older").status == 200
        refused = link(server, f"{STEP}/{FILE}", f"{NEXT}/x", **{"if-none-match": "*"})
        assert refused.status == 412 and (kept / NEXT / "x").read_bytes() == b"older"
        assert link(server, f"{STEP}/{FILE}", f"{NEXT}/x").status == 200
        assert os.path.samefile(kept / NEXT / "x", kept / STEP / FILE)


def test_what_is_not_what_was_saved_is_not_linked(kept: Path) -> None:
    folder = kept / "run" / "step-000000000001"
    whole = files_below(kept)
    for path, harm in (
        (kept / STEP / FILE, lambda path: flip(path, path.stat().st_size // 2)),
        (kept / STEP / FILE, lambda path: os.truncate(path, 100)),
        (kept / STEP / FILE, lambda path: path.write_bytes(path.read_bytes() + b"more")),
        (kept / STEP / "rank-00000.json", lambda path: flip(path, 30)),
        (kept / STEP / "rank-00000.json", Path.unlink),
        (folder / "manifest.json", lambda path: path.write_bytes(b'{"retired": ["0123abcd"]}')),
        (folder / "manifest.json", Path.unlink),
    ):
        harm(path)
        before = files_below(kept)
        with served(kept) as server:
            assert link(server, f"{STEP}/{FILE}", f"{NEXT}/x").status == 412
        assert files_below(kept) == before
        path.write_bytes(whole[str(path.relative_to(kept))])
    with served(kept) as server:
        assert link(server, f"{STEP}/{FILE}", f"{NEXT}/x").status == 200


def test_nothing_but_files_of_steps_is_linked_and_nothing_of_elsewhere(
    kept: Path, tmp_path: Path
) -> None:
    with served(kept) as server:
        assert put(server, "run/word", b"bytes").status == 200
        server.show("run/shown", tmp_path / "root")
        before = files_below(kept)
        for source, status in (
            ("run/word", 412),
            (f"{STEP}/rank-00000.json", 412),
            (f"{STEP}/../{FILE}", 400),
            ("../root/step-000000000001/" + FILE, 400),
            (f"run/shown/step-000000000001/{FILE}", 412),
        ):
            assert link(server, source, f"{NEXT}/x").status == status, source
        assert link(server, f"{STEP}/{FILE}", "run/shown/x").status == 403
        assert link(server, f"{STEP}/{FILE}", "run//x").status == 400
        headers = {"x-amz-copy-source": f"/other/{STEP}/{FILE}"}
        assert ask(server, "PUT", f"/steps/{NEXT}/x", more=headers).status == 404
        assert files_below(kept) == before
