"""A file that people read is the old one or the new one, and whole."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_core.system.replacing import replaced

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs files of several users")
NOBODY = 65534


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Path]:
    """A page that is there; no file may become longer than 4 KiB."""
    path = tmp_path / "page.html"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_has_the_old_bytes_until_it_has_all_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    path.chmod(0o640)
    with replaced(path) as fresh:
        assert fresh.suffix == ".html"
        fresh.write_text("new")
        assert path.read_text() == "old"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_write_that_fails_leaves_the_old_one_and_names_it(page: Path) -> None:
    with pytest.raises(OSError, match=str(page)) as raised, replaced(page) as fresh:
        fresh.write_bytes(bytes(9000))
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(page))
    assert page.read_text() == "old"
    assert os.listdir(page.parent) == [page.name]


def test_a_place_that_cannot_be_written_is_named_and_not_what_would_lie_beside_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "none" / "page.html"
    with pytest.raises(FileNotFoundError) as raised, replaced(path) as fresh:
        fresh.write_text("new")
    assert raised.value.filename == str(path)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link.html").symlink_to("page.html")
    with replaced(tmp_path / "link.html") as fresh:
        fresh.write_text("new")
    assert (tmp_path / "page.html").read_text() == "new"
    assert (tmp_path / "link.html").is_symlink()


def test_what_is_no_file_is_written_to_as_it_is(tmp_path: Path) -> None:
    with replaced(Path("/dev/null")) as fresh:
        assert fresh == Path("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    with replaced(tmp_path / "pipe") as fresh:
        assert fresh == tmp_path / "pipe"


def test_so_is_what_standard_output_goes_to(tmp_path: Path) -> None:
    kept = os.dup(1)
    with (tmp_path / "out").open("w") as out:
        os.dup2(out.fileno(), 1)
        try:
            with replaced(Path("/dev/stdout")) as fresh:
                assert fresh == Path("/dev/stdout")
        finally:
            os.dup2(kept, 1)
            os.close(kept)


@contextmanager
def nobody_in(folder: Path) -> Iterator[None]:
    """Who is no owner of anything, and starts in a folder, since this run's others are closed to him."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.fchdir(before)
        os.close(before)


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o1777], ids=["closed", "sticky"])
def test_a_file_that_may_be_written_is_where_its_directory_lets_no_other_have_the_name(
    mode: int, tmp_path: Path
) -> None:
    folder, page = tmp_path / "pages", Path("page.html")
    folder.mkdir()
    (folder / page).write_text("an old and longer one")
    (folder / page).chmod(0o666)
    folder.chmod(mode)
    os.chown(folder, 1, 1)
    with nobody_in(folder):
        with replaced(page) as fresh:
            fresh.write_text("new")
        assert page.read_text() == "new" and os.listdir() == [str(page)]


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o1777], ids=["closed", "sticky"])
def test_one_that_may_not_be_written_stays_and_is_named(mode: int, tmp_path: Path) -> None:
    folder, page = tmp_path / "pages", Path("page.html")
    folder.mkdir()
    (folder / page).write_text("old")
    (folder / page).chmod(0o644)
    folder.chmod(mode)
    os.chown(folder, 1, 1)
    with nobody_in(folder):
        with pytest.raises(PermissionError) as raised, replaced(page) as fresh:
            fresh.write_text("new")
        assert raised.value.filename == str(page)
        assert page.read_text() == "old" and os.listdir() == [str(page)]


@needs_root
def test_the_page_of_another_user_stays_his(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    page.chmod(0o600)
    os.chown(page, 1, 2)
    with replaced(page) as fresh:
        fresh.write_text("new")
    found = page.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1, 2, 0o600)
