"""Model, gradients and optimizer leave the device while an engine generates on it, and come back for training.

The tensors stay the same objects: their storage is emptied and filled again, so that every view of it (Megatron's
parameters are views of one buffer, the optimizer's shards views of those) comes and goes with it. Weights and optimizer
are copied to host memory. Gradients are not: they are zero at the start of each update. Teachers' tiers give their
part of the device away too.

On the CPU the same happens with plain tensors: the copy is then a second one in the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rl.trainer import platform
from rl.trainer.host_memory import HostMemory

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.distributed import DistributedDataParallel

from rl.trainer.optimizer import MOMENTS, Optimizer


class Tiers(Protocol):
    """Teachers' weights, which know by themselves where else they are kept."""

    def offload(self) -> int:
        """Leave the device; returns the bytes that it gained."""
        ...

    def onload(self) -> None: ...


class Offload:
    """What of a rank is away. ``close`` frees the host memory, which is otherwise kept for the next time."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._kept: list[tuple[Tensor, Tensor]] = []
        """Flat tensors on the device, without storage, and their copies."""
        self._empty: list[tuple[torch.UntypedStorage, int]] = []
        """Storages that come back zeroed, and their bytes."""
        self._tiers: Tiers | None = None

    @property
    def away(self) -> bool:
        return bool(self._kept)

    def offload(
        self, modules: Sequence[DistributedDataParallel], optimizer: Optimizer, tiers: Tiers | None = None
    ) -> int:
        """Empty the device of these; returns the bytes that it gained. Without effect when they are away already."""
        if self.away:
            return 0
        gained = tiers.offload() if tiers is not None else 0  # first: it may refuse, and nothing has changed then
        self._tiers = tiers
        for module in modules:
            module.module.release_graphs()
        kept, zeroed = _storages(modules, optimizer)
        copies = self._memory.copies(kept)
        self._kept = list(zip(kept, copies, strict=True))
        self._empty = [(tensor.untyped_storage(), tensor.untyped_storage().nbytes()) for tensor in zeroed]
        gained += sum(tensor.untyped_storage().nbytes() for tensor in (*kept, *zeroed))
        for tensor in (*kept, *zeroed):
            tensor.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return gained

    def onload(self) -> None:
        """Bring everything back as it was, gradients as zeros. Without effect when nothing is away."""
        for storage, size in self._empty:
            storage.resize_(size)
            storage.fill_(0)
        for tensor, copy in self._kept:
            tensor.untyped_storage().resize_(copy.numel() * copy.element_size())
            tensor.copy_(copy, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._kept, self._empty = [], []
        if self._tiers is not None:
            self._tiers.onload()
        self._tiers = None

    def close(self) -> None:
        self._kept, self._empty, self._tiers = [], [], None
        self._memory.close()


def _storages(modules: Sequence[DistributedDataParallel], optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """One flat tensor for each storage: those whose content is kept, and those that hold gradients."""
    kept: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    for module in modules:
        for buffer in (*module.buffers, *module.expert_parallel_buffers):
            gradients.setdefault(*_whole(buffer.grad_data))
        for tensor in (*module.module.parameters(), *module.module.buffers()):
            kept.setdefault(*_whole(tensor.detach()))
    for shard in optimizer.shards:
        for tensor in (shard.main.detach(), *(shard.state[name] for name in MOMENTS)):
            kept.setdefault(*_whole(tensor))
    return [tensor for tensor in kept.values() if tensor.numel()], [t for t in gradients.values() if t.numel()]


def _whole(tensor: Tensor) -> tuple[int, Tensor]:
    """All of a tensor's storage, by its address."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
    return storage.data_ptr(), whole
