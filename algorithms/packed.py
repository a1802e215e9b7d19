"""Packed tensors: cache-sized chunks of their tokens, sums over each sample, and a sample's value at its tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int, Int64, Shaped
from torch import Tensor

CPU_CHUNK = 1 << 17
"""Tokens worked on at a time: a dozen fp32 arrays of this length stay in a core's cache."""
ACCELERATOR_CHUNK = 1 << 22
BLOCK = 64


def chunks(tokens: int, device: torch.device) -> Iterator[slice]:
    step = CPU_CHUNK if device.type == "cpu" else ACCELERATOR_CHUNK
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def empty_like(x: Tensor) -> Tensor:
    """Uninitialised. For arrays of the batch's length: NumPy asks for huge pages, and filling small ones for the first
    time costs more than all that is computed here."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.empty(x.shape, dtype=x.numpy(force=True).dtype))
    return torch.empty_like(x)


def sample_sums(x: Shaped[Tensor, " tokens"], cu_seqlens: Int[Tensor, " samples+1"]) -> Float64[Tensor, " samples"]:
    """Σ of each sample's tokens; 0 for an empty sample.

    One pass: sums of blocks, their running total in float64, and at each sample's edges the part of a block before it.
    """
    edge = cu_seqlens.to(x.device, torch.int64)
    block_sums = x[: len(x) // BLOCK * BLOCK].view(-1, BLOCK).sum(1)  # of whole blocks only, in the tokens' own type
    before_block = torch.cat([torch.zeros(1, device=x.device), block_sums]).cumsum(0, dtype=torch.float64)
    inside = (edge // BLOCK * BLOCK)[:, None] + torch.arange(BLOCK, device=x.device)
    within = x[inside.clamp(max=max(len(x) - 1, 0))] if len(x) else x.new_zeros(inside.shape)
    return (before_block[edge // BLOCK] + (within * (inside < edge[:, None])).sum(1, dtype=torch.float64)).diff()


def indicator(x: Float32[Tensor, " n"]) -> Float32[Tensor, " n"]:
    """1.0 where x is not 0, else 0.0: to multiply by it is several times faster than to select by a bool."""
    return torch.ne(x, 0, out=torch.empty_like(x))


def to_tokens(x: Shaped[Tensor, " samples"], cu_seqlens: Int[Tensor, " samples+1"]) -> Shaped[Tensor, " tokens"]:
    """Each sample's value at each of its tokens."""
    lengths = cu_seqlens.diff()
    if x.device.type == "cpu":  # ten times faster than torch.repeat_interleave, which makes an index first
        return torch.from_numpy(np.repeat(x.numpy(), lengths.numpy()))
    return torch.repeat_interleave(x, lengths.to(x.device))


def nonzero(mask: Bool[Tensor, " tokens"]) -> Int64[Tensor, " chosen"]:
    if mask.device.type == "cpu":  # four times faster than torch's
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().flatten()
