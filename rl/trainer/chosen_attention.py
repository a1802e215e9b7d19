"""Attention of each query over the positions that were chosen for it, with one key for all heads.

    p_hs = softmax_s(q_h · k_s · scale)  over the chosen s ≤ t          o_h = Σ_s p_hs v_s,   v_s the first part of k_s

Work and memory are linear in the length: some queries at a time, their keys copied side by side, so that what a head
multiplies is a dense matrix. The backward pass makes the probabilities again from their normalizers.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

CHUNK_BYTES = 256 * 2**20
"""Of the copied keys and of the probabilities that exist at the same time."""


class ChosenAttention(torch.autograd.Function):
    """``(query, key, chosen, visible, size of a value, scale) → output``; see the module."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "rows heads queries dim"],
        key: Float[Tensor, "rows keys dim"],
        chosen: Int[Tensor, "rows queries top_k"],
        visible: Bool[Tensor, "rows queries top_k"],
        value: int,
        scale: float,
    ) -> Float[Tensor, "rows heads queries value"]:
        """``visible`` is False at chosen positions that do not count; each query has one at least that does."""
        query = query.transpose(1, 2)
        output = query.new_empty(*query.shape[:3], value)
        normalizers = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        for part in _parts(query, chosen):
            keys = _taken(key, chosen[:, part])
            scores = _scores(query[:, part], keys, visible[:, part], scale)
            normalizers[:, part] = scores.logsumexp(-1)
            probabilities = (scores - normalizers[:, part, :, None]).exp().to(key.dtype)
            output[:, part] = probabilities @ keys[..., :value]
        ctx.save_for_backward(query, key, chosen, visible, output, normalizers)
        ctx.value, ctx.scale = value, scale
        return output.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, chosen, visible, output, normalizers = ctx.saved_tensors
        gradient = gradient.transpose(1, 2)
        grad_query = torch.empty_like(query)
        # Added up in fp32: a key is chosen by many queries.
        grad_key = torch.zeros(key.size(0) * key.size(1), key.size(2), dtype=torch.float32, device=key.device)
        first = torch.arange(key.size(0), device=key.device)[:, None, None] * key.size(1)
        for part in _parts(query, chosen):
            keys, of_output = _taken(key, chosen[:, part]), gradient[:, part]
            scores = _scores(query[:, part], keys, visible[:, part], ctx.scale)
            probabilities = (scores - normalizers[:, part, :, None]).exp_()
            mean = (of_output.float() * output[:, part].float()).sum(-1, keepdim=True)
            slopes = (of_output @ keys[..., : ctx.value].transpose(-1, -2)).float().sub_(mean)
            slopes = slopes.mul_(probabilities).mul_(ctx.scale).to(key.dtype)
            grad_query[:, part] = slopes @ keys
            of_keys = slopes.transpose(-1, -2) @ query[:, part]
            of_keys[..., : ctx.value] += probabilities.to(key.dtype).transpose(-1, -2) @ of_output
            places = (chosen[:, part] + first).flatten()
            grad_key.index_add_(0, places, of_keys.reshape(-1, key.size(2)).float())
        return grad_query.transpose(1, 2), grad_key.view_as(key).to(key.dtype), *[None] * 4


def _parts(query: Float[Tensor, "rows queries heads dim"], chosen: Int[Tensor, "rows queries top_k"]) -> list[slice]:
    """Queries at a time."""
    rows, queries, heads, dim = query.shape
    each = rows * chosen.size(2) * (dim * query.element_size() + heads * 4)
    chunk = max(1, CHUNK_BYTES // each)
    return [slice(begin, begin + chunk) for begin in range(0, queries, chunk)]


def _taken(
    key: Float[Tensor, "rows keys dim"], chosen: Int[Tensor, "rows part top_k"]
) -> Float[Tensor, "rows part top_k dim"]:
    rows = torch.arange(key.size(0), device=key.device)[:, None, None]
    return key[rows, chosen]


def _scores(
    query: Float[Tensor, "rows part heads dim"],
    keys: Float[Tensor, "rows part top_k dim"],
    visible: Bool[Tensor, "rows part top_k"],
    scale: float,
) -> Float32[Tensor, "rows part heads top_k"]:
    products = _products(query, keys.transpose(-1, -2)).mul_(scale)
    return products.masked_fill_(~visible[:, :, None], -torch.inf)


def _products(a: Float[Tensor, "rows part m k"], b: Float[Tensor, "rows part k n"]) -> Float32[Tensor, "rows part m n"]:
    """``a @ b``, never rounded to bfloat16: a score before the scale can be in the hundreds, where bfloat16 knows whole
    numbers only, and other attention kernels keep them in fp32, those of the engine among them."""
    if a.is_cuda and a.dtype != torch.float32:
        rows = a.size(0)
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, (rows, -1))
    return a.float() @ b.float()
