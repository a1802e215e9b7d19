"""From the last hidden state to what is said of each token: the places that are scored, and where the results go."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Shaped
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
from rl.trainer.token_logprobs import TokenLogprobs


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
    hidden = scored_hidden(model, hidden, layout)
    weight = model.output_weight()
    group = parallel_state.get_tensor_model_parallel_group()
    first = group.rank() * (model.vocab_size // group.size())
    gradient = model.output_gradient() if torch.is_grad_enabled() else None
    if gradient is not None:
        weight = weight.detach()
    both = TokenLogprobs.apply(hidden, weight, layout.targets, 1.0 / layout.temperature, first, chunk, group, gradient)
    logprobs, entropy = (to_tokens(x, layout) for x in both)
    return logprobs, entropy


def scored_hidden(
    model: PolicyModel, hidden: Float[Tensor, "local 1 hidden"], layout: Layout
) -> Float[Tensor, "local_scored hidden"]:
    """The hidden states that predict this rank's scored tokens. Its backward pass sums over the tensor-parallel ranks,
    each of which has the slopes of its own part of the vocabulary."""
    hidden = hidden.squeeze(1)
    if model.config.sequence_parallel:
        # Its backward pass sums over the ranks, as that of the other branch does.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    hidden = layout.read(hidden)
    alone = model.config.tensor_model_parallel_size == 1
    return hidden if alone or model.config.sequence_parallel else copy_to_tensor_model_parallel_region(hidden)


def to_tokens(x: Shaped[Tensor, "local_scored ..."], layout: Layout) -> Shaped[Tensor, "tokens ..."]:
    """What this rank's scored positions say of the next token, moved to the tokens that it is about, of all
    context-parallel ranks; 0 for the other tokens."""
    rest = x.shape[1:]
    if layout.packing.gathered_order is not None:  # a rank alone has them in the order of the tokens already
        x = x.new_zeros(layout.local, *rest).index_copy(0, layout.scored, x)
        x = _GatherContext.apply(x, parallel_state.get_context_parallel_group())
        x = x.index_select(0, layout.packing.gathered_order).index_select(0, layout.predictors)
    return x.new_zeros(layout.tokens, *rest).index_copy(0, layout.predicted, x)
