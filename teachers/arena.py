"""Pinned memory: one mapping of huge pages, registered with CUDA once, handed out in frames.

A teacher takes as many frames as it needs, wherever they are: the arena can't fragment, and what it hands out never
exceeds what was mapped. (torch's ``pin_memory`` rounds each tensor up to a power of two.)
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_MAP_HUGETLB = 0x40000  # linux/mman.h; Python 3.11's mmap does not name it
HUGE_PAGE = 2 << 20
LARGEST_FRAME = 8 << 20
_LEAST_FRAMES = 64


def frame_size(budget: int) -> int:
    """A power of two, so that a small budget still has many frames: at most 8 MiB, at least a page."""
    frame = LARGEST_FRAME
    while frame > mmap.PAGESIZE and budget // frame < _LEAST_FRAMES:
        frame //= 2
    return frame


class Arena:
    """``budget`` bytes, rounded down to whole frames."""

    def __init__(self, budget: int, register: bool) -> None:
        self.frame_bytes = frame_size(budget)
        self.frames = budget // self.frame_bytes
        if not self.frames:
            raise ValueError(f"a pinned budget of {budget} bytes holds no page of {self.frame_bytes}")
        self.nbytes = self.frames * self.frame_bytes
        self._map, self.huge_pages = _map_pages(self.nbytes)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE if len(self._map) > self.nbytes else 0
        self.memory: Tensor = whole[start : start + self.nbytes]
        self.memory.zero_()  # pages are faulted in here, and not under the first reads
        self.view = memoryview(self.memory.numpy())
        self.registered = register
        if register:
            _check(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.nbytes, 0), self.nbytes)
        self._free = list(range(self.frames))

    @property
    def free_frames(self) -> int:
        return len(self._free)

    def frames_for(self, nbytes: int) -> int:
        return -(-nbytes // self.frame_bytes)

    def allocate(self, nbytes: int) -> list[int]:
        """Frames that hold so many bytes, neighbours where possible: they are copied in one go.

        Raises:
            MemoryError: the books are wrong; they should have known.
        """
        count = self.frames_for(nbytes)
        if count > len(self._free):
            raise MemoryError(f"{count} frames asked for, {len(self._free)} are free")
        self._free.sort()
        start = next(
            (i for i in range(len(self._free) - count + 1) if self._free[i + count - 1] - self._free[i] == count - 1), 0
        )
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def give_back(self, frames: Sequence[int]) -> None:
        self._free.extend(frames)

    def spans(self, frames: Sequence[int], begin: int, end: int) -> list[tuple[int, int]]:
        """Where bytes ``begin:end`` of an image in these frames lie in the arena; neighbours are one span."""
        spans: list[tuple[int, int]] = []
        while begin < end:
            index, inside = divmod(begin, self.frame_bytes)
            take = min(end - begin, self.frame_bytes - inside)
            at = frames[index] * self.frame_bytes + inside
            if spans and spans[-1][1] == at:
                spans[-1] = (spans[-1][0], at + take)
            else:
                spans.append((at, at + take))
            begin += take
        return spans

    def close(self) -> None:
        """Unregister; the mapping goes with its last view."""
        if self.registered:
            self.registered = False
            _check(torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr()), self.nbytes)


def _check(error: Any, nbytes: int) -> None:
    if int(error):
        raise RuntimeError(f"CUDA can't pin (or release) {nbytes} bytes of host memory for teachers: {error}")


def _map_pages(nbytes: int) -> tuple[mmap.mmap, str]:
    """Reserved huge pages where the machine has them, else transparent ones."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if nbytes % HUGE_PAGE == 0:
        try:
            return mmap.mmap(-1, nbytes, flags=flags | _MAP_HUGETLB), "reserved"
        except OSError:
            log.debug("no %d bytes of reserved huge pages; transparent ones are asked for", nbytes)
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE if nbytes >= HUGE_PAGE else nbytes, flags=flags)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        log.warning("pinned memory without huge pages (%s): reads from disk are slower", error.strerror)
        return mapping, "none"
    return mapping, "transparent"
