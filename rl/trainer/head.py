"""From the last hidden state to log-probs and entropies, without holding the logits of more than a chunk of tokens.

The vocabulary is split over the tensor-parallel ranks. With ``z = h·Wᵀ / T`` (products accumulated and kept in fp32):

    log π(y) = z_y − logsumexp(z)            H = logsumexp(z) − Σ_v π_v z_v
    ∂ log π(y) / ∂ z_v = 1[v = y] − π_v

The backward pass computes each chunk's logits again from ``h``: four matrix products where the bare projection has
three. Each of the two passes reads the logits once or twice, and writes at most the gradient, in the weights' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float32, Int, Shaped
from torch import Tensor

from rl.trainer import platform
from rl.trainer.compiled import compiled, vary_rows

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from rl.trainer.model import PolicyModel
from rl.trainer.packing import Layout


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
    ) -> tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]:
        """``first`` is the token of this rank's first row of ``weight``; ``chunk`` counts tokens."""
        local = targets - first
        owned = (local >= 0) & (local < len(weight))
        local = local.clamp(0, len(weight) - 1)
        statistics = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            statistics[:, part] = _chunk_statistics(hidden[part], weight, local[part], inverse_temperature[part])
        largest, total, weighted, chosen = _combined(statistics, owned, group)
        log_total = total.log()
        logprobs = chosen - largest - log_total
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, local, owned, inverse_temperature, largest + log_total, logprobs)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, owned, inverse_temperature, normalizer, logprobs = ctx.saved_tensors
        scale = grad_logprobs * inverse_temperature
        # What the target's own logit gets; -expm1 keeps its digits where the target is nearly certain.
        at_target = (scale * -torch.expm1(logprobs)).to(weight.dtype)
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in fp32, because bf16 would lose the small terms.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for begin in range(0, len(hidden), ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            grad = _chunk_gradient(
                hidden[part], weight, inverse_temperature[part], normalizer[part], scale[part], weight.dtype
            )
            column = local[part, None]
            kept = torch.where(owned[part], at_target[part], grad.gather(1, column).squeeze(1))
            grad.scatter_(1, column, kept[:, None])
            torch.mm(grad, weight, out=grad_hidden[part])
            _add_product(grad_weight, grad.T, hidden[part])
            del grad  # or the next chunk's would stand beside it
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _chunk_statistics(
    hidden: Float[Tensor, "chunk hidden"],
    weight: Float[Tensor, "vocab_part hidden"],
    local: Int[Tensor, " chunk"],
    inverse_temperature: Float32[Tensor, " chunk"],
) -> Float32[Tensor, "4 chunk"]:
    """Largest logit, Σ exp(z − largest), Σ exp(z − largest)·(z − largest), and the target's logit."""
    logits = _product(hidden, weight.T)
    chosen = logits.gather(1, local[:, None]).squeeze(1) * inverse_temperature
    vary_rows(logits, inverse_temperature)
    return torch.stack([*_reduce_logits(logits, inverse_temperature), chosen])


@compiled
def _reduce_logits(
    logits: Float32[Tensor, "chunk vocab_part"], inverse_temperature: Float32[Tensor, " chunk"]
) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.mul(inverse_temperature[:, None])
    largest = z.amax(-1)
    z = z.sub_(largest[:, None])
    exponentials = z.exp()
    return largest, exponentials.sum(-1), exponentials.mul_(z).sum(-1)


def _combined(
    statistics: Float32[Tensor, "4 tokens"], owned: Bool[Tensor, " tokens"], group: dist.ProcessGroup | None
) -> Float32[Tensor, "4 tokens"]:
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


def _chunk_gradient(
    hidden: Float[Tensor, "chunk hidden"],
    weight: Float[Tensor, "vocab_part hidden"],
    inverse_temperature: Float32[Tensor, " chunk"],
    normalizer: Float32[Tensor, " chunk"],
    scale: Float32[Tensor, " chunk"],
    dtype: torch.dtype,
) -> Float[Tensor, "chunk vocab_part"]:
    """``−scale · π``: the gradient of the logits but for the targets' own."""
    logits = _product(hidden, weight.T)
    vary_rows(logits, inverse_temperature, normalizer, scale)
    return _scaled_probabilities(logits, inverse_temperature, normalizer, -scale, dtype)


@compiled
def _scaled_probabilities(
    logits: Float32[Tensor, "chunk vocab_part"],
    inverse_temperature: Float32[Tensor, " chunk"],
    normalizer: Float32[Tensor, " chunk"],
    scale: Float32[Tensor, " chunk"],
    dtype: torch.dtype,
) -> Float[Tensor, "chunk vocab_part"]:
    z = logits.mul(inverse_temperature[:, None]).sub_(normalizer[:, None])
    return z.exp_().mul_(scale[:, None]).to(dtype)


def _product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
    """``a @ b`` in fp32; on CUDA the product of bfloat16 matrices is never rounded to bfloat16."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def _add_product(total: Float32[Tensor, "m n"], a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> None:
    """``total += a @ b``, inside the matrix product where that can be."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


class _GatherContext(torch.autograd.Function):
    """Concatenate over the context-parallel group. Every rank of it computes the same loss from the result, so that
    the gradient of a rank's part is its slice, not a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Shaped[Tensor, "local ..."], group: dist.ProcessGroup) -> Shaped[Tensor, "padded ..."]:
        ctx.rank, ctx.length = group.rank(), len(x)
        gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rank * ctx.length : (ctx.rank + 1) * ctx.length], None


def token_logprobs(
    model: PolicyModel, hidden: Float[Tensor, "local 1 hidden"], layout: Layout, chunk: int
) -> tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]:
    """Log-probs (with gradient) and entropies (without) of a micro-batch's tokens, from the last stage's output.

    Both stand at the position of the token that they are about; a token that is not scored has 0. Natural logarithms at
    the sampling temperature. Every tensor- and context-parallel rank gets the same result.

    Args:
        chunk: tokens whose logits exist at the same time.
    """
    hidden = hidden.squeeze(1)
    if model.config.sequence_parallel:
        # Its backward pass sums over the ranks, as that of the other branch does.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    hidden = hidden.index_select(0, layout.scored)
    if not model.config.sequence_parallel:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    weight = model.output_weight()
    group = parallel_state.get_tensor_model_parallel_group()
    first = group.rank() * (model.vocab_size // group.size())
    both = TokenLogprobs.apply(hidden, weight, layout.targets, 1.0 / layout.temperature, first, chunk, group)
    logprobs, entropy = (to_tokens(x, layout) for x in both)
    return logprobs, entropy


def to_tokens(x: Shaped[Tensor, "local_scored ..."], layout: Layout) -> Shaped[Tensor, "tokens ..."]:
    """What this rank's scored positions say of the next token, moved to the tokens that it is about, of all
    context-parallel ranks; 0 for the other tokens."""
    rest = x.shape[1:]
    x = x.new_zeros(layout.local, *rest).index_copy(0, layout.scored, x)
    if layout.packing.gathered_order is not None:
        x = _GatherContext.apply(x, parallel_state.get_context_parallel_group())
        x = x.index_select(0, layout.packing.gathered_order)
    tokens = x.new_zeros(layout.tokens, *rest)
    return tokens.index_copy(0, layout.predicted, x.index_select(0, layout.predictors))
