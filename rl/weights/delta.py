"""What changed between two versions of the weights, as a stream of frames.

    frame   8 bytes: length of its head; the head (JSON); the body, of the length that the head says
    first   ``PatchHead``, without a body
    then    one for each part of each tensor (``parts``), in order: ``PartHead``, and the streams of ``changes``

A tensor is one part, or several of ``PART_BYTES``. A part's head has the xxh3 of its new bytes: the copy is checked
part by part before any engine loads it, which finds a base that differs, too. Values are compared as bits, so that the
result is exact. ``copies`` applies the frames.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl.weights.changes import Encoding, encode
from rl.weights.tensor_files import LENGTH, Bytes, Memory, Place, TensorFiles, places

PART_BYTES = 2 << 20
"""Old, new and their difference stay in a core's cache; and it is what threads share a large tensor by."""
CORES_A_THREAD, MOST_THREADS = 4, 8
"""Patches are made and applied while engines generate and, often, the trainer trains."""
MODEL = ""
"""The sender of the weights that a receiver was started with."""
AHEAD_A_THREAD = 4
"""Parts that are finished, or begun, before the first of them is taken: a bound of the memory."""

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    nbytes: int

    @classmethod
    def of(cls, name: str, place: Place) -> Layout:
        return cls(name=name, dtype=place.dtype, shape=place.shape, nbytes=place.nbytes)


class PatchHead(_Head):
    """First frame."""

    sender: str
    """Whose version this is: those of another run have the same numbers, and other values."""
    version: int
    base: int | None
    """The sender's version that the patch changes; None: all values come."""
    part_bytes: Annotated[int, Field(gt=0, multiple_of=8)]
    layout: tuple[Layout, ...]


class PartHead(_Head):
    name: str
    begin: int
    """First byte in its tensor."""
    encoding: Encoding
    sizes: tuple[Annotated[int, Field(ge=0)], ...]
    """Bytes of each stream."""
    checksum: str

    @property
    def nbytes(self) -> int:
        """Of the body."""
        return sum(self.sizes)


Head = TypeVar("Head", PatchHead, PartHead)


@dataclass(frozen=True)
class Part:
    """Some of a tensor's bytes."""

    name: str
    begin: int
    nbytes: int


def parts(layout: Iterable[Layout], part_bytes: int) -> Iterator[Part]:
    """All of these tensors', in order."""
    for tensor in layout:
        for begin in range(0, tensor.nbytes, part_bytes):
            yield Part(tensor.name, begin, min(part_bytes, tensor.nbytes - begin))


def threads() -> int:
    """That one patch may keep busy."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // CORES_A_THREAD))


def checksum(data: Bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data.data)


def patch(new: Path, version: int, old: Path | None = None, base: int | None = None, *, sender: str) -> Iterator[bytes]:
    """Frames that make ``new`` of a copy of ``old``; without ``old``, of nothing.

    Raises:
        DeltaError: the two do not hold the same tensors.
    """
    fresh = places(new)
    before = places(old) if old is not None else None
    layout = tuple(Layout.of(name, place) for name, place in fresh.items())
    if before is not None and {Layout.of(name, place) for name, place in before.items()} != set(layout):
        raise DeltaError(f"{new} and {old} do not hold the same tensors")
    known = base if before is not None else None
    yield _frame(PatchHead(sender=sender, version=version, base=known, part_bytes=PART_BYTES, layout=layout))
    with ExitStack() as stack:
        values = stack.enter_context(TensorFiles(fresh))
        older = stack.enter_context(TensorFiles(before)) if before is not None else None

        memory = Memory(PART_BYTES)

        def frame(part: Part) -> bytes:
            now = values.read(part.name, part.begin, memory.take(0, part.nbytes))
            then = older.read(part.name, part.begin, memory.take(1, part.nbytes)) if older is not None else None
            return _part_frame(part, now, then, fresh[part.name].itemsize)

        yield from _in_order(frame, parts(layout, PART_BYTES))


def _part_frame(part: Part, new: Bytes, old: Bytes | None, itemsize: int) -> bytes:
    changes = encode(new, old, itemsize)
    sizes = tuple(map(len, changes.streams))
    head = PartHead(name=part.name, begin=part.begin, encoding=changes.encoding, sizes=sizes, checksum=checksum(new))
    return _frame(head, *changes.streams)


def _in_order(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Results of some threads, in the items' order."""
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads(), "patch") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > AHEAD_A_THREAD * threads():
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:  # of one that failed, or that nobody wants any more
                future.cancel()


def _frame(head: _Head, *body: bytes) -> bytes:
    encoded = head.model_dump_json().encode()
    return b"".join((LENGTH.pack(len(encoded)), encoded, *body))


def parse_head(raw: bytes, kind: type[Head]) -> Head:
    """
    Raises:
        DeltaError: these are not the bytes of a head.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise DeltaError(f"a frame of the patch does not read as {kind.__name__}: {error}") from error
