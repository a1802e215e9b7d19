"""Filling device images from pinned memory, on a stream of its own, and decoding what is stored smaller.

On the CPU there are no streams: the same copies run where they are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from teachers import codec
from teachers.arena import Arena
from teachers.format import StoredTensor, dtype_of, padded
from teachers.shard import StoredShard


@dataclass
class Image:
    """A teacher's (or a group's) weights on the device."""

    data: Tensor
    views: Mapping[str, Tensor] = field(default_factory=dict)
    last_use: torch.cuda.Event | None = None

    def mark_use(self) -> None:
        """Its reader has queued all that it will do with the weights."""
        if self.data.is_cuda:
            self.last_use = torch.cuda.Event()
            self.last_use.record(torch.cuda.current_stream(self.data.device))

    def wait_unused(self) -> None:
        if self.last_use is not None:
            self.last_use.synchronize()
            self.last_use = None


@dataclass(frozen=True)
class Source:
    """Extents in pinned memory: which frames, and where in them each content key begins."""

    arena: Arena
    frames: Sequence[int]
    offsets: Mapping[str, int]

    def host(self, key: str, begin: int, end: int) -> list[Tensor]:
        at = self.offsets[key]
        return [self.arena.memory[a:b] for a, b in self.arena.spans(self.frames, at + begin, at + end)]


class Lane:
    """One direction of work between pinned memory and the device: queue copies, then ``synchronize``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def use(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait for what was queued, by an event: other work of the device goes on."""
        if self.stream is not None:
            event = torch.cuda.Event(blocking=True)  # the cores are others'
            event.record(self.stream)
            event.synchronize()

    def fill(
        self,
        shard: StoredShard,
        names: Iterable[str],
        views: Mapping[str, int],
        image: Tensor,
        source: Source,
        base: Source | None,
    ) -> int:
        """Queue what makes these tensors of an image; returns the bytes that cross to the device.

        Args:
            views: offsets of the tensors in the image.
        """
        raw: dict[int, tuple[int, int]] = {}
        decoded: set[int] = set()
        moved = 0
        with self.use():
            for name in names:
                tensor, at = shard.tensors[name], views[name]
                if tensor.encoding == "raw":
                    assert tensor.extent is not None
                    raw[at] = (source.offsets[tensor.extent], padded(tensor.nbytes))
                    continue
                if at in decoded:  # one under two names
                    continue
                decoded.add(at)
                out = image[at : at + tensor.nbytes]
                if tensor.encoding == "fp8":
                    moved += self._fp8(tensor, out, source)
                    continue
                assert base is not None
                assert shard.base is not None
                theirs = shard.base.tensors[name].extent
                assert theirs is not None
                moved += self._pour(base.host(theirs, 0, tensor.nbytes), out)
                if tensor.encoding == "delta":
                    moved += self._delta(tensor, out, source)
            moved += self._raw(raw, image, source)
        return moved

    def take(self, begin: int, end: int, image: Tensor, source: Source) -> int:
        """Queue a span of a plain teacher's image, whose bytes lie in it as they do in pinned memory."""
        with self.use():
            pieces = [source.arena.memory[a:b] for a, b in source.arena.spans(source.frames, begin, end)]
            return self._pour(pieces, image[begin:end])

    def _raw(self, raw: Mapping[int, tuple[int, int]], image: Tensor, source: Source) -> int:
        """Neighbours on both sides are one copy: a plain teacher in one piece of pinned memory is one in all."""
        runs: list[tuple[int, int, int]] = []
        for at, (begin, size) in sorted(raw.items()):
            if runs and runs[-1][0] + runs[-1][2] == at and runs[-1][1] + runs[-1][2] == begin:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + size)
            else:
                runs.append((at, begin, size))
        moved = 0
        for at, begin, size in runs:
            spans = source.arena.spans(source.frames, begin, begin + size)
            moved += self._pour([source.arena.memory[a:b] for a, b in spans], image[at : at + size])
        return moved

    def _pour(self, pieces: Sequence[Tensor], out: Tensor) -> int:
        at = 0
        for piece in pieces:
            out[at : at + len(piece)].copy_(piece, non_blocking=True)
            at += len(piece)
        return at

    def _stage(self, source: Source, key: str, span: tuple[int, int]) -> Tensor:
        staged = torch.empty(span[1] - span[0], dtype=torch.uint8, device=self.device)
        self._pour(source.host(key, *span), staged)
        return staged

    def _delta(self, tensor: StoredTensor, out: Tensor, source: Source) -> int:
        assert tensor.extent is not None
        itemsize, moved = dtype_of(tensor.dtype).itemsize, 0
        for piece in codec.delta_pieces(tensor.numel, itemsize, tensor.counts):
            bitmap = self._stage(source, tensor.extent, piece.head)
            values = self._stage(source, tensor.extent, piece.body)
            codec.apply_delta(out[piece.start * itemsize : piece.stop * itemsize], bitmap, values, itemsize)
            moved += len(bitmap) + len(values)
        return moved

    def _fp8(self, tensor: StoredTensor, out: Tensor, source: Source) -> int:
        assert tensor.extent is not None
        dtype, moved = dtype_of(tensor.dtype), 0
        for piece in codec.fp8_pieces(tensor.shape):
            scales = self._stage(source, tensor.extent, piece.head)
            codes = self._stage(source, tensor.extent, piece.body)
            codec.decode_fp8(out[piece.start * dtype.itemsize : piece.stop * dtype.itemsize], scales, codes, dtype)
            moved += len(scales) + len(codes)
        return moved

    def to_host(self, image: Tensor, arena: Arena, frames: Sequence[int]) -> None:
        """Queue the copy of a plain teacher's image back into pinned memory."""
        at = 0
        with self.use():
            for begin, end in arena.spans(frames, 0, len(image)):
                arena.memory[begin:end].copy_(image[at : at + end - begin], non_blocking=True)
                at += end - begin
