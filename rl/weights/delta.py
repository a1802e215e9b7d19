"""What changed between two versions of the weights, as a stream of frames; and its application to a copy of the older.

    frame   8 bytes: length of its head; the head (JSON); the body, of the length that the head says
    body    of a tensor: nothing where it is the same; else zstd of a bitmap and the changed values, or of all values

A tensor's head has the xxh3 of its new bytes: the copy is checked tensor by tensor before any engine loads it, which
finds a base that differs, too. Values are compared as bits, so that the result is exact.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
import xxhash
import zstandard
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from teachers.codec import encode_delta

ZSTD_LEVEL = 1
"""What changed in a bf16 value is its last bits, which hardly compress: more effort buys nothing."""
THREADS = 8
AHEAD = 32
"""Tensors that are encoded before the first of them is taken."""
LENGTH = struct.Struct("<Q")


class DeltaError(ValueError):
    """A patch does not fit the copy that it was applied to; the message names the tensor. All values are needed."""


class _Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Layout(_Head):
    """One tensor."""

    name: str
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * ITEMSIZE.get(self.dtype, 1)


class PatchHead(_Head):
    """First frame."""

    version: int
    base: int | None
    """Version that the patch changes; None: all tensors come whole."""
    layout: tuple[Layout, ...]


class TensorHead(_Head):
    name: str
    encoding: Literal["same", "delta", "full"]
    counts: tuple[int, ...]
    """Changed values in each piece (``teachers.codec``)."""
    checksum: str
    nbytes: int
    """Of the body."""


Head = TypeVar("Head", PatchHead, TensorHead)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a directory of safetensors files."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


ITEMSIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
"""Of the dtypes that are compared value by value; others (F8, bool) have one byte."""


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
        with file.open("rb") as stream:
            (length,) = LENGTH.unpack(stream.read(LENGTH.size))
            header = json.loads(stream.read(length))
        data = LENGTH.size + length
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (data + offset for offset in entry["data_offsets"])
                found[name] = Place(file, entry["dtype"], tuple(entry["shape"]), begin, end)
    return found


class MappedFiles:
    """Safetensors files as flat bytes; a context manager. Written to only if ``writable``."""

    def __init__(self, found: dict[str, Place], writable: bool = False) -> None:
        self._found = found
        self._writable = writable
        self._maps: dict[Path, Tensor] = {}
        self._stack = ExitStack()

    def __enter__(self) -> MappedFiles:
        for file in {place.file for place in self._found.values()}:
            stream = self._stack.enter_context(file.open("r+b" if self._writable else "rb"))
            # A private map: torch wants memory that may be written, and reading changes nothing.
            access = mmap.ACCESS_WRITE if self._writable else mmap.ACCESS_COPY
            self._maps[file] = torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=access), dtype=torch.uint8)
        return self

    def __exit__(self, *_: object) -> None:
        self._maps.clear()  # the maps end with the tensors over them
        self._stack.close()

    def bytes_of(self, name: str) -> Tensor:
        place = self._found[name]
        return self._maps[place.file][place.begin : place.end]


def checksum(flat: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(flat.numpy())


def patch(new: Path, version: int, old: Path | None = None, base: int | None = None) -> Iterator[bytes]:
    """Frames that make ``new`` of a copy of ``old``; without ``old``, of nothing.

    Raises:
        DeltaError: the two do not hold the same tensors.
    """
    fresh = places(new)
    before = places(old) if old is not None else None
    if before is not None and {n: (p.dtype, p.shape) for n, p in fresh.items()} != {
        n: (p.dtype, p.shape) for n, p in before.items()
    }:
        raise DeltaError(f"{new} and {old} do not hold the same tensors")
    layout = tuple(Layout(name=name, dtype=place.dtype, shape=place.shape) for name, place in fresh.items())
    head = PatchHead(version=version, base=base if before is not None else None, layout=layout)
    yield _frame(head, b"")
    with ExitStack() as stack:
        values = stack.enter_context(MappedFiles(fresh))
        older = stack.enter_context(MappedFiles(before)) if before is not None else None

        def frame(tensor: Layout) -> bytes:
            old_bytes = older.bytes_of(tensor.name) if older is not None else None
            return _tensor_frame(tensor, values.bytes_of(tensor.name), old_bytes)

        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        for first in range(0, len(layout), AHEAD):  # bounded, or all frames would wait in memory for a slow receiver
            yield from pool.map(frame, layout[first : first + AHEAD])


def _tensor_frame(tensor: Layout, new: Tensor, old: Tensor | None) -> bytes:
    encoding, counts, body = _encode(new, old, tensor.dtype)
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(body.numpy()) if len(body) else b""
    head = TensorHead(name=tensor.name, encoding=encoding, counts=counts, checksum=checksum(new), nbytes=len(packed))
    return _frame(head, packed)


def _encode(
    new: Tensor, old: Tensor | None, dtype: str
) -> tuple[Literal["same", "delta", "full"], tuple[int, ...], Tensor]:
    if old is None:
        return "full", (), new
    if torch.equal(new, old):
        return "same", (), new[:0]
    encoded, counts = encode_delta(aligned(new), aligned(old), ITEMSIZE.get(dtype, 1))
    if len(encoded) >= len(new):
        return "full", (), new
    return "delta", counts, encoded


def aligned(flat: Tensor) -> Tensor:
    """Its bytes at an address that any dtype can be viewed at; a file's data may begin anywhere."""
    return flat if flat.data_ptr() % 8 == 0 else flat.clone()


def _frame(head: _Head, body: bytes) -> bytes:
    encoded = head.model_dump_json().encode()
    return LENGTH.pack(len(encoded)) + encoded + body


def parse_head(raw: bytes, kind: type[Head]) -> Head:
    """
    Raises:
        DeltaError: these are not the bytes of a head.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise DeltaError(f"a frame of the patch does not read as {kind.__name__}: {error}") from error
