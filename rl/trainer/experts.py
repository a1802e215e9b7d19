"""The experts of a rank, all in a few products over groups of tokens, where the device has such a product.

    h = x · W1_eᵀ        a = silu(gate) · up · p        y = a · W2_eᵀ        for the tokens of each expert e

Tokens come sorted by expert. The parameters stay Megatron's, one a matrix of each expert: they are put side by side
for a product, and again for its backward pass, in place of being kept twice.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int32
from torch import Tensor

from rl.trainer import platform
from rl.trainer.compiled import compiled, vary_rows

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.transformer.moe.experts import SequentialMLP

ALIGNMENT = 16
"""Bytes that the rows of a grouped product's matrices must be a multiple of."""


class Experts(SequentialMLP):
    """Gated, without biases. On the CPU, in fp32, under expert tensor parallelism and without tokens Megatron's loop
    runs."""

    def forward(
        self,
        permuted_local_hidden_states: Float[Tensor, "tokens hidden"],
        tokens_per_expert: Int[Tensor, " experts"],
        permuted_probs: Float[Tensor, " tokens"],
    ) -> tuple[Float[Tensor, "tokens hidden"], None]:
        x = permuted_local_hidden_states
        if self._can_group(x):
            return self.grouped(x, tokens_per_expert.tolist(), permuted_probs), None
        return super().forward(x, tokens_per_expert, permuted_probs)

    def _can_group(self, x: Tensor) -> bool:
        widths = (self.config.hidden_size, self.config.moe_ffn_hidden_size)
        aligned = all(width * x.element_size() % ALIGNMENT == 0 for width in widths)
        return len(x) > 0 and x.is_cuda and x.dtype == torch.bfloat16 and aligned and self.tp_group.size() == 1

    def grouped(self, x: Float[Tensor, "tokens hidden"], counts: list[int], probs: Tensor) -> Tensor:
        """What the loop computes; ``counts`` says how many tokens each expert has."""
        first, second = (
            [getattr(expert, name).weight for expert in self.local_experts] for name in ("linear_fc1", "linear_fc2")
        )
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32).to(x.device, non_blocking=True)
        mixed = GroupedLinear.apply(x, ends, counts, *first)
        vary_rows(mixed, probs)
        return GroupedLinear.apply(_activated(mixed, probs), ends, counts, *second)


@compiled
def _activated(mixed: Float[Tensor, "tokens 2*ffn"], probs: Float[Tensor, " tokens"]) -> Float[Tensor, "tokens ffn"]:
    gate, up = mixed.chunk(2, dim=-1)
    return (F.silu(gate) * up * probs[:, None]).to(mixed.dtype)


class GroupedLinear(torch.autograd.Function):
    """``x · W_eᵀ`` for the tokens of each expert, which are the rows of ``x`` up to ``ends[e]``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "tokens features"],
        ends: Int32[Tensor, " experts"],
        counts: list[int],
        *weights: Float[Tensor, "outputs features"],
    ) -> Float[Tensor, "tokens outputs"]:
        ctx.save_for_backward(x, ends, *weights)
        ctx.counts = counts
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        grad_x = F.grouped_mm(gradient, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[3:]):
            return grad_x, None, None, *[None] * len(weights)
        grad_weights = F.grouped_mm(gradient.T, x, offs=ends)
        for grad_weight, count in zip(grad_weights, ctx.counts, strict=True):
            if not count:  # a group of no terms is not said to be zero
                grad_weight.zero_()
        return grad_x, None, None, *grad_weights.unbind()
