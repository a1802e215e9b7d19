"""A dense layer for fp32 on the CPU, with its backward pass by hand.

    n = x / √(mean x² + ε)          W(n · w) = (W · w) n

A norm's weights ``w`` go into the rows of the product that follows it, and their gradient comes out of that product's:
with G = ∂(W · w), the slopes times n, ∂W = G · w and ∂w = Σ_rows G · W. So norms need no pass of their own over the
tokens for them. The parameters' gradients are added to the model's buffers directly: for autograd the parameters are
constants, so that neither it nor Megatron's hooks come to each of them. What the backward pass has read for the last
time it overwrites, while that is still in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex64, Float32, Int, Int64
from torch import Tensor

from rl.trainer.cpu_norm import unit_rows
from rl.trainer.layer_passes import Weights
from rl.trainer.packing import Packing

Matrix = Float32[Tensor, "tokens features"]
Heads = Float32[Tensor, "tokens heads dim"]
Rotation = Complex64[Tensor, "tokens dim//2"]


ATTENTION_KEEPS = 5
"""Tensors of a bucket: queries, keys, values, output and normalizers."""


class Shape(NamedTuple):
    groups: int
    """Of query heads."""
    eps: float
    """Of the norms."""
    scale: float | None
    """Of attention."""


class Layer(torch.autograd.Function):
    """``x → x'`` after one layer, at all tokens or at those that are read."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float32[Tensor, "tokens 1 hidden"],
        rotation: Rotation,
        weights: Weights,
        buffers: Weights,
        shape: Shape,
        packing: Packing,
        read: Int[Tensor, " read"] | None,
    ) -> Float32[Tensor, "read 1 hidden"]:
        """
        Args:
            weights: without gradient.
            buffers: of their gradients.
            packing: its buckets are what attends.
            read: the tokens whose output is wanted; None for all.
        """
        x = x.view(x.size(0), -1)
        heads, before = _before(x, weights, rotation, shape)
        attended, attention = attend(*heads, packing, shape.scale)
        attended = attended.view(len(x), -1)
        if read is not None:
            x, attended = x.index_select(0, read), attended.index_select(0, read)
        result, after = _after(x, attended, weights, shape.eps)
        ctx.save_for_backward(*before, *after, *chain(*attention))
        ctx.constants = weights, buffers, shape, packing, read
        return result[:, None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        before, after = _Before(*islice(saved, len(_Before._fields))), _After(*islice(saved, len(_After._fields)))
        weights, buffers, shape, packing, read = ctx.constants
        attention = [tuple(islice(saved, ATTENTION_KEEPS)) for _ in packing.buckets]
        tokens = len(before.unit)
        grad_x, grad_attended = _after_backward(gradient.squeeze(1), after, weights, buffers)
        if read is not None:
            grad_x, grad_attended = (
                g.new_zeros(tokens, g.size(1)).index_copy_(0, read, g) for g in (grad_x, grad_attended)
            )
        grad_heads = attend_backward(
            grad_attended.view(tokens, -1, 2 * before.rotation.size(-1)), attention, packing, shape.scale
        )
        grad_x = _before_backward(grad_x, grad_heads, before, weights, buffers, shape.groups)
        return grad_x[:, None], *[None] * 6


class _Before(NamedTuple):
    """What the backward pass needs of the part before attention."""

    unit: Matrix
    inverse: Matrix
    scaled: Tensor
    rotation: Complex64[Tensor, "tokens 1 1 dim//2"]
    normed: Tensor | None
    """Normalised queries and keys, if they are."""
    head_inverse: Tensor | None
    """By what they were multiplied for that."""
    scales: Tensor | None
    """The norms' weights for each of them."""


def _before(
    x: Matrix, weights: Weights, rotation: Rotation, shape: Shape
) -> tuple[tuple[Heads, Heads, Heads], _Before]:
    """Queries and keys, whose features are in the order of ``_pairs``, and values: norm, product, norms of the heads
    (if there are any) and rotation."""
    tokens, dim = len(x), 2 * rotation.size(1)
    rotation = rotation[:, None, None]
    unit, inverse = unit_rows(x, shape.eps)
    scaled = (weights.qkv * weights.norm).index_select(0, _row_order(shape.groups, len(weights.qkv), dim)[0])
    mixed = (unit @ scaled.T).view(tokens, shape.groups, -1, dim)
    turning, normed, head_inverse, scales = mixed[:, :, :-1], None, None, None
    if weights.query_norm is not None and weights.key_norm is not None:
        scales = torch.stack([weights.query_norm] * (turning.size(2) - 1) + [weights.key_norm])
        scales = scales.index_select(1, _pairs(dim)[0])
        normed, head_inverse = unit_rows(turning, shape.eps)
        turning = normed * scales
    query, key = (_turned(heads, rotation).flatten(1, 2) for heads in (turning[:, :, :-1], turning[:, :, -1:]))
    return (query, key, mixed[:, :, -1].contiguous()), _Before(
        unit, inverse, scaled, rotation, normed, head_inverse, scales
    )


def _before_backward(
    grad_x: Matrix, grad_heads: Sequence[Heads], kept: _Before, weights: Weights, buffers: Weights, groups: int
) -> Matrix:
    """The gradient of the layer's input; ``grad_x`` is its part that does not go through attention, and is changed."""
    query, key, value = (g.view(len(g), groups, -1, g.size(2)) for g in grad_heads)
    tokens, _, heads, dim = query.shape
    flowing, slopes = (query.new_empty(tokens, groups, slots, dim) for slots in (heads + 1, heads + 2))
    _turned(query, kept.rotation.conj(), out=flowing[:, :, :-1])
    _turned(key, kept.rotation.conj(), out=flowing[:, :, -1:])
    slopes[:, :, -1:] = value
    normed, head_inverse, scales = kept.normed, kept.head_inverse, kept.scales
    of_query, of_key = buffers.query_norm, buffers.key_norm
    if normed is None or head_inverse is None or scales is None or of_query is None or of_key is None:
        slopes[:, :, :-1] = flowing
    else:
        product = flowing * normed
        by_slot = product.sum((0, 1)).index_select(1, _pairs(dim)[1])
        of_query.add_(by_slot[:-1].sum(0))
        of_key.add_(by_slot[-1])
        along = product.mul_(scales).sum(-1, keepdim=True)
        flowing.mul_(scales).addcmul_(normed, along, value=-1.0 / dim)
        torch.mul(flowing, head_inverse, out=slopes[:, :, :-1])
    slopes = slopes.view(tokens, -1)
    both = (slopes.T @ kept.unit).index_select(0, _row_order(groups, len(weights.qkv), dim)[1])
    _add_norm_and_product(both, weights.norm, weights.qkv, buffers.norm, buffers.qkv)
    return grad_x.addcmul_(_flattened(slopes @ kept.scaled, kept.unit), kept.inverse)


def _turned(
    x: Float32[Tensor, "*dims dim"], rotation: Complex64[Tensor, "*dims dim//2"], out: Tensor | None = None
) -> Float32[Tensor, "*dims dim"]:
    """Heads whose features are in the order of ``_pairs``, each pair taken as a complex number and multiplied."""
    numbers = torch.mul(_complex(x), rotation, out=None if out is None else _complex(out))
    return torch.view_as_real(numbers).flatten(-2)


def _complex(x: Float32[Tensor, "*dims dim"]) -> Complex64[Tensor, "*dims dim//2"]:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


@functools.cache
def _pairs(dim: int) -> tuple[Int64[Tensor, " dim"], Int64[Tensor, " dim"]]:
    """The order of a head's features that puts the two that rotate together side by side (0, dim/2, 1, dim/2 + 1, …),
    and the way back. Queries and keys in any one order have the same products."""
    order = torch.arange(dim).view(2, -1).T.flatten()
    return order, order.argsort()


@functools.cache
def _row_order(groups: int, rows: int, dim: int) -> tuple[Int64[Tensor, " rows"], Int64[Tensor, " rows"]]:
    """Of the rows of ``qkv``, and back: those of queries and keys by ``_pairs``, those of values as they are."""
    order = torch.arange(rows).view(groups, -1, dim)
    order[:, :-1] = order[:, :-1, _pairs(dim)[0]]
    return order.flatten(), order.flatten().argsort()


def attend(
    query: Heads, key: Heads, value: Heads, packing: Packing, scale: float | None
) -> tuple[Heads, list[tuple[Tensor, ...]]]:
    """Causal attention inside each sample, and what the backward pass needs of each bucket."""
    kept = []
    for bucket in packing.buckets:
        rows = [bucket.keys.spread(x) for x in (query, key, value)]
        kept.append((*rows, *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, True, scale=scale)))
    outputs = [bucket.keys.collect(output) for bucket, (*_, output, _) in zip(packing.buckets, kept, strict=True)]
    return packing.in_order(outputs), kept


def attend_backward(
    gradient: Heads, kept: Sequence[tuple[Tensor, ...]], packing: Packing, scale: float | None
) -> list[Heads]:
    """Gradients of queries, keys and values."""
    found = []
    for bucket, of_bucket in zip(packing.buckets, kept, strict=True):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            bucket.keys.spread(gradient), *of_bucket, 0.0, True, scale=scale
        )
        found.append([bucket.keys.collect(g) for g in gradients])
    return [packing.in_order(parts) for parts in zip(*found, strict=True)]


class _After(NamedTuple):
    """What the backward pass needs of the part after attention."""

    attended: Matrix
    unit: Matrix
    inverse: Matrix
    scaled: Tensor
    opened: Matrix
    """Gate and up-projection, side by side."""
    sigmoid: Matrix
    """Of the gate."""


def _after(x: Matrix, attended: Matrix, weights: Weights, eps: float) -> tuple[Matrix, _After]:
    """``y + swiglu(norm(y) · first) · second`` with ``y = x + attended · projection``."""
    y = torch.addmm(x, attended, weights.projection.T)
    unit, inverse = unit_rows(y, eps)
    scaled = weights.first * weights.mlp_norm
    opened = unit @ scaled.T
    gate, up = opened.chunk(2, 1)
    sigmoid = gate.sigmoid()
    result = torch.addmm(y, (gate * sigmoid).mul_(up), weights.second.T)
    return result, _After(attended, unit, inverse, scaled, opened, sigmoid)


def _after_backward(gradient: Matrix, kept: _After, weights: Weights, buffers: Weights) -> tuple[Matrix, Matrix]:
    """Gradients of ``x`` and of what attention gave."""
    gate, up = kept.opened.chunk(2, 1)
    active = gate * kept.sigmoid
    product = active * up
    buffers.second.addmm_(gradient.T, product)
    flowing = gradient @ weights.second
    torch.mul(flowing, up, out=product)
    torch.mul(flowing, active, out=up)
    # The slope of x·σ(x) is σ(x) + x·σ(x)·(1 − σ(x)).
    slope = (active + kept.sigmoid).addcmul_(active, kept.sigmoid, value=-1.0)
    torch.mul(product, slope, out=gate)
    slopes = kept.opened
    _add_norm_and_product(slopes.T @ kept.unit, weights.mlp_norm, weights.first, buffers.mlp_norm, buffers.first)
    grad_y = torch.addcmul(gradient, _flattened(slopes @ kept.scaled, kept.unit), kept.inverse)
    buffers.projection.addmm_(grad_y.T, kept.attended)
    return grad_y, grad_y @ weights.projection


def _flattened(gradient: Matrix, unit: Matrix) -> Matrix:
    """The part of the gradient across its row's direction, in place: along it, ``unit_rows`` changes nothing."""
    along = (gradient * unit).sum(-1, keepdim=True)
    return gradient.addcmul_(unit, along, value=-1.0 / unit.size(-1))


def _add_norm_and_product(both: Tensor, norm: Tensor, weight: Tensor, norm_buffer: Tensor, buffer: Tensor) -> None:
    """Gradients of a norm's weights and of the product's that follows it, from that of their product."""
    norm_buffer.add_((both * weight).sum(0))
    buffer.addcmul_(both, norm)
