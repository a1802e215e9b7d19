"""Packed tensors: cache-sized chunks of their tokens, sums over each sample, and a sample's value at its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int, Int64, Shaped
from torch import Tensor
from torch.nn.functional import pad

CPU_CHUNK = 1 << 16
"""Tokens worked on at a time: a dozen fp32 arrays of this length stay in a core's cache."""
ACCELERATOR_CHUNK = 1 << 22
BLOCK = 64


def chunks(tokens: int, device: torch.device) -> Iterator[slice]:
    step = CPU_CHUNK if device.type == "cpu" else ACCELERATOR_CHUNK
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def sample_sums(x: Shaped[Tensor, " tokens"], cu_seqlens: Int[Tensor, " samples+1"]) -> Float64[Tensor, " samples"]:
    """Σ of each sample's tokens; 0 for an empty sample."""
    return sums_of_chunks(lambda where: x[where], len(x), cu_seqlens.to(x.device))


def sums_of_chunks(
    chunk: Callable[[slice], Shaped[Tensor, " chunk"]], tokens: int, cu_seqlens: Int[Tensor, " samples+1"]
) -> Float64[Tensor, " samples"]:
    """Σ of each sample's tokens, which ``chunk`` gives a slice at a time.

    Sums of blocks in the tokens' own type, their running total in float64, and at each sample's edges the part of a
    block that lies before it.
    """
    edges, device = cu_seqlens.long(), cu_seqlens.device
    before = torch.zeros(len(edges), dtype=torch.float64, device=device)
    blocks = [torch.zeros(1, dtype=torch.float64, device=device)]
    for where in chunks(tokens, device):
        x = chunk(where)
        if x.dtype == torch.bool:
            x = x.view(torch.uint8)  # a block's count fits a byte; summing bool as such is ten times slower
        here = ((edges >= where.start) & (edges < where.stop)).nonzero().flatten()
        edge = edges[here, None] - where.start
        inside = edge // BLOCK * BLOCK + torch.arange(BLOCK, device=device)
        before[here] = (x[inside.clamp(max=len(x) - 1)] * (inside < edge)).sum(1, dtype=torch.float64)
        x = x if len(x) % BLOCK == 0 else pad(x, (0, -len(x) % BLOCK))
        blocks.append(x.view(-1, BLOCK).sum(1, dtype=x.dtype).double())
    total = torch.cat(blocks).cumsum(0)
    # The last edge, the number of tokens, lies in no chunk: all of the last block comes before it.
    return (total[torch.where(edges == tokens, len(total) - 1, edges // BLOCK)] + before).diff()


def indicator(x: Float32[Tensor, " n"]) -> Float32[Tensor, " n"]:
    """1.0 where x is not 0, else 0.0: to multiply by it is several times faster than to select by a bool."""
    return torch.ne(x, 0, out=torch.empty_like(x))


def spread(x: Shaped[Tensor, " samples"], cu_seqlens: Int[Tensor, " samples+1"]) -> Shaped[Tensor, " tokens"]:
    """Each sample's value at each of its tokens."""
    lengths = cu_seqlens.diff()
    if x.device.type == "cpu":  # ten times faster than torch.repeat_interleave, which makes an index first
        return torch.from_numpy(np.repeat(x.numpy(), lengths.numpy()))
    return torch.repeat_interleave(x, lengths.to(x.device))


def nonzero(mask: Bool[Tensor, " tokens"]) -> Int64[Tensor, " chosen"]:
    if mask.device.type == "cpu":  # four times faster than torch's
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().flatten()


def rollout_sums(
    x: Float64[Tensor, " samples"], rollout: Int[Tensor, " samples"], rollouts: int
) -> Float64[Tensor, " rollouts"]:
    return torch.zeros(rollouts, dtype=torch.float64, device=x.device).index_add_(0, rollout.long(), x)


def group_sums(x: Float64[Tensor, " rollouts"], group: Int[Tensor, " rollouts"]) -> Float64[Tensor, " groups"]:
    groups = int(group.max()) + 1 if len(group) else 0
    return torch.zeros(groups, dtype=torch.float64, device=x.device).index_add_(0, group.long(), x)
