"""What of the training state a rank holds, as rectangles of the whole model's tensors, whatever the layout.

Megatron says where a rank's parameters lie in those of the whole model (``sharded_state_dict``). Of each parameter the
distributed optimizer gives a rank a range of its flattened elements. Such a range is not a rectangle, but a few:

    [begin, end) of a matrix  =  the end of one row, the full rows after it, the beginning of the last row

so that every rank can write its own elements, and any other layout can read them, without gathering anything. The keys:

    main.NAME, exp_avg.NAME, exp_avg_sq.NAME     fp32 weights and moments of trained parameters
    model.NAME                                   parameters and buffers that are not trained

The model's own weights are not among them where they are trained: they are the main weights, rounded.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from rl.trainer.model import PolicyModel
from rl.trainer.optimizer import MOMENTS, Optimizer, Shard


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor of the whole model."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    tensor: Tensor
    """Its elements, in the shape of the rectangle; a view of the live state."""
    written: bool
    """Whether this rank is the one that saves it; others may hold copies."""
    padded: bool
    """Whether another layout may pad the whole tensor to another shape (a vocabulary), with zeros."""


def rectangles(
    shape: Sequence[int], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """The range ``[begin, end)`` of a flattened tensor as ``(offset, sizes, begin, end)`` of consecutive rectangles."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,), (end - begin,), begin, end
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if begin // row == (end - 1) // row and end - begin < row:  # inside one row
        yield from _in_row(shape, begin // row, begin, end)
        return
    yield from _in_row(shape, first - 1, begin, first * row)
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row, last * row
    yield from _in_row(shape, last, last * row, end)


def _in_row(
    shape: Sequence[int], index: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    start = index * math.prod(shape[1:])
    for offset, sizes, low, high in rectangles(shape[1:], begin - start, end - start):
        yield (index, *offset), (1, *sizes), start + low, start + high


def state_pieces(models: Sequence[PolicyModel], optimizer: Optimizer) -> list[Piece]:
    """Everything of this rank that a checkpoint holds as tensors.

    Raises:
        KeyError: a trained parameter is not in the model's sharded state.
    """
    places = _places(models)
    pieces: list[Piece] = []
    for shard in optimizer.shards:
        pieces.extend(_shard_pieces(shard, places.pop(shard.parameter)))
    trained = {id(p) for model in models for p in model.parameters() if p.requires_grad}
    for tensor, parts in places.items():
        if id(tensor) in trained:
            continue  # all of it is another data-parallel rank's
        for part in parts:
            pieces.extend(_pieces("model", part, part.data.detach(), 0, part.data.numel(), _first_replica(part)))
    return pieces


def weight_pieces(models: Sequence[PolicyModel], saved: Container[str]) -> list[Piece]:
    """The weights of models without an optimizer, as a checkpoint with these keys has them."""
    pieces: list[Piece] = []
    for parts in _places(models).values():
        for part in parts:
            prefix = "main" if f"main.{part.key}" in saved else "model"
            pieces.extend(_pieces(prefix, part, part.data.detach(), 0, part.data.numel(), written=False))
    return pieces


def _places(models: Sequence[PolicyModel]) -> dict[Tensor, list[ShardedTensor]]:
    """Where each tensor of these models lies in those of the whole model."""
    places: dict[Tensor, list[ShardedTensor]] = {}
    for model in models:
        for value in model.sharded_state_dict().values():
            if isinstance(value, ShardedTensorFactory):
                built = value.build()
                places[value.data] = list(built.values() if isinstance(built, dict) else built)
            elif isinstance(value, ShardedTensor):
                places[value.data] = [value]
    return places


def _shard_pieces(shard: Shard, parts: Sequence[ShardedTensor]) -> Iterator[Piece]:
    base = shard.parameter.storage_offset()
    for part in parts:
        start = part.data.storage_offset() - base  # of this part in the flattened parameter
        begin, end = max(shard.begin, start), min(shard.end, start + part.data.numel())
        if begin >= end:
            continue
        values = {"main": shard.main} | {name: shard.state[name] for name in MOMENTS}
        # Copies of a parameter differ in their first two coordinates; the third one counts data-parallel ranks, each
        # of which has its own range.
        written = not any(part.replica_id[:2])
        for name, value in values.items():
            held = value.detach()[begin - shard.begin : end - shard.begin]
            yield from _pieces(name, part, held, begin - start, end - start, written)


def _first_replica(part: ShardedTensor) -> bool:
    return not any(part.replica_id) if isinstance(part.replica_id, tuple) else not part.replica_id


def _pieces(prefix: str, part: ShardedTensor, held: Tensor, begin: int, end: int, written: bool) -> Iterator[Piece]:
    """``held`` is the flat range ``[begin, end)`` of this rank's part of a tensor."""
    shape = tuple(part.local_shape)
    lead = tuple(part.global_offset[: part.prepend_axis_num])
    flat = held.reshape(-1)
    for offset, sizes, low, high in rectangles(shape or (1,), begin, end):
        place = zip(offset, part.global_offset[part.prepend_axis_num :], strict=True) if shape else ()
        yield Piece(
            key=f"{prefix}.{part.key}",
            shape=tuple(part.global_shape),
            offset=(*lead, *(own + whole for own, whole in place)),
            tensor=flat[low - begin : high - begin].view(*(1 for _ in lead), *(sizes if shape else ())),
            written=written,
            padded=bool(part.allow_shape_mismatch),
        )


def copied(pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> list[Piece]:
    """The same pieces with these elements in place of the live ones."""
    return [
        Piece(p.key, p.shape, p.offset, tensor, p.written, p.padded) for p, tensor in zip(pieces, tensors, strict=True)
    ]
