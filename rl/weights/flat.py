"""Named tensors one after another in a flat buffer: how they are cut into buckets, filled, and handed on.

A bucket's tensors have one dtype, so that each is aligned without gaps, as SGLang's flat buckets must be.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy

from rl.weights.serialize import may_part
from rollout.engine.sglang_weights import BucketShape

CPU = "cpu"
"""In place of a GPU's UUID."""
ALIGNMENT = 512
"""Bytes; of what a device's allocator gives, so that a copy in one piece is as fast as one of a tensor of its own."""
_DEVICE_ARGUMENT = 6
"""Of ``torch.multiprocessing.reductions.rebuild_cuda_tensor``."""


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def plan_buckets(tensors: Iterable[TensorSpec], bucket_bytes: int) -> list[BucketShape]:
    """Cut tensors, in order, into buckets of one dtype and at most so many bytes. A larger tensor has one to itself;
    what must not part may exceed it, too.

    Raises:
        ValueError: where ``bucket_bytes`` is not positive, or a name comes twice.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, it must be positive")
    buckets: list[list[TensorSpec]] = []
    seen: set[str] = set()
    size = 0
    for tensor in tensors:
        if tensor.name in seen:
            raise ValueError(f"{tensor.name} comes twice")
        seen.add(tensor.name)
        full = bool(buckets) and size + tensor.nbytes > bucket_bytes and may_part(buckets[-1][-1].name, tensor.name)
        if not buckets or full or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    return [
        BucketShape(
            tuple(tensor.name for tensor in bucket),
            tuple(str(tensor.dtype).removeprefix("torch.") for tensor in bucket),
            tuple(tensor.shape for tensor in bucket),
        )
        for bucket in buckets
    ]


def spans(bucket: BucketShape) -> list[tuple[int, int]]:
    """Where each tensor's bytes begin and end."""
    result, at = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        end = at + TensorSpec(name, getattr(torch, dtype), shape).nbytes
        result.append((at, end))
        at = end
    return result


def bucket_nbytes(bucket: BucketShape) -> int:
    return spans(bucket)[-1][1]


def side_by_side(plan: Iterable[BucketShape]) -> list[int]:
    """Where each bucket begins in a memory that holds all of them, and last where the memory ends."""
    offsets = [0]
    for bucket in plan:
        offsets.append(-(-(offsets[-1] + bucket_nbytes(bucket)) // ALIGNMENT) * ALIGNMENT)
    return offsets


def flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def fill(buffer: Tensor, bucket: BucketShape, tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Copy tensors into the buffer; returns the part of it that they take.

    Raises:
        ValueError: they are not the bucket's.
    """
    for (name, tensor), wanted, dtype, shape, (begin, end) in zip(
        tensors, bucket.names, bucket.dtypes, bucket.shapes, spans(bucket), strict=True
    ):
        if name != wanted or tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
            raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)} comes where {wanted} {dtype} {shape} should")
        buffer[begin:end].copy_(flat_bytes(tensor), non_blocking=True)
    return buffer[: bucket_nbytes(bucket)]


def device_id(device: torch.device) -> str:
    """The GPU's UUID, which names it in every process whatever that process calls it."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else CPU


class _HandlePickler(ForkingPickler):
    """Handles of tensors for a process that may number its GPUs otherwise: the UUID in place of the number, which
    SGLang's unpickling understands."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cuda":
            return NotImplemented
        rebuild, arguments = torch.multiprocessing.reductions.reduce_tensor(value)
        changed = list(arguments)
        changed[_DEVICE_ARGUMENT] = device_id(value.device)
        return rebuild, tuple(changed)


def handle_payload(flat: Tensor, bucket: BucketShape) -> str:
    """What ``/update_weights_from_tensor`` takes as ``flattened_bucket``: a handle (CUDA IPC, or a file in shared
    memory), not the data. The buffer must stay as it is until the engine has answered."""
    entries = [
        # SGLang reads attributes; its own class would need SGLang in the trainer's process
        SimpleNamespace(
            name=name,
            shape=torch.Size(shape),
            dtype=getattr(torch, dtype),
            start_idx=begin,
            end_idx=end,
            numel=end - begin,
        )
        for name, dtype, shape, (begin, end) in zip(
            bucket.names, bucket.dtypes, bucket.shapes, spans(bucket), strict=True
        )
    ]
    return _pickled({"flattened_tensor": flat, "metadata": entries})


def memory_handle(memory: Tensor) -> str:
    """What the loader in a server opens a flat tensor with (``rollout.engine.opened_memory``)."""
    return _pickled(memory)


def _pickled(value: Any) -> str:
    stream = io.BytesIO()
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")  # a name in shared memory: descriptors pass only between relatives
    try:
        _HandlePickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    finally:
        set_sharing_strategy(before)
    return base64.b64encode(stream.getvalue()).decode("ascii")
