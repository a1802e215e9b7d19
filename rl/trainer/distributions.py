"""Whole distributions over the vocabulary, a few tokens at a time.

An objective over the whole vocabulary needs, of each token, the policy's and its teachers' logits, and gives a value
and the value's slope in the policy's logits. Tokens × vocabulary never exist: rows of logits are computed when they are
asked for, in the backward pass once more, from hidden states and the head.

    z = h·Wᵀ / T        v, D = f(z)        ∂h = g · (D·W) / T        ∂W = Dᵀ·(g·h) / T

The vocabulary is split over the tensor-parallel ranks; ``f`` sees all of it on each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int
from torch import Tensor

from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state

from rl.trainer.head import scored_hidden, to_tokens
from rl.trainer.model import PolicyModel
from rl.trainer.packing import Layout
from rl.trainer.products import add_product, product

RowFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(logits [rows, vocab], rows) → (values [rows], slopes [rows, vocab])``."""


def head_logits(
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "vocab_part hidden"],
    inverse_temperature: Float32[Tensor, " rows"],
    vocabulary: int,
) -> Float32[Tensor, "rows vocab"]:
    """Logits over the whole vocabulary, on every tensor-parallel rank."""
    logits = product(hidden, weight.T).mul_(inverse_temperature[:, None])
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return logits
    rows_per_rank = -(-vocabulary // group.size())  # the last rank may have fewer
    padded = torch.nn.functional.pad(logits, (0, rows_per_rank - logits.size(1)))
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts, dim=1)[:, :vocabulary]


class PolicyLogits:
    """The policy's logits of a micro-batch's tokens, divided by the temperature; row ``t`` predicts token ``t``."""

    def __init__(self, model: PolicyModel, hidden: Float[Tensor, "local 1 hidden"], layout: Layout, chunk: int) -> None:
        """
        Args:
            chunk: tokens whose logits exist at the same time.
        """
        self._model = model
        self._hidden = to_tokens(scored_hidden(model, hidden, layout), layout)
        self._inverse_temperature = to_tokens(1.0 / layout.temperature, layout)
        self._chunk = chunk

    def mapped(self, function: RowFunction, rows: Int[Tensor, " rows"]) -> Float32[Tensor, " rows"]:
        """The function's values of these tokens, with the policy's gradient."""
        weight = self._model.output_weight()
        gradient = self._model.output_gradient() if torch.is_grad_enabled() else None
        hidden = self._hidden.index_select(0, rows)
        inverse = self._inverse_temperature.index_select(0, rows)
        vocabulary = self._model.tokens
        mapped: Tensor = _Mapped.apply(hidden, weight, inverse, rows, function, self._chunk, vocabulary, gradient)
        return mapped


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "rows hidden"],
        weight: Float[Tensor, "vocab_part hidden"],
        inverse_temperature: Float32[Tensor, " rows"],
        rows: Int[Tensor, " rows"],
        function: RowFunction,
        chunk: int,
        vocabulary: int,
        gradient: Float32[Tensor, "vocab_part hidden"] | None,
    ) -> Float32[Tensor, " rows"]:
        values = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(rows), chunk):
            part = slice(begin, begin + chunk)
            logits = head_logits(hidden[part], weight, inverse_temperature[part], vocabulary)
            values[part], _ = function(logits, rows[part])
        ctx.save_for_backward(hidden, weight, inverse_temperature, rows)
        ctx.function, ctx.chunk, ctx.vocabulary, ctx.gradient = function, chunk, vocabulary, gradient
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, inverse_temperature, rows = ctx.saved_tensors
        scale = (grad * inverse_temperature)[:, None]
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        first = parallel_state.get_tensor_model_parallel_rank() * -(-ctx.vocabulary // ranks)
        # Every context-parallel rank computes all of the micro-batch here, and their gradients are summed.
        share = 1.0 / parallel_state.get_context_parallel_world_size()
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.gradient is None else ctx.gradient
        for begin in range(0, len(rows), ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            logits = head_logits(hidden[part], weight, inverse_temperature[part], ctx.vocabulary)
            _, slopes = ctx.function(logits, rows[part])
            slopes = slopes[:, first : first + len(weight)]
            torch.mul(product(slopes.to(weight.dtype), weight), scale[part], out=grad_hidden[part])
            add_product(grad_weight, slopes.T, hidden[part].float() * scale[part] * share)
        returned = grad_weight.to(weight.dtype) if ctx.gradient is None else None
        return grad_hidden, returned, *[None] * 6
