"""Smaller forms of a tensor: what changed against a base, and fp8. On the CPU, in pieces.

    delta   bitmap (one bit an element, little-endian in a byte; padded to 16 bytes), then the changed elements.
            Compared and restored as integers of the element's width: exact for every bit pattern.
    fp8     one fp32 scale a row (padded to 16 bytes), then float8_e4m3: element ≈ code · scale, scale = max|row| / 448.

A decoder works on ``PIECE_ELEMENTS`` at a time, so that its temporaries are bounded (``workspace_bytes``). On a GPU
``codec_triton`` decodes many pieces in one go (``batches``) in the same room, and is tested against these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PIECE_ELEMENTS = 1 << 20
_WORKSPACE_PER_ELEMENT = 32
"""On the CPU at most 18: staged bytes 8.2, the mask 1 and where it is set 8 (fp8: staged 1, indices 4, fp32 4). A GPU
stages in all of it: the more there is, the fewer the batches."""
_LEAST_WORKSPACE = 512
"""torch's allocators give no less for a tensor."""
FP8_LARGEST = 448.0
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""What each code stands for: looked up, ten times as fast as torch's conversion on a CPU."""
_ONE_THREAD = 1 << 15
"""torch takes more threads for more elements: on cores that are busy, these wait for each other."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def workspace_bytes(numel: int) -> int:
    """At most what decoding needs beside its results, where the largest tensor has so many elements."""
    return max(min(numel, PIECE_ELEMENTS) * _WORKSPACE_PER_ELEMENT, _LEAST_WORKSPACE) if numel else 0


def _align16(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def as_integers(flat_bytes: Tensor, itemsize: int) -> Tensor:
    return flat_bytes.view(INTEGERS[itemsize])


@dataclass(frozen=True)
class Piece:
    """Where the bytes of elements ``start:stop`` lie in an encoded tensor: two spans (begin, end)."""

    start: int
    stop: int
    head: tuple[int, int]
    body: tuple[int, int]


def encode_delta(new: Tensor, old: Tensor, itemsize: int) -> tuple[Tensor, tuple[int, ...]]:
    """Bytes of the delta, and how many elements changed in each piece. Both are flat uint8 tensors of one length."""
    fresh, before = as_integers(new, itemsize), as_integers(old, itemsize)
    changed = fresh != before
    bitmap = torch.from_numpy(np.packbits(changed.numpy(), bitorder="little"))
    values = fresh[changed].view(torch.uint8)
    head = torch.zeros(_align16(len(bitmap)), dtype=torch.uint8)
    head[: len(bitmap)] = bitmap
    counts = tuple(int(part.sum()) for part in changed.split(PIECE_ELEMENTS))
    return torch.cat([head, values]), counts


def delta_pieces(numel: int, itemsize: int, counts: tuple[int, ...]) -> list[Piece]:
    pieces, at = [], _align16(-(-numel // 8))
    for index, count in enumerate(counts):
        start, stop = index * PIECE_ELEMENTS, min(numel, (index + 1) * PIECE_ELEMENTS)
        pieces.append(Piece(start, stop, (start // 8, -(-stop // 8)), (at, at + count * itemsize)))
        at += count * itemsize
    return pieces


def apply_delta(out: Tensor, bitmap: Tensor, values: Tensor, itemsize: int) -> None:
    """Overwrite the changed elements of ``out`` (the base's bytes of one piece) in place."""
    target = as_integers(out, itemsize).numpy()
    changed = np.unpackbits(bitmap.numpy(), count=len(target), bitorder="little").view(bool)
    # By position: four to eight times as fast as a mask, in numpy and in torch.
    target[np.flatnonzero(changed)] = as_integers(values, itemsize).numpy()


def fp8_fits(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Matrices only: norms and biases are small, and matter more. A row has to fit into a piece."""
    matrix = len(shape) >= 2 and shape[0] > 0 and 0 < _row(shape) <= PIECE_ELEMENTS
    return matrix and dtype.is_floating_point and dtype.itemsize > 1


def _row(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape[1:]).numel())


def encode_fp8(tensor: Tensor) -> tuple[Tensor, float]:
    """Bytes, and the relative RMS error."""
    rows = tensor.detach().cpu().reshape(len(tensor), -1).float()
    scales = (rows.abs().amax(1) / FP8_LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (rows / scales.unsqueeze(1)).to(torch.float8_e4m3fn)
    head = torch.zeros(_align16(4 * len(rows)), dtype=torch.uint8)
    head[: 4 * len(rows)] = scales.view(torch.uint8)
    back = (codes.float() * scales.unsqueeze(1)).to(tensor.dtype).float()
    error = float((back - rows).norm() / rows.norm().clamp_min(torch.finfo(torch.float32).tiny))
    return torch.cat([head, codes.reshape(-1).view(torch.uint8)]), error


def fp8_pieces(shape: tuple[int, ...]) -> list[Piece]:
    rows, width = shape[0], _row(shape)
    step, body = max(1, PIECE_ELEMENTS // width), _align16(4 * rows)
    pieces = []
    for first in range(0, rows, step):
        last = min(rows, first + step)
        pieces.append(
            Piece(first * width, last * width, (4 * first, 4 * last), (body + first * width, body + last * width))
        )
    return pieces


def decode_fp8(out: Tensor, scales: Tensor, codes: Tensor, dtype: torch.dtype) -> None:
    """``out``: the result's bytes of one piece."""
    factor = scales.view(torch.float32).unsqueeze(1)
    rows = codes.view(len(factor), -1)
    step = max(1, _ONE_THREAD // rows.size(1))
    parts = (tensor.split(step) for tensor in (rows, factor, out.view(dtype).view(rows.shape)))
    for row, scale, target in zip(*parts, strict=True):
        target.copy_(_E4M3.index_select(0, row.flatten().int()).view(row.shape).mul_(scale))
