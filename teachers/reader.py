"""Reading extents from local disk at its speed: O_DIRECT, several threads, checksums in the thread that read.

``os.preadv`` and xxhash release the GIL, so the threads' reads, and one's checksum with another's read, overlap. Where
a file system refuses O_DIRECT (tmpfs, some overlays) files are read through the page cache, which is said once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from teachers.errors import CorruptTeacherError, MissingTeacherError, StalledReadError, TeacherError
from teachers.format import ALIGN, CHUNK_BYTES, Extent

log = logging.getLogger(__name__)

BLOCK_BYTES = 16 << 20
THREADS = 6
STALL_SECONDS = 60.0

Preadv = Callable[[int, Sequence[Any], int], int]


@dataclass(frozen=True)
class Block:
    """A span of one file that is read in one go: whole chunks, one after another, also in the image that they go to."""

    path: Path
    offset: int
    image_offset: int
    chunks: tuple[tuple[int, str], ...]
    """Length and checksum."""

    @property
    def nbytes(self) -> int:
        return sum(length for length, _ in self.chunks)


def blocks(extents: Iterable[tuple[Path, Extent, int]], block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Cut extents (with their pack, and where they go) into blocks; neighbours share one."""
    path, offset, image, chunks, size = Path(), 0, 0, [], 0  # type: Path, int, int, list[tuple[int, str]], int
    for pack, extent, at in extents:
        for index, sum_ in enumerate(extent.checksums):
            start = index * CHUNK_BYTES
            length = min(CHUNK_BYTES, extent.padded_bytes - start)
            follows = (path, offset + size, image + size) == (pack, extent.offset + start, at + start)
            if not chunks or not follows or size + length > block_bytes:
                if chunks:
                    yield Block(path, offset, image, tuple(chunks))
                path, offset, image, chunks, size = pack, extent.offset + start, at + start, [], 0
            chunks.append((length, sum_))
            size += length
    if chunks:
        yield Block(path, offset, image, tuple(chunks))


class DirectReader:
    """Reads blocks into memory that the caller gives.

    Args:
        stall_seconds: a read that finishes no block for so long is given up.
        preadv: the system call; tests put a slow one here.
    """

    def __init__(
        self, threads: int = THREADS, stall_seconds: float = STALL_SECONDS, preadv: Preadv = os.preadv
    ) -> None:
        self.threads, self.stall_seconds, self.preadv = threads, stall_seconds, preadv
        self.direct = True

    def read(
        self,
        teacher: str,
        wanted: Sequence[Block],
        target: Callable[[int, int], Sequence[memoryview]],
        idle: Callable[[], None] = lambda: None,
        arrived: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Fill and check.

        Args:
            target: the memory of a span of the image, in pieces.
            idle: called once, when no thread touches the memory any more: before this returns, except after a stall.
            arrived: told of each span of the image that is there and as it was written, by the thread that read it.

        Raises:
            MissingTeacherError, CorruptTeacherError, StalledReadError, TeacherError: each names teacher and file.
        """
        run = _Run(self, teacher, wanted, target, idle, arrived)
        run.start()
        run.wait()

    def open(self, path: Path) -> int:
        """
        Raises:
            OSError: it can't be opened.
        """
        if self.direct:
            try:
                return os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.no_direct(path)
        return os.open(path, os.O_RDONLY)

    def no_direct(self, path: Path) -> None:
        if self.direct:
            self.direct = False
            log.warning("%s: its file system has no O_DIRECT; teachers are read through the page cache", path.parent)


class _Run:
    """One call of ``DirectReader.read``: its threads share the blocks, and stop at the first error."""

    def __init__(
        self,
        reader: DirectReader,
        teacher: str,
        wanted: Sequence[Block],
        target: Callable[[int, int], Sequence[memoryview]],
        idle: Callable[[], None],
        arrived: Callable[[int, int], None],
    ) -> None:
        self.reader, self.teacher, self.target, self.idle, self.arrived = reader, teacher, target, idle, arrived
        self.todo = iter(wanted)
        self.running = max(1, min(reader.threads, len(wanted)))
        self.changed = threading.Condition()
        self.errors: list[BaseException] = []
        self.current: dict[int, Block] = {}
        self.progress = time.monotonic()
        self.given_up = False

    def start(self) -> None:
        for _ in range(self.running):
            threading.Thread(target=self._work, name=f"read {self.teacher}", daemon=True).start()

    def wait(self) -> None:
        with self.changed:
            while self.running:
                left = self.progress + self.reader.stall_seconds - time.monotonic()
                if left <= 0:
                    self.given_up = True
                    block = next(iter(self.current.values()), None)
                    where = f"{block.path} at byte {block.offset}" if block else "its files"
                    raise StalledReadError(
                        f"teacher {self.teacher}: {where}: no block was read for {self.reader.stall_seconds:g} s"
                    )
                self.changed.wait(left)
        self.idle()
        if self.errors:
            raise self.errors[0]

    def _work(self) -> None:
        files: dict[Path, int] = {}
        try:
            while (block := self._next()) is not None:
                self._read(block, files)
        except Exception as error:  # noqa: BLE001 (raised again by whoever waits)
            self.errors.append(error)
        finally:
            for descriptor in files.values():
                os.close(descriptor)
            with self.changed:
                self.running -= 1
                late = self.given_up and not self.running
                self.changed.notify_all()
            if late:
                self.idle()

    def _next(self) -> Block | None:
        with self.changed:
            self.progress = time.monotonic()
            self.current.pop(threading.get_ident(), None)
            if self.errors or self.given_up:
                return None
            block = next(self.todo, None)
            if block is not None:
                self.current[threading.get_ident()] = block
            return block

    def _read(self, block: Block, files: dict[Path, int]) -> None:
        try:
            if block.path not in files:
                files[block.path] = self.reader.open(block.path)
            pieces = self.target(block.image_offset, block.image_offset + block.nbytes)
            self._fill(files, block, pieces)
        except FileNotFoundError as error:
            raise MissingTeacherError(f"teacher {self.teacher}: {block.path} is missing") from error
        except OSError as error:
            raise TeacherError(
                f"teacher {self.teacher}: {block.path} at byte {block.offset}: {error.strerror}"
            ) from error
        self._check(block, pieces)
        self.arrived(block.image_offset, block.image_offset + block.nbytes)

    def _fill(self, files: dict[Path, int], block: Block, pieces: Sequence[memoryview]) -> None:
        got, rest = 0, list(pieces)
        while rest:
            try:
                count = self.reader.preadv(files[block.path], rest, block.offset + got)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.reader.direct:
                    raise
                self.reader.no_direct(block.path)
                os.close(files.pop(block.path))
                files[block.path] = self.reader.open(block.path)
                continue
            got += count
            if not count or count % ALIGN:
                raise CorruptTeacherError(f"teacher {self.teacher}: {block.path} ends at byte {block.offset + got}")
            while count:
                step = min(count, rest[0].nbytes)
                rest[0] = rest[0][step:]
                count -= step
                if not rest[0].nbytes:
                    del rest[0]

    def _check(self, block: Block, pieces: Sequence[memoryview]) -> None:
        at = block.offset
        rest = list(pieces)
        for length, expected in block.chunks:
            hasher, left = xxhash.xxh3_64(), length
            while left:
                step = min(left, rest[0].nbytes)
                hasher.update(rest[0][:step])
                rest[0] = rest[0][step:]
                left -= step
                if not rest[0].nbytes:
                    del rest[0]
            if hasher.hexdigest() != expected:
                raise CorruptTeacherError(
                    f"teacher {self.teacher}: {block.path} is damaged between bytes {at} and {at + length} (checksum)"
                )
            at += length


def windows(extents: Sequence[tuple[str, Extent]], window_bytes: int) -> Iterator[list[tuple[str, Extent]]]:
    """Runs of extents that fit into so much memory together; one that alone does not is a run of its own."""
    used, run = 0, []  # type: int, list[tuple[str, Extent]]
    for key, extent in extents:
        if run and used + extent.padded_bytes > window_bytes:
            yield run
            used, run = 0, []
        run.append((key, extent))
        used += extent.padded_bytes
    if run:
        yield run
