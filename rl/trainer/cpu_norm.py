"""A norm for fp32 on the CPU, with a backward pass by hand: about half of the operations that autograd would record. On
CUDA a compiler fuses the plain formula."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor


def fp32_on_cpu(x: Tensor) -> bool:
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
