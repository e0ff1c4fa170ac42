"""Objects are files: whole, durable before they are acknowledged, and nowhere but in the directory."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import RootBusy
from ckpt_core.levels.serving.tree import Condition, Row, Tree
from ckpt_core.levels.serving.wire import Refusal
from ckpt_core.system.files import Files
from tests.faults.mounts import fill, mounted
from tests.levels.serving.asking import ask, files_below, put, served
from tests.store.harness import Fault, QuickFiles, interrupted


def test_an_object_is_a_file_at_its_key(tmp_path: Path) -> None:
    with served(tmp_path / "kept") as server:
        key = "run/a%20b%23%25/%C3%BC.json"
        first = put(server, key, b"one")
        assert first.status == 200
        assert files_below(tmp_path / "kept") == {"run/a b#%/ü.json": b"one"}
        found = ask(server, "GET", f"/steps/{key}")
        assert (found.status, found.body) == (200, b"one")
        assert found.headers["etag"] == first.headers["etag"]
        head = ask(server, "HEAD", f"/steps/{key}")
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "3")
        assert "last-modified" in head.headers


@pytest.mark.parametrize(
    "key",
    [
        *("../out", "run/../../out", "run//x", "run/./x", "run/", "run/x%00y", "%2Fetc%2Fpasswd"),
        *(
            ".incoming/x",
            ".lock",
            "run/%2e%2e/%2e%2e/out",
            "x" * 300,
            "run/" + "x" * 256,
            "y/" * 600,
        ),
    ],
)
def test_a_key_that_would_lead_elsewhere_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "out").write_bytes(b"secret")
    with served(tmp_path / "kept") as server:
        for method in ("PUT", "GET", "DELETE"):
            answer = ask(server, method, f"/steps/{key}", b"x" if method == "PUT" else b"")
            assert answer.status == 400, (method, answer)
        assert ask(server, "POST", f"/steps/{key}?uploads=").status == 400
    assert files_below(tmp_path) == {"out": b"secret"}


def test_a_link_of_this_machine_leads_nobody_out(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_bytes(b"secret")
    with served(tmp_path / "kept") as server:
        (tmp_path / "kept" / "run").symlink_to(tmp_path / "other")
        (tmp_path / "kept" / "x").symlink_to(tmp_path / "other" / "x")
        for key in ("run/x", "x"):
            assert ask(server, "GET", f"/steps/{key}").status == 400
            assert ask(server, "DELETE", f"/steps/{key}").status in (204, 400)
        assert put(server, "run/x", b"y").status == 400
        listed = ask(server, "GET", "/steps?list-type=2").body
        assert b"<Key>" not in listed
    assert (tmp_path / "other" / "x").read_bytes() == b"secret"


def test_a_key_below_an_object_or_of_a_folder_is_refused(tmp_path: Path) -> None:
    with served(tmp_path / "kept") as server:
        assert put(server, "run/x/y", b"1").status == 200
        assert put(server, "run/x", b"2").status == 400
        assert put(server, "run/x/y/z", b"3").status == 400
        assert ask(server, "GET", "/steps/run/x").status == 404
        assert ask(server, "GET", "/steps/run/x/y/z").status == 404
    assert files_below(tmp_path / "kept") == {"run/x/y": b"1"}


def test_of_many_that_create_an_object_one_does(tmp_path: Path) -> None:
    with served(tmp_path / "kept") as server, ThreadPoolExecutor(16) as threads:
        for number in range(5):
            key = f"run/{number}"
            bodies = [f"writer {index}".encode() for index in range(16)]
            answers = list(
                threads.map(lambda b, k=key: put(server, k, b, if_none_match="*"), bodies)
            )
            won = [
                body for body, answer in zip(bodies, answers, strict=True) if answer.status == 200
            ]
            assert len(won) == 1 and {answer.status for answer in answers} == {200, 412}
            assert ask(server, "GET", f"/steps/{key}").body == won[0]


@pytest.mark.parametrize("nbytes", [10, 2 << 20])
def test_of_many_that_replace_what_they_have_seen_one_does(tmp_path: Path, nbytes: int) -> None:
    with served(tmp_path / "kept") as server, ThreadPoolExecutor(8) as threads:
        tag = put(server, "run/word", b"0" * nbytes).headers["etag"]
        for number in range(1, 6):
            bodies = [bytes([number, index]) * (nbytes // 2) for index in range(8)]
            answers = list(
                threads.map(lambda b, t=tag: put(server, "run/word", b, if_match=t), bodies)
            )
            tags = [answer.headers["etag"] for answer in answers if answer.status == 200]
            assert len(tags) == 1 and {answer.status for answer in answers} == {200, 412}
            (tag,) = tags
        assert put(server, "run/no", b"x", if_match=tag).status == 412
        unchanged = ask(server, "GET", "/steps/run/word", more={"if-none-match": tag})
        assert (unchanged.status, unchanged.body) == (304, b"")


def test_a_tag_holds_over_a_restart_of_the_server(tmp_path: Path) -> None:
    for body in (b"small", bytes(3 << 20)):
        with served(tmp_path / "kept") as server:
            tag = put(server, "run/x", body).headers["etag"]
        with served(tmp_path / "kept") as server:
            assert ask(server, "HEAD", "/steps/run/x").headers["etag"] == tag
            assert put(server, "run/x", b"next", if_match=tag).status == 200


def test_ranges_are_what_was_asked_for(tmp_path: Path) -> None:
    data = os.urandom(100_000)
    with served(tmp_path / "kept") as server:
        put(server, "run/x", data)
        for begin, end in ((0, 0), (5, 99), (99_000, 200_000)):
            found = ask(server, "GET", "/steps/run/x", more={"range": f"bytes={begin}-{end}"})
            assert found.status == 206 and found.body == data[begin : end + 1]
            last = min(end, 99_999)
            assert found.headers["content-range"] == f"bytes {begin}-{last}/100000"
        assert ask(server, "GET", "/steps/run/x", more={"range": "bytes=100000-"}).status == 416
        assert ask(server, "GET", "/steps/run/x", more={"range": "bytes=-5"}).status == 501


def test_lists_are_in_order_in_pages_and_without_empty_folders(tmp_path: Path) -> None:
    keys = ["a", "a-b", "a/b", "a/c/d", "a/c/e", "b/x", "b0", "ü/ö"]
    with served(tmp_path / "kept") as server:
        for key in ["a" if key == "a" else key for key in keys if key != "a"]:
            server._tree.publish(_file(server._tree, key), key, Condition())
        (tmp_path / "kept" / "empty" / "folder").mkdir(parents=True)
        tree = server._tree
        flat = [row.key for row in tree.look("", flat=True) if isinstance(row, Row)]
        assert flat == sorted(keys[1:], key=str.encode)
        assert [row if isinstance(row, str) else row.key for row in tree.look("", flat=False)] == [
            *("a-b", "a/", "b/", "b0", "ü/"),
        ]
        assert [
            row if isinstance(row, str) else row.key for row in tree.look("a/", flat=False)
        ] == [
            "a/b",
            "a/c/",
        ]
        paged, after = [], ""
        while True:
            page = ask(server, "GET", f"/steps?list-type=2&max-keys=2&continuation-token={after}")
            text = page.body.decode()
            paged += [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]
            if "<IsTruncated>false" in text:
                break
            after = text.partition("<NextContinuationToken>")[2].partition("<")[0]
            after = after.replace("%", "%25")
        assert paged == flat


def _file(tree: Tree, text: str) -> Path:
    path, fd = tree.begin()
    tree.write(fd, memoryview(text.encode()), 0)
    os.close(fd)
    return path


def test_a_folder_goes_with_its_last_object(tmp_path: Path) -> None:
    with served(tmp_path / "kept") as server:
        put(server, "run/step/a/x", b"1")
        put(server, "run/step/y", b"2")
        assert ask(server, "DELETE", "/steps/run/step/a/x").status == 204
        assert not (tmp_path / "kept" / "run" / "step" / "a").exists()
        assert ask(server, "DELETE", "/steps/run/step/a/x").status == 204
        text = (
            b"<Delete><Object><Key>run/step/y</Key></Object><Object><Key>no</Key></Object></Delete>"
        )
        assert ask(server, "POST", "/steps?delete=", text).status == 200
        assert not (tmp_path / "kept" / "run").exists() and (tmp_path / "kept").is_dir()


def test_writers_and_deleters_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    with served(tmp_path / "kept", files=QuickFiles()) as server, ThreadPoolExecutor(8) as threads:

        def turn(index: int) -> set[int]:
            key = f"run/folder/{index}"
            return {
                status
                for _ in range(20)
                for status in (
                    put(server, key, b"x").status,
                    ask(server, "DELETE", f"/steps/{key}").status,
                )
            }

        assert set().union(*threads.map(turn, range(8))) == {200, 204}
        assert files_below(tmp_path / "kept") == {}


# -- durable ---------------------------------------------------------------------------------------


class Watch:
    """What was done to files, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        paths = [str(arg) for arg in args if isinstance(arg, Path)]
        self.done.append((name, paths[-1] if paths else ""))


def test_what_is_acknowledged_is_durable_and_has_its_name_only_then(tmp_path: Path) -> None:
    watch = Watch()
    with served(tmp_path / "kept", files=interrupted(QuickFiles, watch)) as server:
        kept = os.path.realpath(tmp_path / "kept")
        for key in ("run/new/x", "run/new/y"):
            watch.done.clear()
            assert put(server, key, b"bytes").status == 200
            names = [name for name, _ in watch.done if name in ("pwrite", "sync", "rename")]
            assert names == ["pwrite", "sync", "rename"]
            after = watch.done[[name for name, _ in watch.done].index("rename") + 1 :]
            folders = [f"{kept}/run/new", f"{kept}/run", kept]
            assert after == [("sync_dir", folder) for folder in folders]
        watch.done.clear()
        ask(server, "DELETE", "/steps/run/new/x")
        assert watch.done[-1] == ("sync_dir", f"{kept}/run/new")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("operation", ["create", "pwrite", "sync", "rename", "mkdir"])
def test_a_full_disk_is_507_and_leaves_nothing(tmp_path: Path, operation: str, code: int) -> None:
    fault = Fault(operation, code)
    fault.armed = False
    with served(tmp_path / "kept", files=interrupted(QuickFiles, fault)) as server:
        fault.armed = True
        answer = put(server, "run/x", b"bytes" * 1000)
        assert (answer.status, answer.code) == (507, "StorageFull")
        assert files_below(tmp_path / "kept") == {}
        fault.armed = False
        assert put(server, "run/x", b"bytes").status == 200


def test_a_few_bytes_take_an_objects_place_also_on_a_disk_that_is_full_to_the_last_byte(
    tmp_path: Path,
) -> None:
    with mounted("tmpfs", tmp_path) as disk, served(disk / "kept") as server:
        tags = [put(server, f"run/{name}", b"manifest").headers["etag"] for name in "ab"]
        fill(disk)
        for data, status in ((b"y" * 5000, 507), (b"mark", 200)):
            assert put(server, "run/a", data, if_match=tags[0]).status == status
        assert put(server, "run/c", b"new").status == 507, (
            "what it gave is in hand for the next one"
        )
        assert put(server, "run/b", b"mark", if_match='"other"').status == 412
        assert put(server, "run/b", b"mark", if_match=tags[1]).status == 200
        assert files_below(disk / "kept") == {"run/a": b"mark", "run/b": b"mark"}


def test_a_disk_is_told_as_full_also_where_no_room_in_hand_can_be_used(tmp_path: Path) -> None:
    class WithoutProc(QuickFiles):
        def name(self, fd: int, path: Path) -> None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"/proc/self/fd/{fd}")

    files = WithoutProc()
    with mounted("tmpfs", tmp_path) as disk, served(disk / "kept", files=files) as server:
        tag = put(server, "run/a", b"manifest").headers["etag"]
        fill(disk)
        assert put(server, "run/a", b"mark", if_match=tag).status == 507


def test_another_error_of_the_disk_is_500_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault("sync", errno.EIO)
    with served(tmp_path / "kept", files=interrupted(QuickFiles, fault)) as server:
        assert [put(server, "run/x", b"bytes").status for _ in range(3)] == [500] * 3
    assert files_below(tmp_path / "kept") == {}
    assert caplog.text.count("kernel log") == 1


def test_what_a_kill_has_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    with served(tmp_path / "kept") as server:
        put(server, "run/x", b"bytes")
    (tmp_path / "kept" / ".incoming").mkdir()
    (tmp_path / "kept" / ".incoming" / "cut-off").write_bytes(b"half")
    with served(tmp_path / "kept"):
        assert files_below(tmp_path / "kept") == {"run/x": b"bytes"}


def test_a_directory_has_one_server(tmp_path: Path) -> None:
    with served(tmp_path / "kept"), pytest.raises(RootBusy):
        Tree(tmp_path / "kept", files=Files())
    with served(tmp_path / "kept") as server:
        assert put(server, "x", b"1").status == 200


def test_a_create_that_lost_is_refused_also_in_threads_of_one_tree(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "kept", files=QuickFiles())
    barrier, refused = threading.Barrier(8), []

    def create(index: int) -> None:
        path = _file(tree, str(index))
        barrier.wait(60)
        try:
            tree.publish(path, "x", Condition(create=True))
        except Refusal as refusal:
            refused.append(refusal.status)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(create, range(8)))
    tree.close()
    assert refused == [412] * 7
