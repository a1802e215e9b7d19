"""What changed between two arrays of as many bytes, as streams of zstd. No I/O; exact for every bit pattern.

    same      nothing
    sparse    gaps, and the planes of the changed values
    dense     the planes of all values
    full      the new bytes

    gaps      a byte below 255: so many values are the same, and the next one changed; 255: so many are the same, and
              the gap goes on
    planes    of the differences new - old, which are integers of the value's width and wrap around. Zigzag (0, -1, 1,
              -2 are 0, 1, 2, 3), so that a small one is small whatever its sign; all lowest bytes, then all next ones

An optimizer's step moves most of the bf16 values that it moves at all to their neighbours: of their differences all
planes but the lowest are zeros, and that one holds little more than signs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from rl.weights.tensor_files import Bytes

Integers = NDArray[Any]
"""Unsigned, of any width."""
Encoding = Literal["same", "sparse", "dense", "full"]

ZSTD_LEVEL = 1
"""Nothing repeats in these streams but the values themselves: levels 2 and 3 take up to five times as long for the same
bytes, and -1 does without an entropy coder, which is most of it."""
DENSE = 0.25
"""From this share of changed values on, their positions cost as much as the zeros in between."""
FEW = 0.9
"""Of the bytes: a dense encoding that is larger is compared with all values."""
LONG = 255
"""A gap that goes on."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WORD = 8


@dataclass(frozen=True)
class Changes:
    encoding: Encoding
    streams: tuple[bytes, ...]


def encode(new: Bytes, old: Bytes | None, itemsize: int) -> Changes:
    """
    Args:
        new, old: flat, of one length, aligned to their values. ``old`` is work memory, too: it ends as the differences,
            since memory that is asked for anew costs more than all else here. Without it, all values.
        itemsize: bytes of a value.
    """
    if old is None:
        return _full(new)
    integers = _UNSIGNED[itemsize]
    differences = old.view(integers)
    np.subtract(new.view(integers), differences, out=differences)
    changed = int(np.count_nonzero(differences))
    if changed == 0:
        return Changes("same", ())
    if changed < DENSE * len(differences):
        positions, values = _nonzero(differences)
        return Changes("sparse", _compressed([to_gaps(positions), *to_planes(values)]))
    dense = Changes("dense", _compressed(to_planes(differences)))
    if _nbytes(dense) < FEW * len(new):
        return dense
    return min(dense, _full(new), key=_nbytes)


def decode(changes: Changes, base: Bytes, itemsize: int) -> Bytes:
    """The new bytes; those of ``base`` are changed in place where that does.

    Raises:
        ValueError: the streams are not an encoding of as many values.
    """
    if changes.encoding == "same":
        return base
    streams = [_decompressed(raw, len(base)) for raw in changes.streams]
    if changes.encoding == "full":
        _require([len(stream) for stream in streams], [len(base)])
        return streams[0]
    target = base.view(_UNSIGNED[itemsize])
    if changes.encoding == "dense":
        _require([len(stream) for stream in streams], [len(target)] * itemsize)
        target += from_planes(streams)
        return base
    gaps, *planes = streams
    positions = from_gaps(gaps)
    _require([len(stream) for stream in planes], [len(positions)] * itemsize)
    if len(positions) and positions[-1] >= len(target):
        raise ValueError(f"a value at {positions[-1]} changed, there are {len(target)}")
    target[positions] += from_planes(planes)
    return base


def _decompressed(raw: bytes, most: int) -> Bytes:
    """
    Args:
        most: bytes that it may have; one that is damaged asks for any number.
    """
    try:
        if (found := zstandard.frame_content_size(raw)) > most:
            raise ValueError(f"a stream says that it has {found} bytes, {most} is the most")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(raw), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"a stream is not zstd: {error}") from error


def _require(lengths: Sequence[int], expected: Sequence[int]) -> None:
    if list(lengths) != list(expected):
        raise ValueError(f"the streams have {list(lengths)} bytes, {list(expected)} are expected")


def _full(new: Bytes) -> Changes:
    return Changes("full", _compressed([new]))


def _compressed(streams: Iterable[Bytes]) -> tuple[bytes, ...]:
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    return tuple(compressor.compress(stream.data) for stream in streams)


def _nbytes(changes: Changes) -> int:
    return sum(map(len, changes.streams))


def _nonzero(values: Integers) -> tuple[NDArray[np.int64], Integers]:
    """Where values are not zero, and these. Word by word first: of bf16 there are four times fewer words to look at."""
    per_word = _WORD // values.itemsize
    whole = len(values) // per_word * per_word
    words = values[:whole].view(np.uint64)
    found = np.flatnonzero(words != 0)
    candidates = words.take(found).view(values.dtype)
    inside = np.flatnonzero(candidates != 0)
    found *= per_word
    positions, changed = found.take(inside // per_word), candidates.take(inside)
    inside %= per_word
    positions += inside
    if whole < len(values):
        rest = np.flatnonzero(values[whole:]) + whole
        return np.concatenate([positions, rest]), np.concatenate([changed, values[rest]])
    return positions, changed


def to_gaps(positions: NDArray[np.int64]) -> Bytes:
    """
    Args:
        positions: rising.
    """
    same = np.diff(positions, prepend=-1)
    same -= 1
    gaps = same.astype(np.uint8)
    long = np.flatnonzero(same >= LONG)
    if not len(long):
        return gaps
    repeats, gaps[long] = np.divmod(same[long], LONG)
    return np.insert(gaps, np.repeat(long, repeats), LONG)


def from_gaps(gaps: Bytes) -> NDArray[np.int64]:
    changed = gaps != LONG
    steps = gaps.astype(np.int64)
    steps += changed
    positions = np.cumsum(steps)[changed]
    positions -= 1
    return positions


def to_planes(differences: Integers) -> list[Bytes]:
    width = differences.itemsize
    zigzag = differences << 1
    zigzag ^= -(differences >> (8 * width - 1))  # all ones where the difference is negative
    folded = zigzag.view(np.uint8)
    return [np.ascontiguousarray(folded[at::width]) for at in range(width)]


def from_planes(planes: Sequence[Bytes]) -> Integers:
    width = len(planes)
    folded = np.empty(len(planes[0]) * width, np.uint8)
    for at, plane in enumerate(planes):
        folded[at::width] = plane
    zigzag = folded.view(_UNSIGNED[width])
    signs = -(zigzag & 1)
    zigzag >>= 1
    zigzag ^= signs
    return zigzag
