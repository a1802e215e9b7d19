"""What a GPU decodes in one go: which stored bytes are staged in the workspace, and the jobs that read them. Pure.

A job is a piece of a tensor (``codec``), and a row of a table of integers:

    delta   out, bitmap, values, elements, counts
    fp8     out, scales, codes, elements, width

``out`` is in elements of the image, ``bitmap`` and ``codes`` are bytes of the workspace, ``values`` and ``scales`` are
elements of their type there; ``counts`` is the job's first counter, one a block of ``BLOCK`` elements.

The workspace holds what is staged, then the table, then the counters. Copies to it are few: neighbours in the stored
image stay neighbours, with the padding between them, so that a batch of whole tensors is one copy. Each byte keeps its
place modulo ``ALIGN``, so what was aligned as it was stored is aligned as it is staged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from teachers import codec
from teachers.format import ALIGN as EXTENT_ALIGN
from teachers.format import StoredTensor, dtype_of

BLOCK = 4096
BLOCKS = codec.PIECE_ELEMENTS // BLOCK
"""Of a piece, at most."""
ALIGN = 16
COLUMNS = 5
ROW_BYTES = 8 * COLUMNS
_COUNTER_BYTES = 4
_SCALE_BYTES = 4

Row = tuple[int, int, int, int, int]
Copy = tuple[int, int, int]
"""Where it goes in the workspace, where it begins in the stored image, its bytes."""


@dataclass(frozen=True)
class Kind:
    """Jobs of one kernel. ``dtype``: of the result; for a delta, integers of its width."""

    fp8: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Encoded:
    """A tensor to decode: to byte ``out`` of an image, from byte ``begin`` of the stored image."""

    kind: Kind
    out: int
    begin: int
    pieces: Sequence[codec.Piece]
    width: int
    """Of a row; fp8."""

    @classmethod
    def of(cls, tensor: StoredTensor, out: int, begin: int) -> Encoded:
        dtype = dtype_of(tensor.dtype)
        if tensor.encoding == "fp8":
            width = tensor.numel // tensor.shape[0]
            return cls(Kind(True, dtype), out, begin, codec.fp8_pieces(tensor.shape), width)
        pieces = codec.delta_pieces(tensor.numel, dtype.itemsize, tensor.counts)
        return cls(Kind(False, codec.INTEGERS[dtype.itemsize]), out, begin, pieces, 0)


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN


def _behind(staged: int, stored: int, begin: int) -> int:
    """Where byte ``begin`` of the stored image is staged, behind what ended at ``stored`` there and ``staged`` here."""
    gap = begin - stored
    return staged + (gap if 0 <= gap < EXTENT_ALIGN else gap % ALIGN)


@dataclass(frozen=True)
class _Part:
    """Some of a tensor's pieces in the workspace: where their heads and bodies begin, and what is taken with them."""

    pieces: range
    heads: int
    bodies: int
    staged: int
    stored: int
    counters: int


@dataclass
class Batch:
    """What is staged, and decoded, together."""

    copies: list[Copy] = field(default_factory=list)
    jobs: dict[Kind, list[Row]] = field(default_factory=dict)
    rows: int = 0
    counters: int = 0
    staged: int = 0
    """What is taken up to here is staged, of the stored image up to ``stored``."""
    stored: int = -EXTENT_ALIGN

    @property
    def table_at(self) -> int:
        return _aligned(self.staged)

    @property
    def counters_at(self) -> int:
        return _aligned(self.table_at + self.rows * ROW_BYTES)

    @property
    def nbytes(self) -> int:
        return self.counters_at + self.counters * _COUNTER_BYTES

    def add(self, tensor: Encoded, first: int, room: int) -> int:
        """Take as many pieces from ``first`` on as fit; returns the first that does not."""
        fitting, counters = None, self.counters
        for index in range(first, len(tensor.pieces)):
            counters += 0 if tensor.kind.fp8 else _blocks(tensor.pieces[index])
            part = self._part(tensor, range(first, index + 1), counters)
            rows_at = _aligned(part.staged) + (self.rows + len(part.pieces)) * ROW_BYTES
            if _aligned(rows_at) + counters * _COUNTER_BYTES > room:
                break
            fitting = part
        if fitting is None:
            return first
        self._take(tensor, fitting)
        return fitting.pieces.stop

    def _part(self, tensor: Encoded, pieces: range, counters: int) -> _Part:
        a, z = tensor.pieces[pieces[0]], tensor.pieces[pieces[-1]]
        heads = _behind(self.staged, self.stored, tensor.begin + a.head[0])
        bodies = _behind(heads + z.head[1] - a.head[0], z.head[1], a.body[0])
        staged = bodies + z.body[1] - a.body[0]
        return _Part(pieces, heads, bodies, staged, tensor.begin + z.body[1], counters)

    def _take(self, tensor: Encoded, part: _Part) -> None:
        a, z = tensor.pieces[part.pieces[0]], tensor.pieces[part.pieces[-1]]
        self._copy(part.heads, tensor.begin + a.head[0], z.head[1] - a.head[0])
        self._copy(part.bodies, tensor.begin + a.body[0], z.body[1] - a.body[0])
        kind, counters = tensor.kind, self.counters
        size = kind.dtype.itemsize
        head_unit, body_unit = (_SCALE_BYTES, 1) if kind.fp8 else (1, size)
        jobs = self.jobs.setdefault(kind, [])
        for piece in (tensor.pieces[index] for index in part.pieces):
            head, body = part.heads + piece.head[0] - a.head[0], part.bodies + piece.body[0] - a.body[0]
            last = tensor.width if kind.fp8 else counters
            out, elements = tensor.out // size + piece.start, piece.stop - piece.start
            jobs.append((out, head // head_unit, body // body_unit, elements, last))
            counters += _blocks(piece)
        self.rows += len(part.pieces)
        self.counters, self.staged, self.stored = part.counters, part.staged, part.stored

    def _copy(self, at: int, begin: int, size: int) -> None:
        if self.copies:
            there, start, length = self.copies[-1]
            gap = begin - start - length
            if at - there == begin - start and 0 <= gap < EXTENT_ALIGN:
                self.copies[-1] = (there, start, length + gap + size)
                return
        if size:
            self.copies.append((at, begin, size))


def _blocks(piece: codec.Piece) -> int:
    return -(-(piece.stop - piece.start) // BLOCK)


def batches(tensors: Iterable[Encoded], room: int) -> Iterator[Batch]:
    """
    Args:
        room: bytes of the workspace.

    Raises:
        ValueError: it does not hold a piece (``codec.workspace_bytes`` does).
    """
    batch = Batch()
    for tensor in tensors:
        first = 0
        while first < len(tensor.pieces):
            taken = batch.add(tensor, first, room)
            if taken == first and not batch.rows:
                raise ValueError(f"a workspace of {room} bytes holds no piece of a tensor with {len(tensor.pieces)}")
            first = taken
            if first < len(tensor.pieces):
                yield batch
                batch = Batch()
    if batch.rows:
        yield batch
