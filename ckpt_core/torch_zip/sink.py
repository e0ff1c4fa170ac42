"""The file-like object that torch's zip writer fills."""

from __future__ import annotations

import os
import struct
from io import BytesIO

from ckpt_core.torch_zip.layout import ZipExtent, ZipLayout, record_name

_LOCAL_MAGIC = b"PK\x03\x04"
_LOCAL_SIZE = 30
_LOCAL_LENGTHS = "<26xHH"


class Sink:
    """Keeps what is written and notes what is stepped over; of use for one file.

    torch's writer only ever appends: headers and small records are writes, a record under `skip_data`
    is a relative seek.

    Attributes:
        write: appends bytes. They are copied: the memory is the writer's. Nothing of Python's, since it is
            called five times for each record.
    """

    def __init__(self) -> None:
        self._frames: list[tuple[int, bytes]] = []
        self._extents: list[ZipExtent] = []
        self._start = 0
        self._frame = BytesIO()
        self.write = self._frame.write

    def seek(self, nbytes: int, whence: int) -> int:
        """Step over the bytes of the record whose header was written last."""
        assert whence == os.SEEK_CUR and nbytes > 0, "torch's writer stepped back"
        name = _last_record(self._frame.getvalue())
        offset = self._end_frame()
        self._extents.append(ZipExtent(name, offset, nbytes))
        self._start = offset + nbytes
        return self._start

    def flush(self) -> None:
        """Nothing is held back."""

    def layout(self) -> ZipLayout:
        """The file, once it has been written to its end."""
        file_bytes = self._end_frame()
        return ZipLayout(file_bytes, tuple(self._frames), tuple(self._extents))

    def _end_frame(self) -> int:
        data = self._frame.getvalue()
        end = self._start + len(data)
        if data:
            self._frames.append((self._start, data))
        self._start = end
        self._frame.seek(0)
        self._frame.truncate()
        return end


def _last_record(frame: bytes) -> str:
    """Name of the record whose local header ends the frame."""
    start = frame.rfind(_LOCAL_MAGIC)
    assert start >= 0, "torch's writer stepped over bytes that belong to no record"
    name_bytes, extra_bytes = struct.unpack_from(_LOCAL_LENGTHS, frame, start)
    name_end = start + _LOCAL_SIZE + name_bytes
    assert name_end + extra_bytes == len(frame), "torch's writer stepped over half a record"
    return record_name(frame[start + _LOCAL_SIZE : name_end])
