"""One block of host memory for the copies of a rank's tensors: pinned where there is CUDA, plain otherwise.

One block, because pinning is slow and PyTorch's allocator of pinned memory rounds each tensor up to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 256


class HostMemory:
    """Grows to what its largest use needs, and is kept until ``close``: pinning a gigabyte takes most of a second."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies of these in the block; what an earlier call returned is overwritten."""
        places = self.places(tensors)
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return places

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Room in the block for one tensor like each of these, uninitialised."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        spans = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if sum(spans) > self._block.numel():
            self.close()
            self._block = torch.empty(sum(spans), dtype=torch.uint8)
            _register(self._block)
        views, begin = [], 0
        for tensor, size, span in zip(tensors, sizes, spans, strict=True):
            views.append(self._block[begin : begin + size].view(tensor.dtype).view(tensor.shape))
            begin += span
        return views

    def close(self) -> None:
        """Give the memory back; copies that are still referenced become invalid on CUDA."""
        if self._block.numel():
            _unregister(self._block)
        self._block = torch.empty(0, dtype=torch.uint8)


def _register(block: Tensor) -> None:
    if torch.cuda.is_available():
        status = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)
        if int(status) != 0:
            raise MemoryError(f"cannot pin {block.numel()} bytes of host memory: CUDA error {int(status)}")


def _unregister(block: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
