"""A file that people read is the old one or the new one, and whole."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.system.replacing import replaced


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
