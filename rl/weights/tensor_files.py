"""The tensors of an HF directory as bytes of its safetensors files, read and written in parts, from many threads.

By ``pread`` and ``pwrite`` with memory that is used again, not by mapping the files: a mapped page costs a fault each
time, and a disk that is full is an error, not a signal.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

LENGTH = struct.Struct("<Q")
ITEMSIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
"""Of the dtypes that are compared value by value; others (F8, bool) byte by byte."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a directory of safetensors files."""

    file: Path
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def itemsize(self) -> int:
        return ITEMSIZE.get(self.dtype, 1)


def places(directory: Path) -> dict[str, Place]:
    """Every tensor of an HF directory, by name.

    Raises:
        FileNotFoundError: it has no safetensors file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no safetensors file")
    found: dict[str, Place] = {}
    for file in files:
        raw = read_header(file)
        for name, entry in json.loads(raw[LENGTH.size :]).items():
            if name != "__metadata__":
                begin, end = (len(raw) + offset for offset in entry["data_offsets"])
                found[name] = Place(file, entry["dtype"], tuple(entry["shape"]), begin, end)
    return found


def read_header(file: Path) -> bytes:
    """A safetensors file's header with its length before it; the data follows."""
    with file.open("rb") as stream:
        raw = stream.read(LENGTH.size)
        return raw + stream.read(LENGTH.unpack(raw)[0])


def write_empty(file: Path, header: bytes, nbytes: int) -> None:
    """A safetensors file of zeros that take no room yet.

    Args:
        header: as ``read_header`` gives it.
        nbytes: of the data.
    """
    with file.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + nbytes)


class TensorFiles:
    """Open files; a context manager."""

    def __init__(self, found: Mapping[str, Place], writable: bool = False) -> None:
        self._found = found
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> TensorFiles:
        try:
            for file in {place.file for place in self._found.values()}:
                self._descriptors[file] = os.open(file, self._flags | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Only once no thread reads or writes any more: the number of a closed file may soon be another's."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, name: str, begin: int, memory: Bytes) -> Bytes:
        """Fill the memory with a tensor's bytes from ``begin`` on, and return it."""
        place = self._found[name]
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptors[place.file], [memory[done:].data], place.begin + begin + done)
            if count == 0:
                raise EOFError(f"{place.file} ends within {name}")
            done += count
        return memory

    def write(self, name: str, begin: int, data: Bytes) -> None:
        place = self._found[name]
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptors[place.file], data[done:].data, place.begin + begin + done)


class Memory(threading.local):
    """Of each thread, for two parts."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.empty((2, nbytes), np.uint8)

    def take(self, which: Literal[0, 1], nbytes: int) -> Bytes:
        return self._memory[which, :nbytes]
