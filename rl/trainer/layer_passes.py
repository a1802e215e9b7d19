"""The passes through a run of dense layers, forward and backward, for a recording.

    m = norm(x) · W_qkv      q, k, v = rotate(m)      y = x + attention(q, k, v) · W_proj
    f = norm(y) · W_1        x' = y + swiglu(f) · W_2

``AutogradPasses`` leaves the backward pass to autograd, over layers that a compiler has fused. ``HandPasses`` is
written out: each sum is taken with the norm after it, the gradients of the weights are added to their fp32 buffers
inside the matrix products, and what is cheap (norms, the product of the gate) is not kept but made again by the kernels
of the backward pass that read the same tensors anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from rl.trainer.flash import flash_backward, flash_forward
from rl.trainer.layer_kernels import (
    add_norm,
    norm_backward,
    split_rotate,
    split_rotate_backward,
    swiglu,
    swiglu_backward,
)
from rl.trainer.products import add_product

Run = Callable[[Tensor, Tensor, Tensor, Tensor, int, Sequence[Tensor]], Tensor]
"""``(x, cos, sin, edges of the samples, bound of their lengths, parameters) → x`` after the layers."""
Buffers = Sequence[Float32[Tensor, "..."] | None]
"""Of the parameters' gradients; None for a parameter without."""


class Weights(NamedTuple):
    """Of one layer. The rows of ``qkv`` are, for each group of query heads, its queries, its key and its value."""

    norm: Float[Tensor, " hidden"]
    qkv: Float[Tensor, "rows hidden"]
    query_norm: Float[Tensor, " dim"] | None
    key_norm: Float[Tensor, " dim"] | None
    projection: Float[Tensor, "hidden heads*dim"]
    mlp_norm: Float[Tensor, " hidden"]
    first: Float[Tensor, "2*ffn hidden"]
    second: Float[Tensor, "hidden ffn"]


class Passes(Protocol):
    def forward(
        self,
        x: Float[Tensor, "tokens 1 hidden"],
        cos: Float[Tensor, "tokens dim"],
        sin: Float[Tensor, "tokens dim"],
        edges: Int32[Tensor, " samples+1"],
        longest: int,
        parameters: Sequence[Tensor],
        keep: bool,
    ) -> tuple[Float[Tensor, "tokens 1 hidden"], Any]:
        """The output, and what ``backward`` needs, if it is to ``keep`` that."""
        ...

    def backward(self, kept: Any, gradient: Float[Tensor, "tokens 1 hidden"], buffers: Buffers) -> Tensor:
        """Add the parameters' gradients to the buffers; returns that of ``x``."""
        ...


class AutogradPasses:
    def __init__(self, run: Run) -> None:
        self._run = run

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        edges: Tensor,
        longest: int,
        parameters: Sequence[Tensor],
        keep: bool,
    ) -> tuple[Tensor, Any]:
        with torch.set_grad_enabled(keep):
            x = x.detach().requires_grad_(keep)
            result = self._run(x, cos, sin, edges, longest, parameters)
        return result.detach(), (x, parameters, result)

    def backward(self, kept: Any, gradient: Tensor, buffers: Buffers) -> Tensor:
        x, parameters, result = kept
        pairs = [(p, buffer) for p, buffer in zip(parameters, buffers, strict=True) if buffer is not None]
        grad_x, *found = torch.autograd.grad(result, (x, *(parameter for parameter, _ in pairs)), gradient)
        if found:
            torch._foreach_add_([buffer for _, buffer in pairs], found)
        return grad_x


@dataclass(frozen=True)
class _Kept:
    """Of one layer."""

    x: Tensor
    inverse: Tensor
    mixed: Tensor
    qkv: tuple[Tensor, Tensor, Tensor]
    attended: Tensor
    attention: Any
    y: Tensor
    mlp_inverse: Tensor
    opened: Tensor


@dataclass
class _Run:
    """Of one forward pass; the layers' parts are let go as the backward pass takes them."""

    layers: list[tuple[Weights, _Kept]]
    cos: Tensor
    sin: Tensor
    edges: Tensor
    longest: int


class HandPasses:
    def __init__(self, normed: bool, groups: int, eps: float, scale: float | None) -> None:
        """
        Args:
            normed: queries and keys have norms of their own.
            groups: of query heads.
        """
        self._normed, self._groups, self._eps, self._scale = normed, groups, eps, scale

    def _weights(self, tensors: Sequence[Any]) -> list[Weights]:
        """Layer by layer, from what is in the order of ``Weights`` without the norms that are not there."""
        taken = iter(tensors)
        absent = () if self._normed else ("query_norm", "key_norm")
        count = len(Weights._fields) - len(absent)
        return [
            Weights(*(None if name in absent else next(taken) for name in Weights._fields))
            for _ in range(len(tensors) // count)
        ]

    @torch.no_grad()
    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        edges: Tensor,
        longest: int,
        parameters: Sequence[Tensor],
        keep: bool,
    ) -> tuple[Tensor, Any]:
        shape, kept = x.shape, _Run([], cos, sin, edges, longest)
        state, delta = x.detach().view(len(x), -1), None
        for weights in self._weights([parameter.detach() for parameter in parameters]):
            state, normed, inverse = add_norm(state, delta, weights.norm, self._eps)
            mixed = normed @ weights.qkv.T
            qkv = split_rotate(mixed, cos, sin, weights.query_norm, weights.key_norm, self._groups, self._eps)
            attended, attention = flash_forward(*qkv, edges, longest, self._scale)
            y, normed, mlp_inverse = add_norm(
                state, attended.flatten(1) @ weights.projection.T, weights.mlp_norm, self._eps
            )
            opened = normed @ weights.first.T
            if keep:
                part = _Kept(state, inverse, mixed, qkv, attended, attention, y, mlp_inverse, opened)
                kept.layers.append((weights, part))
            state, delta = y, swiglu(opened) @ weights.second.T
        return (state + delta).view(shape), kept

    @torch.no_grad()
    def backward(self, kept: Any, gradient: Tensor, buffers: Buffers) -> Tensor:
        flowing = gradient.view(len(gradient), -1)
        vectors: list[tuple[Tensor | None, Tensor | None]] = []
        for targets in reversed(self._weights(buffers)):
            weights, part = kept.layers.pop()
            flowing = self._mlp_backward(flowing, weights, part, targets, vectors)
            flowing = self._attention_backward(flowing, weights, part, targets, kept, vectors)
        pairs = [(buffer, found) for buffer, found in vectors if buffer is not None and found is not None]
        if pairs:
            torch._foreach_add_([buffer for buffer, _ in pairs], [found for _, found in pairs])
        return flowing.view(gradient.shape)

    @staticmethod
    def _mlp_backward(
        flowing: Tensor, weights: Weights, part: _Kept, targets: Weights, vectors: list[tuple[Any, Any]]
    ) -> Tensor:
        slopes, active = swiglu_backward(part.opened, flowing @ weights.second)
        _accumulate(targets.second, flowing, active)
        result, normed, found = norm_backward(
            slopes @ weights.first, part.y, part.mlp_inverse, weights.mlp_norm, flowing
        )
        _accumulate(targets.first, slopes, normed)
        vectors.append((targets.mlp_norm, found))
        return result

    def _attention_backward(
        self,
        flowing: Tensor,
        weights: Weights,
        part: _Kept,
        targets: Weights,
        run: _Run,
        vectors: list[tuple[Any, Any]],
    ) -> Tensor:
        _accumulate(targets.projection, flowing, part.attended.flatten(1))
        incoming = (flowing @ weights.projection).view(part.attended.shape)
        gradients = flash_backward(
            incoming, *part.qkv, part.attended, part.attention, run.edges, run.longest, self._scale
        )
        slopes, query_found, key_found = split_rotate_backward(
            gradients, part.mixed, run.cos, run.sin, weights.query_norm, weights.key_norm, self._eps
        )
        result, normed, found = norm_backward(slopes @ weights.qkv, part.x, part.inverse, weights.norm, flowing)
        _accumulate(targets.qkv, slopes, normed)
        vectors += [(targets.norm, found), (targets.query_norm, query_found), (targets.key_norm, key_found)]
        return result


def _accumulate(buffer: Tensor | None, slopes: Tensor, inputs: Tensor) -> None:
    """``buffer += slopesᵀ · inputs``"""
    if buffer is not None:
        add_product(buffer, slopes.T, inputs)
