"""From the last hidden state to log-probs and entropies, without holding the logits of more than a chunk of tokens.

The vocabulary is split over the tensor-parallel ranks. With ``z = h·Wᵀ / T`` (in fp32):

    log π(y) = z_y − logsumexp(z)            H = logsumexp(z) − Σ_v π_v z_v
    ∂ log π(y) / ∂ z_v = 1[v = y] − π_v

The backward pass computes each chunk's logits again from ``h``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int
from torch import Tensor

from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from rl.trainer.model import PolicyModel
from rl.trainer.packing import Layout


class _TokenLogprobs(torch.autograd.Function):
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
        group: dist.ProcessGroup,
    ) -> tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]:
        local = targets - first
        owned = (local >= 0) & (local < len(weight))
        local = local.clamp(0, len(weight) - 1)
        normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs, entropy = torch.empty_like(normalizer), torch.empty_like(normalizer)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            logits = _logits(hidden[part], weight, inverse_temperature[part])
            largest = logits.amax(-1)
            if group.size() > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            logits -= largest[:, None]
            chosen = logits.gather(1, local[part, None]).squeeze(1) * owned[part]
            exponentials = logits.exp()
            sums = torch.stack([chosen, exponentials.sum(-1), exponentials.mul_(logits).sum(-1)])
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            chosen, total, weighted = sums
            log_total = total.log()
            normalizer[part] = largest + log_total
            logprobs[part] = chosen - log_total
            entropy[part] = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, local, owned, inverse_temperature, normalizer)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, owned, inverse_temperature, normalizer = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in fp32, because bf16 would lose the small terms.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for begin in range(0, len(hidden), ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            logits = _logits(hidden[part], weight, inverse_temperature[part])
            grad = logits.sub_(normalizer[part, None]).exp_().neg_()
            grad.scatter_add_(1, local[part, None], owned[part, None].float())
            grad.mul_((grad_logprobs[part] * inverse_temperature[part])[:, None])
            grad = grad.to(weight.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(
    hidden: Float[Tensor, "chunk hidden"],
    weight: Float[Tensor, "vocab_part hidden"],
    inverse_temperature: Float32[Tensor, " chunk"],
) -> Float32[Tensor, "chunk vocab_part"]:
    return (hidden @ weight.T).float().mul_(inverse_temperature[:, None])


class _GatherContext(torch.autograd.Function):
    """Concatenate over the context-parallel group. Every rank of it computes the same loss from the result, so that
    the gradient of a rank's part is its slice, not a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Float32[Tensor, " local"], group: dist.ProcessGroup) -> Float32[Tensor, " padded"]:
        ctx.rank, ctx.length = group.rank(), len(x)
        gathered = x.new_empty(group.size() * len(x))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rank * ctx.length : (ctx.rank + 1) * ctx.length], None


def token_logprobs(
    model: PolicyModel, hidden: Float[Tensor, "local 1 hidden"], layout: Layout, chunk: int
) -> tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]:
    """Log-probs (with gradient) and entropies (without) of a micro-batch's tokens, from the last stage's output.

    Both stand at the position of the token that they are about; a sample's first token has 0. Natural logarithms at
    the sampling temperature. Every tensor- and context-parallel rank gets the same result.

    Args:
        chunk: tokens whose logits exist at the same time.
    """
    hidden = hidden.squeeze(1)
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    weight = model.output_weight()
    group = parallel_state.get_tensor_model_parallel_group()
    first = group.rank() * (model.vocab_size // group.size())
    both = _TokenLogprobs.apply(hidden, weight, layout.targets, 1.0 / layout.temperature, first, chunk, group)
    logprobs, entropy = (_to_tokens(x, layout) for x in both)
    return logprobs, entropy


def _to_tokens(x: Float32[Tensor, " local"], layout: Layout) -> Float32[Tensor, " tokens"]:
    if layout.packing.gathered_order is not None:
        x = _GatherContext.apply(x, parallel_state.get_context_parallel_group())
        x = x.index_select(0, layout.packing.gathered_order)
    tokens = x.new_zeros(layout.tokens)
    return tokens.index_copy(0, layout.predicted, x.index_select(0, layout.predictors))
