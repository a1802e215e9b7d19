"""What the indexer of sparse attention learns from: the attention that it stands for. Pure functions.

    p_t  = Σ_h a_th / heads                    attention over positions, summed over heads, L1-normalised
    p̄_t  = mean of p_t over the layers that share the indexer
    L    = Σ_t KL(p̄_t ‖ softmax(I_t))

Dense phase (warm-up): both distributions run over all positions up to t. Sparse phase: over the selected ones. The
gradient of KL(p̄ ‖ ·) is the mean of the single layers' gradients; its value is smaller by what p̄ has more entropy than
they have on average.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor


@torch.no_grad()
def summed_attention(
    query: Float[Tensor, "rows heads queries dim"],
    key: Float[Tensor, "rows heads keys dim"],
    mask: Bool[Tensor, "rows_or_1 queries keys"],
    scale: float,
) -> Float32[Tensor, "rows queries keys"]:
    """Σ_h softmax(q_h · k_h · scale) over the positions where ``mask`` is True (at least one for each query)."""
    total = torch.zeros(query.size(0), query.size(2), key.size(2), device=query.device)
    for head in range(query.size(1)):  # one at a time: all heads' would be many times the size of the result
        products = query[:, head].float() @ key[:, head].float().transpose(-1, -2) * scale
        total += products.masked_fill_(~mask, -torch.inf).softmax(-1)
    return total


def indexer_kl(
    target: Float32[Tensor, "rows queries keys"],
    scores: Float32[Tensor, "rows queries keys"],
    mask: Bool[Tensor, "rows_or_1 queries keys"],
) -> Float32[Tensor, "rows queries"]:
    """KL(target ‖ softmax(scores)) of each query, in nats, over the positions where ``mask`` is True.

    Args:
        target: not negative; normalised here over those positions.
        scores: carries the gradient.
    """
    target = target.masked_fill(~mask, 0.0).detach()
    target = target / target.sum(-1, keepdim=True)
    logprobs = scores.masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)
    return (torch.xlogy(target, target) - target * logprobs).sum(-1)
