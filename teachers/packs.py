"""Writing a pack: extents one after another, aligned, checksummed by the chunk, on disk before it is referred to."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from teachers.format import CHUNK_BYTES, Extent, checksum, padded

_WRITE_BACK_BYTES = 256 << 20
"""So much is written before the kernel is told to put it on disk: memory for dirty pages stays bounded."""


class PackWriter:
    """One pack, written beside and renamed into place by ``commit``; ``discard`` leaves nothing."""

    def __init__(self, folder: Path, written: Callable[[int], None] | None = None) -> None:
        self.name = uuid.uuid4().hex
        self.partial = folder / f"{self.name}.partial"
        self.path = folder / f"{self.name}.pack"
        self._written = written
        self._offset = self._flushed = 0
        self._file = self.partial.open("xb", buffering=0)

    def append(self, data: memoryview) -> Extent:
        """
        Raises:
            OSError: the disk is full, for one.
        """
        sums = []
        for start in range(0, data.nbytes, CHUNK_BYTES):
            chunk: memoryview | bytes = data[start : start + CHUNK_BYTES]
            short = padded(len(chunk)) - len(chunk)
            if short:
                chunk = bytes(chunk) + bytes(short)
            sums.append(checksum(chunk))
            self._write(chunk)
        extent = Extent(pack=self.name, offset=self._offset, nbytes=data.nbytes, checksums=tuple(sums))
        self._offset += extent.padded_bytes
        return extent

    def _write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        if self._written is not None:
            self._written(len(data))
        if self._offset - self._flushed > _WRITE_BACK_BYTES:
            os.fdatasync(self._file.fileno())
            self._flushed = self._offset

    def commit(self) -> None:
        if not self._offset:
            self.discard()  # every tensor was there already
            return
        os.fsync(self._file.fileno())
        # What was imported is read again through O_DIRECT: its pages would only push out others.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._file.close()
        self.partial.rename(self.path)
        sync_folder(self.path.parent)

    def discard(self) -> None:
        self._file.close()
        self.partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """A rename is on disk once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
