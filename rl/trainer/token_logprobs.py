"""Log-probs and entropies of given tokens, without holding the logits of more than a chunk of them.

The vocabulary is split over the tensor-parallel ranks. With ``z = h·Wᵀ / T`` (products accumulated and kept in fp32):

    log π(y) = z_y − logsumexp(z)            H = logsumexp(z) − Σ_v π_v z_v
    D = π − 1[y]                             the slope of −log π(y) in z; D_y = expm1(log π(y)), exact near certainty

With ``s`` the incoming gradient over T, a number for each token:

    ∂h = −s · (D·W)                          ∂W = −Dᵀ·(s·h)

so that D needs no pass to be scaled. It is made once, in the weights' dtype: of the last chunks (``kept_chunks``) in
the forward pass, and of those before them in the backward pass, from recomputed logits. On CUDA a pass over the logits
reads them once: one for the statistics, one to make D.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from rl.trainer.compiled import compiled, vary_rows
from rl.trainer.products import add_product, product

BLOCK = 1024
"""Logits that a thread block holds in registers while it reduces them."""
LEAST_BLOCK = 32


class TokenLogprobs(torch.autograd.Function):
    """``(hidden, weight, targets, 1/T) → (log π(target), entropy)``; the entropy has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "tokens hidden"],
        weight: Float[Tensor, "vocab_part hidden"],
        targets: Int[Tensor, " tokens"],
        inverse_temperature: Float32[Tensor, " tokens"],
        first: int,
        chunk: int,
        group: dist.ProcessGroup | None,
        gradient: Float32[Tensor, "vocab_part hidden"] | None = None,
    ) -> tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]:
        """
        Args:
            first: the token of this rank's first row of ``weight``.
            chunk: counts tokens.
            gradient: the backward pass adds the gradient of ``weight`` to it, in place of returning it.
        """
        local = targets - first
        owned = (local >= 0) & (local < len(weight))
        local = local.clamp(0, len(weight) - 1)
        normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs, entropy = torch.empty_like(normalizer), torch.empty_like(normalizer)
        parts = [slice(begin, begin + chunk) for begin in range(0, len(hidden), chunk)]
        kept = kept_chunks(weight.dtype) if any(ctx.needs_input_grad[:2]) else 0
        whole = not hidden.is_cuda and (group is None or group.size() == 1)
        ctx.slopes = {}
        for index, part in enumerate(parts):
            keep, slopes = index >= len(parts) - kept, None
            if whole:
                normalizer[part], logprobs[part], entropy[part], slopes = _whole_rows(
                    product(hidden[part], weight.T), local[part], inverse_temperature[part], weight.dtype
                )
            else:
                logits = product(hidden[part], weight.T)
                statistics = _statistics(logits, local[part], inverse_temperature[part])
                largest, total, weighted, chosen = _combined(statistics, owned[part], group)
                log_total = total.log()
                normalizer[part] = largest + log_total
                logprobs[part] = chosen - largest - log_total
                entropy[part] = log_total - weighted / total
                if keep:
                    slopes = _slopes(
                        logits,
                        weight.dtype,
                        inverse_temperature[part],
                        normalizer[part],
                        logprobs[part],
                        local[part],
                        owned[part],
                    )
                del logits  # or the next chunk's would stand beside them
            if keep:
                ctx.slopes[index] = slopes
            del slopes
        ctx.save_for_backward(hidden, weight, local, owned, inverse_temperature, normalizer, logprobs)
        ctx.parts, ctx.gradient = parts, gradient
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, owned, inverse_temperature, normalizer, logprobs = ctx.saved_tensors
        scale = -(grad_logprobs * inverse_temperature)[:, None]
        scaled_hidden = (hidden * scale).to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = ctx.gradient
        for index, part in reversed(list(enumerate(ctx.parts))):
            slopes = ctx.slopes.pop(index, None)
            if slopes is None:
                slopes = _slopes(
                    product(hidden[part], weight.T),
                    weight.dtype,
                    inverse_temperature[part],
                    normalizer[part],
                    logprobs[part],
                    local[part],
                    owned[part],
                )
            torch.mul(product(slopes, weight), scale[part], out=grad_hidden[part])
            # Summed over chunks in fp32, because bf16 would lose the small terms.
            if grad_weight is None:
                grad_weight = product(slopes.T, scaled_hidden[part])
            else:
                add_product(grad_weight, slopes.T, scaled_hidden[part])
            del slopes
        if ctx.gradient is not None:
            return grad_hidden, *[None] * 7
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight.to(weight.dtype), *[None] * 6


def kept_chunks(dtype: torch.dtype) -> int:
    """How many chunks' slopes take no more memory than one chunk's fp32 logits and slopes."""
    return (4 + dtype.itemsize) // dtype.itemsize


def _whole_rows(
    logits: Float32[Tensor, "chunk vocab"],
    targets: Int[Tensor, " chunk"],
    inverse_temperature: Float32[Tensor, " chunk"],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Float[Tensor, "chunk vocab"]]:
    """Normalizer, log-prob and entropy of each row, and D, where one rank on the CPU has the whole vocabulary: the
    probabilities are computed once for the entropy and for D. No more than two of its tensors exist at a time, so that
    the caller may not hold the logits."""
    column = targets[:, None]
    z = logits.mul_(inverse_temperature[:, None])
    chosen = z.gather(1, column)
    all_logprobs = z.log_softmax(1)
    del logits, z
    logprobs = all_logprobs.gather(1, column)
    slopes = all_logprobs.exp()
    entropy = all_logprobs.mul_(slopes).sum(1).neg_()
    del all_logprobs
    slopes = slopes.scatter_(1, column, torch.expm1(logprobs)).to(dtype)
    return (chosen - logprobs).squeeze(1), logprobs.squeeze(1), entropy, slopes


def _statistics(
    logits: Float32[Tensor, "chunk vocab_part"],
    local: Int[Tensor, " chunk"],
    inverse_temperature: Float32[Tensor, " chunk"],
) -> Float32[Tensor, "4 chunk"]:
    """Largest logit, Σ exp(z − largest), Σ exp(z − largest)·(z − largest), and the target's logit."""
    chosen = logits.gather(1, local[:, None]).squeeze(1) * inverse_temperature
    block = math.gcd(logits.size(1), BLOCK)
    if not logits.is_cuda or block < LEAST_BLOCK:
        block = logits.size(1)
    blocks = logits.view(len(logits), -1, block)
    vary_rows(blocks, inverse_temperature)
    return torch.stack([*_reduce_blocks(blocks, inverse_temperature), chosen])


@compiled
def _reduce_blocks(
    logits: Float32[Tensor, "chunk blocks block"], inverse_temperature: Float32[Tensor, " chunk"]
) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.mul(inverse_temperature[:, None, None])
    largest = z.amax(-1)
    z = z.sub_(largest[:, :, None])
    exponentials = z.exp()
    total, weighted = exponentials.sum(-1), exponentials.mul_(z).sum(-1)
    return _merge(largest, total, weighted)


def _merge(largest: Tensor, total: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics ``[chunk]`` of rows from those of their parts ``[chunk, parts]``."""
    top = largest.amax(-1)
    shift = largest - top[:, None]
    share = shift.exp()
    return top, (total * share).sum(-1), ((weighted + total * shift) * share).sum(-1)


def _combined(
    statistics: Float32[Tensor, "4 chunk"], owned: Bool[Tensor, " chunk"], group: dist.ProcessGroup | None
) -> Float32[Tensor, "4 chunk"]:
    """The statistics of the whole vocabulary from those of each rank's part."""
    if group is None or group.size() == 1:
        return statistics
    mine, total, weighted, chosen = statistics
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shift = mine - largest
    share = shift.exp()
    sums = torch.stack([total * share, (weighted + total * shift) * share, chosen * owned])
    dist.all_reduce(sums, group=group)
    return torch.stack([largest, *sums])


def _slopes(
    logits: Float32[Tensor, "chunk vocab_part"],
    dtype: torch.dtype,
    inverse_temperature: Float32[Tensor, " chunk"],
    normalizer: Float32[Tensor, " chunk"],
    logprobs: Float32[Tensor, " chunk"],
    local: Int[Tensor, " chunk"],
    owned: Bool[Tensor, " chunk"],
) -> Float[Tensor, "chunk vocab_part"]:
    """D of this rank's part of the vocabulary."""
    vary_rows(logits, inverse_temperature, normalizer)
    slopes = _probabilities(logits, inverse_temperature, normalizer, dtype)
    column = local[:, None]
    at_target = torch.where(owned, torch.expm1(logprobs).to(dtype), slopes.gather(1, column).squeeze(1))
    return slopes.scatter_(1, column, at_target[:, None])


@compiled
def _probabilities(
    logits: Float32[Tensor, "chunk vocab_part"],
    inverse_temperature: Float32[Tensor, " chunk"],
    normalizer: Float32[Tensor, " chunk"],
    dtype: torch.dtype,
) -> Float[Tensor, "chunk vocab_part"]:
    z = logits.mul(inverse_temperature[:, None]).sub_(normalizer[:, None])
    return z.exp_().to(dtype)
