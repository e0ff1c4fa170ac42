"""What the operating system may answer to `Files` that is rare."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.system.files import Files


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    files = Files()
    files.write_new(tmp_path / "file", b"0123456789")
    found = files.open_read(tmp_path / "file")
    yield found
    files.close(found)


def test_a_write_that_writes_nothing_is_an_error_and_not_tried_for_ever(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="takes no bytes") as caught:
        Files().pwrite(fd, b"data", 0)
    assert caught.value.errno == errno.EIO
    Files().pwrite(fd, b"", 0)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EAGAIN, errno.EIO])
def test_whether_bytes_are_cached_is_never_an_error(
    fd: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", preadv)
    assert Files().preadv_cached(fd, [bytearray(4)], 0) == 0


def test_where_a_filter_refuses_a_scatter_read_its_first_buffer_is_read(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(*_: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "preadv", preadv)
    one, other = bytearray(4), bytearray(4)
    assert Files().preadv(fd, [bytearray(), one, other], 3) == 4
    assert (one, other) == (b"3456", bytes(4))
    assert Files().preadv(fd, [one], 10) == 0
    assert Files().fill(fd, memoryview(one), 8) == 2
