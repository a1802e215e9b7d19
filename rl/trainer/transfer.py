"""Many small tensors to the device in one copy, for which nobody waits.

A copy from pageable memory waits until the device has done all that it was given before, and each copy costs a launch.
So the tensors are packed into one pinned buffer (PyTorch keeps it until the copy has been made), and what arrives is
viewed as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

ALIGNMENT = 256
"""Bytes; that of an allocation of its own, on which kernels' widest loads rely."""
HOLDERS = (Tensor, tuple)


def sent(structure: T, device: torch.device) -> T:
    """The same structure (tuples and dataclasses, nested) with its CPU tensors copied to ``device``."""
    if device.type == "cpu":
        return structure
    found = {id(tensor): tensor for tensor in _tensors(structure)}
    arrived = dict(zip(found, send_packed(list(found.values()), device, pin=True), strict=True))
    moved: T = _map(structure, lambda tensor: arrived[id(tensor)])
    return moved


def send_packed(tensors: Sequence[Tensor], device: torch.device, pin: bool) -> list[Tensor]:
    """Copies on ``device``, all views of one buffer there."""
    tensors, begins, end = [tensor.contiguous() for tensor in tensors], [], 0
    for tensor in tensors:
        begins.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
    for place, tensor in zip(_views(packed, begins, tensors), tensors, strict=True):
        place.copy_(tensor)
    return _views(packed.to(device, non_blocking=True), begins, tensors)


def _views(packed: Tensor, begins: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of these types and shapes that begin at these bytes; ``like`` are contiguous."""
    typed = {dtype: packed.view(dtype) for dtype in {x.dtype for x in like}}
    return [
        typed[x.dtype].as_strided(x.shape, x.stride(), begin // x.itemsize)
        for begin, x in zip(begins, like, strict=True)
    ]


def _tensors(structure: Any) -> Iterator[Tensor]:
    if isinstance(structure, Tensor):
        yield structure
    else:
        for part in structure if isinstance(structure, tuple) else _parts(structure).values():
            yield from _tensors(part)


def _map(structure: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, tuple):
        return tuple(_map(part, function) for part in structure)
    changed = {name: _map(part, function) for name, part in _parts(structure).items()}
    return dataclasses.replace(structure, **changed) if changed else structure


def _parts(structure: Any) -> dict[str, Any]:
    """What may hold tensors of a dataclass, by the field's name; nothing of anything else."""
    if not _is_record(structure):
        return {}
    parts = {f.name: getattr(structure, f.name) for f in dataclasses.fields(structure) if f.init}
    return {name: part for name, part in parts.items() if part is not None and _may_hold(part)}


def _may_hold(part: Any) -> bool:
    return isinstance(part, HOLDERS) or _is_record(part)


def _is_record(part: Any) -> bool:
    return dataclasses.is_dataclass(part) and not isinstance(part, type)
