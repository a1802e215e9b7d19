"""A norm for fp32 on the CPU, with a backward pass by hand: about half of the operations that autograd would record. On
CUDA a compiler fuses the plain formula. And what a layer by hand (``rl.trainer.by_hand_layer``) is made of."""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Complex64, Float32, Int64
from torch import Tensor


def applies_to(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


class Norm(torch.autograd.Function):
    """``(x, weight, eps) → x / √(mean x² + eps) · weight``

    With y the normalised input and g the incoming gradient times the weight: ∂x = (g − y · mean(g·y)) / √(…).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Float32[Tensor, "*dims hidden"], weight: Float32[Tensor, " hidden"], eps: float
    ) -> Float32[Tensor, "*dims hidden"]:
        normed, inverse = unit_rows(x, eps)
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        normed, inverse, weight = ctx.saved_tensors
        product = gradient * normed
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.view(-1, product.size(-1)).sum(0)
        if ctx.needs_input_grad[0]:
            mean = (product @ weight).div_(weight.numel()).unsqueeze(-1)
            grad_x = (gradient * weight).addcmul_(normed, mean, value=-1.0).mul_(inverse)
        return grad_x, grad_weight, None


def unit_rows(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The rows of ``x`` with a mean square of 1, and by what they were multiplied (``[…, 1]``)."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = size.square_().div_(x.size(-1)).add_(eps).rsqrt_()
    return x * inverse, inverse


def turned(
    x: Float32[Tensor, "*dims dim"], rotation: Complex64[Tensor, "*dims dim//2"], out: Tensor | None = None
) -> Float32[Tensor, "*dims dim"]:
    """Heads whose features are in the order of ``pairs``, each pair taken as a complex number and multiplied."""
    numbers = torch.mul(_complex(x), rotation, out=None if out is None else _complex(out))
    return torch.view_as_real(numbers).flatten(-2)


def _complex(x: Float32[Tensor, "*dims dim"]) -> Complex64[Tensor, "*dims dim//2"]:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


@functools.cache
def pairs(dim: int) -> tuple[Int64[Tensor, " dim"], Int64[Tensor, " dim"]]:
    """The order of a head's features that puts the two that rotate together side by side (0, dim/2, 1, dim/2 + 1, …),
    and the way back. Queries and keys in any one order have the same products."""
    order = torch.arange(dim).view(2, -1).T.flatten()
    return order, order.argsort()
