"""Packed samples: sums over each sample, and values of a sample or rollout spread over its tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float64, Int, Shaped
from torch import Tensor


def sample_sums(x: Shaped[Tensor, " tokens"], cu_seqlens: Int[Tensor, " samples+1"]) -> Float64[Tensor, " samples"]:
    """Σ of each sample's tokens; 0 for an empty sample."""
    prefix = torch.zeros(len(x) + 1, dtype=torch.float64, device=x.device)
    torch.cumsum(x, 0, dtype=torch.float64, out=prefix[1:])
    return prefix[cu_seqlens.long()].diff()


def spread(x: Shaped[Tensor, " samples"], cu_seqlens: Int[Tensor, " samples+1"]) -> Shaped[Tensor, " tokens"]:
    """Each sample's value at each of its tokens."""
    return torch.repeat_interleave(x, cu_seqlens.diff().to(x.device))


def rollout_sums(
    x: Float64[Tensor, " samples"], rollout: Int[Tensor, " samples"], rollouts: int
) -> Float64[Tensor, " rollouts"]:
    return torch.zeros(rollouts, dtype=torch.float64, device=x.device).index_add_(0, rollout.long(), x)


def group_sums(x: Float64[Tensor, " rollouts"], group: Int[Tensor, " rollouts"]) -> Float64[Tensor, " groups"]:
    groups = int(group.max()) + 1 if len(group) else 0
    return torch.zeros(groups, dtype=torch.float64, device=x.device).index_add_(0, group.long(), x)
