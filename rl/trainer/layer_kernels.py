"""What a dense layer computes beside matrix products and attention, forward and backward: on CUDA a Triton kernel each
(``rl.trainer.layer_triton``), elsewhere the formulas that the kernels are tested against.

    n = x / √(mean x² + ε), rounded to x's dtype          norm: n · w
    ∂x = (g·w − x̂ · mean(g·w·x̂)) / √(…)                   x̂ = n before it is rounded,  ∂w = Σ g · n
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor

Matrix = Float[Tensor, "tokens hidden"]


def add_norm(
    x: Matrix, delta: Matrix | None, weight: Float[Tensor, " hidden"], eps: float
) -> tuple[Matrix, Matrix, Float32[Tensor, " tokens"]]:
    """``x + delta`` (``x`` itself without one), its norm, and the factor of each token."""
    if x.is_cuda:
        from rl.trainer import layer_triton

        return layer_triton.add_norm(x, delta, weight, eps)
    total = x if delta is None else x + delta
    inverse = total.float().square().mean(1).add(eps).rsqrt()
    return total, (total.float() * inverse[:, None]).to(x.dtype) * weight, inverse


def norm_backward(
    gradient: Matrix,
    x: Matrix,
    inverse: Float32[Tensor, " tokens"],
    weight: Float[Tensor, " hidden"],
    residual: Matrix,
) -> tuple[Matrix, Matrix, Float32[Tensor, " hidden"]]:
    """From the gradient of a norm: ``residual`` plus that of its input, the norm itself once more, and its weight's."""
    if x.is_cuda:
        from rl.trainer import layer_triton

        return layer_triton.norm_backward(gradient, x, inverse, weight, residual)
    slope, rounded, grad_weight = _unit_backward(gradient.float(), x, inverse[:, None], weight)
    return (slope + residual).to(x.dtype), rounded * weight, grad_weight


def split_rotate(
    mixed: Float[Tensor, "tokens rows"],
    cos: Float[Tensor, "tokens dim"],
    sin: Float[Tensor, "tokens dim"],
    query_norm: Float[Tensor, " dim"] | None,
    key_norm: Float[Tensor, " dim"] | None,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[tokens, heads, dim]``, keys and values ``[tokens, groups, dim]``, out of the rows of each group: its
    queries, its key and its value. Queries and keys are normed, if they have norms, and rotated."""
    if mixed.is_cuda:
        from rl.trainer import layer_triton

        return layer_triton.split_rotate(mixed, cos, sin, query_norm, key_norm, groups, eps)
    query, key, value = _parts(mixed, groups, cos.size(1))
    if query_norm is not None and key_norm is not None:
        query = (query.float() * _inverse(query, eps)).to(mixed.dtype) * query_norm
        key = (key.float() * _inverse(key, eps)).to(mixed.dtype) * key_norm
    return _turned(query, cos, sin), _turned(key, cos, sin), value.contiguous()


def split_rotate_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    mixed: Float[Tensor, "tokens rows"],
    cos: Float[Tensor, "tokens dim"],
    sin: Float[Tensor, "tokens dim"],
    query_norm: Float[Tensor, " dim"] | None,
    key_norm: Float[Tensor, " dim"] | None,
    eps: float,
) -> tuple[Tensor, Float32[Tensor, " dim"] | None, Float32[Tensor, " dim"] | None]:
    """From the gradients of queries, keys and values: those of ``mixed`` and of the norms' weights."""
    if mixed.is_cuda:
        from rl.trainer import layer_triton

        return layer_triton.split_rotate_backward(gradients, mixed, cos, sin, query_norm, key_norm, eps)
    groups, dim = gradients[1].shape[1:]
    query, key = (_turned(gradient.float(), cos, -sin) for gradient in gradients[:2])
    grad_query_norm = grad_key_norm = None
    if query_norm is not None and key_norm is not None:
        asked, kept, _ = _parts(mixed, groups, dim)
        query, _, grad_query_norm = _unit_backward(query, asked, _inverse(asked, eps), query_norm)
        key, _, grad_key_norm = _unit_backward(key, kept, _inverse(kept, eps), key_norm)
    slots = [query.view(len(mixed), groups, -1, dim), key[:, :, None], gradients[2][:, :, None]]
    result = torch.cat([slot.to(mixed.dtype) for slot in slots], 2)
    return result.view_as(mixed), grad_query_norm, grad_key_norm


def swiglu(mixed: Float[Tensor, "tokens 2*ffn"]) -> Float[Tensor, "tokens ffn"]:
    """silu(first half) · second half."""
    if mixed.is_cuda:
        from rl.trainer import layer_triton

        return layer_triton.swiglu(mixed)
    gate, up = mixed.float().chunk(2, 1)
    return (gate * gate.sigmoid() * up).to(mixed.dtype)


def swiglu_backward(
    mixed: Float[Tensor, "tokens 2*ffn"], gradient: Float[Tensor, "tokens ffn"]
) -> tuple[Float[Tensor, "tokens 2*ffn"], Float[Tensor, "tokens ffn"]]:
    """The gradient of ``mixed``, and ``swiglu`` once more."""
    if mixed.is_cuda:
        from rl.trainer import layer_triton

        return layer_triton.swiglu_backward(mixed, gradient)
    gate, up = mixed.float().chunk(2, 1)
    share = gate.sigmoid()
    slope = gradient * up * share * (1 + gate * (1 - share))
    return torch.cat([slope, gradient * gate * share], 1).to(mixed.dtype), (gate * share * up).to(mixed.dtype)


def _parts(mixed: Tensor, groups: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = mixed.view(len(mixed), groups, -1, dim)
    return slots[:, :, :-2].reshape(len(mixed), -1, dim), slots[:, :, -2], slots[:, :, -1]


def _inverse(x: Tensor, eps: float) -> Tensor:
    return x.float().square().mean(-1, keepdim=True).add(eps).rsqrt()


def _unit_backward(
    gradient: Float32[Tensor, "*dims hidden"], x: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The input's gradient (fp32), the unit vectors in x's dtype, the weight's gradient."""
    unit = x.float() * inverse
    rounded = unit.to(x.dtype)
    scaled = gradient * weight
    slope = inverse * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return slope, rounded, (gradient * rounded).flatten(0, -2).sum(0)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    c, s = (half[:, None, : first.size(-1)].float() for half in (cos, sin))
    return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)
