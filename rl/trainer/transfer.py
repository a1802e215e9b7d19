"""Many small tensors to the device in one copy, for which nobody waits.

A copy from pageable memory waits until the device has done all that it was given before, and each copy costs a launch.
So the tensors are packed into one pinned buffer (PyTorch keeps it until the copy has been made), and what arrives is
viewed as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

ALIGNMENT = 256
"""Bytes; that of an allocation of its own, on which kernels' widest loads rely."""


def sent(structure: T, device: torch.device) -> T:
    """The same structure (tuples and dataclasses, nested) with its CPU tensors copied to ``device``."""
    if device.type == "cpu":
        return structure
    found: dict[int, Tensor] = {}
    _map(structure, lambda tensor: found.setdefault(id(tensor), tensor))
    arrived = dict(zip(found, send_packed(list(found.values()), device, pin=True), strict=True))
    moved: T = _map(structure, lambda tensor: arrived[id(tensor)])
    return moved


def send_packed(tensors: Sequence[Tensor], device: torch.device, pin: bool) -> list[Tensor]:
    """Copies on ``device``, all views of one buffer there."""
    begins, end = [], 0
    for tensor in tensors:
        begins.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
    for begin, tensor in zip(begins, tensors, strict=True):
        _view(packed, begin, tensor).copy_(tensor)
    whole = packed.to(device, non_blocking=True)
    return [_view(whole, begin, tensor) for begin, tensor in zip(begins, tensors, strict=True)]


def _view(packed: Tensor, begin: int, like: Tensor) -> Tensor:
    return packed[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


def _map(structure: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, tuple):
        return tuple(_map(part, function) for part in structure)
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        parts = {f.name: getattr(structure, f.name) for f in dataclasses.fields(structure) if f.init}
        changed = {name: _map(part, function) for name, part in parts.items() if _holds(part)}
        return dataclasses.replace(structure, **changed) if changed else structure
    return structure


def _holds(part: Any) -> bool:
    return isinstance(part, Tensor | tuple) or (dataclasses.is_dataclass(part) and not isinstance(part, type))
