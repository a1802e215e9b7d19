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
from teachers.batches import Encoded, batches
from teachers.format import StoredTensor, padded
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

    def spans(self, begin: int, end: int) -> list[Tensor]:
        """Bytes of the stored image, in order."""
        return [self.arena.memory[a:b] for a, b in self.arena.spans(self.frames, begin, end)]


@dataclass(frozen=True)
class Resident:
    """A base that is on the device itself: a plain teacher's image, which is as the stored one."""

    teacher: str
    data: Tensor
    offsets: Mapping[str, int]

    def spans(self, begin: int, end: int) -> list[Tensor]:
        return [self.data[begin:end]]


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
        base: Source | Resident | None,
        workspace: Tensor,
    ) -> int:
        """Queue what makes these tensors of an image; returns the bytes that cross to the device.

        Args:
            views: offsets of the tensors in the image.
            workspace: what a GPU decodes with; nobody else uses it until this is done.
        """
        raw: dict[int, tuple[int, int]] = {}
        based: dict[int, tuple[int, int]] = {}
        encoded: dict[int, tuple[StoredTensor, int]] = {}  # by place: one under two names is decoded once
        for name in names:
            tensor, at = shard.tensors[name], views[name]
            if not tensor.numel:
                continue
            if tensor.encoding == "raw":
                assert tensor.extent is not None
                raw[at] = (source.offsets[tensor.extent], padded(tensor.nbytes))
                continue
            if tensor.encoding != "fp8":
                assert base is not None
                assert shard.base is not None
                theirs = shard.base.tensors[name].extent
                assert theirs is not None
                based[at] = (base.offsets[theirs], padded(tensor.nbytes))
            if tensor.encoding != "same":
                assert tensor.extent is not None
                encoded[at] = (tensor, source.offsets[tensor.extent])
        tensors = (Encoded.of(tensor, at, begin) for at, (tensor, begin) in encoded.items())
        with self.use():
            moved = self._copy(raw, image, source)
            if base is not None:
                copied = self._copy(based, image, base)
                moved += copied if isinstance(base, Source) else 0
            if encoded and self.stream is not None:
                moved += self.decode_batches(tensors, image, source, workspace)
            else:
                moved += self._decode_pieces(tensors, image, source)
        return moved

    def take(self, begin: int, end: int, image: Tensor, source: Source) -> int:
        """Queue a span of a plain teacher's image, whose bytes lie in it as they do in pinned memory."""
        with self.use():
            return self._pour(source.spans(begin, end), image[begin:end])

    def _copy(self, places: Mapping[int, tuple[int, int]], image: Tensor, source: Source | Resident) -> int:
        """Neighbours on both sides are one copy: a plain teacher in one piece of pinned memory is one in all."""
        runs: list[tuple[int, int, int]] = []
        for at, (begin, size) in sorted(places.items()):
            if runs and runs[-1][0] + runs[-1][2] == at and runs[-1][1] + runs[-1][2] == begin:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + size)
            else:
                runs.append((at, begin, size))
        return sum(self._pour(source.spans(begin, begin + size), image[at : at + size]) for at, begin, size in runs)

    def _pour(self, pieces: Sequence[Tensor], out: Tensor) -> int:
        at = 0
        for piece in pieces:
            out[at : at + len(piece)].copy_(piece, non_blocking=True)
            at += len(piece)
        return at

    def decode_batches(self, tensors: Iterable[Encoded], image: Tensor, source: Source, workspace: Tensor) -> int:
        """Queue it on the current stream: the work of a batch behind that of the one before, which leaves it the
        workspace."""
        from teachers import codec_triton  # Triton is there where a GPU is

        moved = 0
        for batch in batches(tensors, len(workspace)):
            for at, begin, size in batch.copies:
                moved += self._pour(source.spans(begin, begin + size), workspace[at : at + size])
            codec_triton.decode(batch, workspace, image)
        return moved

    def _decode_pieces(self, tensors: Iterable[Encoded], image: Tensor, source: Source) -> int:
        moved = 0
        for tensor in tensors:
            dtype = tensor.kind.dtype
            for piece in tensor.pieces:
                head, body = (self._bytes(source, tensor.begin, span) for span in (piece.head, piece.body))
                out = image[tensor.out + piece.start * dtype.itemsize : tensor.out + piece.stop * dtype.itemsize]
                if tensor.kind.fp8:
                    codec.decode_fp8(out, head, body, dtype)
                else:
                    codec.apply_delta(out, head, body, dtype.itemsize)
                moved += len(head) + len(body)
        return moved

    def _bytes(self, source: Source, begin: int, span: tuple[int, int]) -> Tensor:
        """Where they lie, if that is in one piece."""
        spans = source.spans(begin + span[0], begin + span[1])
        return spans[0] if len(spans) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *spans])

    def to_host(self, image: Tensor, arena: Arena, frames: Sequence[int]) -> None:
        """Queue the copy of a plain teacher's image back into pinned memory."""
        at = 0
        with self.use():
            for begin, end in arena.spans(frames, 0, len(image)):
                arena.memory[begin:end].copy_(image[at : at + end - begin], non_blocking=True)
                at += end - begin
