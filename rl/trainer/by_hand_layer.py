"""The two halves of a dense layer for fp32 on the CPU, around its attention, with backward passes by hand.

    n = x / √(mean x² + ε)          W(n · w) = (W · w) n

A norm's weights ``w`` go into the rows of the product that follows it, and their gradient comes out of that product's:
with G = ∂(W · w), the slopes times n, ∂W = G · w and ∂w = Σ_rows G · W. So norms need no pass of their own over the
tokens for them, and where the model has gradient buffers the products are added to those directly, in place of being
returned to autograd, Megatron's hook and an addition for each parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float32
from torch import Tensor

from rl.trainer.by_hand import turned, unit_rows

Matrix = Float32[Tensor, "tokens features"]


class BeforeAttention(torch.autograd.Function):
    """``(x, norm, qkv, query norm, key norm, cos, sin, …) → queries, keys, values``: norm, product, norms of the heads
    (if there are any) and rotation. The rows of ``qkv`` are, for each group, its queries, its key and its value."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float32[Tensor, "tokens 1 hidden"],
        norm: Float32[Tensor, " hidden"],
        qkv: Float32[Tensor, "rows hidden"],
        query_norm: Float32[Tensor, " dim"] | None,
        key_norm: Float32[Tensor, " dim"] | None,
        cos: Float32[Tensor, "tokens dim"],
        sin: Float32[Tensor, "tokens dim"],
        groups: int,
        eps: float,
        buffers: tuple[Tensor | None, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Args:
            buffers: of the four parameters.
        """
        tokens, dim = x.size(0), cos.size(-1)
        unit, inverse = unit_rows(x.view(tokens, -1), eps)
        scaled = qkv * norm
        mixed = (unit @ scaled.T).view(tokens, groups, -1, dim)
        heads, head_inverse, scales = mixed[:, :, :-1], None, None
        if query_norm is not None and key_norm is not None:
            scales = torch.cat([query_norm.expand(heads.size(2) - 1, dim), key_norm[None]])
            heads, head_inverse = unit_rows(heads, eps)
        rotated = turned(heads if scales is None else heads * scales, cos[:, None, None], sin[:, None, None], 1.0)
        kept = (None, None, None) if scales is None else (heads, head_inverse, scales)
        ctx.save_for_backward(unit, inverse, scaled, norm, qkv, cos, sin, *kept)
        ctx.groups, ctx.buffers = groups, buffers
        query = rotated[:, :, :-1].reshape(tokens, -1, dim)
        return query, rotated[:, :, -1].contiguous(), mixed[:, :, -1].contiguous()

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, scaled, norm, qkv, cos, sin, heads, head_inverse, scales = ctx.saved_tensors
        tokens, dim = cos.shape
        grad_query = grad_query.view(tokens, ctx.groups, -1, dim)
        flowing = torch.cat([grad_query, grad_key[:, :, None]], 2)
        flowing = turned(flowing, cos[:, None, None], sin[:, None, None], -1.0)
        grad_mixed = flowing.new_empty(tokens, ctx.groups, grad_query.size(2) + 2, dim)
        grad_mixed[:, :, -1] = grad_value
        grad_query_norm = grad_key_norm = None
        if scales is None:
            grad_mixed[:, :, :-1] = flowing
        else:
            product = flowing * heads
            by_slot = product.sum((0, 1))
            grad_query_norm = _added(ctx.buffers[2], by_slot[:-1].sum(0))
            grad_key_norm = _added(ctx.buffers[3], by_slot[-1])
            along = product.mul_(scales).sum(-1, keepdim=True)
            flowing.mul_(scales).addcmul_(heads, along, value=-1.0 / dim)
            torch.mul(flowing, head_inverse, out=grad_mixed[:, :, :-1])
        slopes = grad_mixed.view(tokens, -1)
        grad_norm, grad_qkv = _norm_and_product(slopes, unit, norm, qkv, *ctx.buffers[:2])
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _flattened(slopes @ scaled, unit).mul_(inverse)[:, None]
        return grad_x, grad_norm, grad_qkv, grad_query_norm, grad_key_norm, *[None] * 5


class AfterAttention(torch.autograd.Function):
    """``(x, attended, projection, norm, first, second, …) → y + swiglu(norm(y) · first) · second`` with
    ``y = x + attended · projection``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float32[Tensor, "tokens 1 hidden"],
        attended: Float32[Tensor, "tokens 1 width"],
        projection: Float32[Tensor, "hidden width"],
        norm: Float32[Tensor, " hidden"],
        first: Float32[Tensor, "2*ffn hidden"],
        second: Float32[Tensor, "hidden ffn"],
        eps: float,
        buffers: tuple[Tensor | None, ...],
    ) -> Float32[Tensor, "tokens 1 hidden"]:
        """
        Args:
            buffers: of the four parameters.
        """
        attended = attended.view(attended.size(0), -1)
        y = torch.addmm(x.view(x.size(0), -1), attended, projection.T)
        unit, inverse = unit_rows(y, eps)
        scaled = first * norm
        opened = unit @ scaled.T
        gate, up = opened.chunk(2, 1)
        active = F.silu(gate)
        ctx.save_for_backward(attended, unit, inverse, scaled, opened, active, projection, norm, first, second)
        ctx.buffers = buffers
        return torch.addmm(y, active * up, second.T).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        attended, unit, inverse, scaled, opened, active, projection, norm, first, second = ctx.saved_tensors
        shape, gradient = gradient.shape, gradient.reshape(len(unit), -1)
        gate, up = opened.chunk(2, 1)
        grad_second = _product(ctx.buffers[3], gradient, active * up)
        flowing = gradient @ second
        slopes = torch.empty_like(opened)
        of_gate, of_up = slopes.chunk(2, 1)
        torch.mul(flowing, active, out=of_up)
        torch.ops.aten.silu_backward.grad_input(flowing.mul_(up), gate, grad_input=of_gate)
        grad_norm, grad_first = _norm_and_product(slopes, unit, norm, first, *ctx.buffers[1:3])
        grad_y = torch.addcmul(gradient, _flattened(slopes @ scaled, unit), inverse)
        grad_projection = _product(ctx.buffers[0], grad_y, attended)
        grad_attended = (grad_y @ projection)[:, None]
        return grad_y.view(shape), grad_attended, grad_projection, grad_norm, grad_first, grad_second, None, None


def _flattened(gradient: Matrix, unit: Matrix) -> Matrix:
    """The part of the gradient across its row's direction, in place: along it, ``unit_rows`` changes nothing."""
    along = (gradient * unit).sum(-1, keepdim=True)
    return gradient.addcmul_(unit, along, value=-1.0 / unit.size(-1))


def _norm_and_product(
    slopes: Matrix, unit: Matrix, norm: Tensor, weight: Tensor, norm_buffer: Tensor | None, buffer: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a norm's weights and of the product's that follows it."""
    both = slopes.T @ unit
    grad_norm = _added(norm_buffer, (both * weight).sum(0))
    if buffer is None:
        return grad_norm, both.mul_(norm)
    buffer.addcmul_(both, norm)
    return grad_norm, None


def _product(buffer: Tensor | None, slopes: Matrix, inputs: Matrix) -> Tensor | None:
    if buffer is None:
        return slopes.T @ inputs
    buffer.addmm_(slopes.T, inputs)
    return None


def _added(buffer: Tensor | None, found: Tensor) -> Tensor | None:
    if buffer is None:
        return found
    buffer.add_(found)
    return None
