"""Megatron's dense transformer layer, in two fused pieces around the attention.

    q, k, v = rotate(norm(split(rms(x) · W_qkv)))     ─► attention ─►     x' = x + a · W_proj
                                                                           y = x' + swiglu(rms(x') · W_1) · W_2

Without tensor parallelism nothing happens between these steps but arithmetic, so that a compiler can fuse all that is
not a matrix product, and Python runs a few lines a layer instead of a few hundred. The parameters, their names and
their hooks stay Megatron's. Under tensor parallelism Megatron's own forward runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor

from rl.trainer import platform
from rl.trainer.compiled import compiled, vary_rows
from rl.trainer.packing import Packing

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer


def rms_norm(x: Float[Tensor, "*dims hidden"], weight: Float[Tensor, " hidden"], eps: float) -> Tensor:
    """Root-mean-square norm in fp32, scaled in the parameters' dtype, as the Hugging Face models do it."""
    return F.rms_norm(x.float(), (x.size(-1),), None, eps).to(x.dtype) * weight


def _rotate(
    x: Float[Tensor, "tokens heads dim"], cos: Float[Tensor, "tokens dim"], sin: Float[Tensor, "tokens dim"]
) -> Float[Tensor, "tokens heads dim"]:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


@compiled
def _before_attention(
    x: Float[Tensor, "tokens 1 hidden"],
    norm: Float[Tensor, " hidden"],
    qkv: Float[Tensor, "rows hidden"],
    query_norm: Float[Tensor, " dim"] | None,
    key_norm: Float[Tensor, " dim"] | None,
    cos: Float[Tensor, "tokens dim"],
    sin: Float[Tensor, "tokens dim"],
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[tokens, heads, dim]``, keys and values ``[tokens, groups, dim]``. The rows of ``qkv`` are, for each
    group of query heads, its queries, its key and its value."""
    tokens, dim = x.size(0), cos.size(-1)
    mixed = F.linear(rms_norm(x, norm, eps), qkv).view(tokens, groups, -1, dim)
    query, key, value = mixed.split([mixed.size(2) - 2, 1, 1], dim=2)
    query, key, value = query.reshape(tokens, -1, dim), key.squeeze(2), value.squeeze(2)
    if query_norm is not None and key_norm is not None:
        query, key = rms_norm(query, query_norm, eps), rms_norm(key, key_norm, eps)
    return _rotate(query, cos, sin), _rotate(key, cos, sin), value.contiguous()


@compiled
def _after_attention(
    x: Float[Tensor, "tokens 1 hidden"],
    attended: Float[Tensor, "tokens 1 heads*dim"],
    projection: Float[Tensor, "hidden heads*dim"],
    norm: Float[Tensor, " hidden"],
    first: Float[Tensor, "2*ffn hidden"],
    second: Float[Tensor, "hidden ffn"],
    eps: float,
) -> Float[Tensor, "tokens 1 hidden"]:
    x = x + F.linear(attended, projection)
    gate, up = F.linear(rms_norm(x, norm, eps), first).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, second)


def cos_sin(packing: Packing, angles: Float32[Tensor, "tokens 1 1 dim"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[tokens, dim]`` of a micro-batch's rotary angles: made by its first layer, kept for the
    others."""
    if packing.cos_sin is None:
        flat = angles[:, 0, 0]
        packing.cos_sin = (flat.cos().to(dtype), flat.sin().to(dtype))
    return packing.cos_sin


class DenseLayer(TransformerLayer):
    """Attention with rotary positions, then a gated MLP, each after a norm; no biases and no dropout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.self_attention) is not SelfAttention or type(self.mlp) is not MLP:
            raise TypeError(f"DenseLayer with {type(self.self_attention).__name__} and {type(self.mlp).__name__}")

    def forward(
        self,
        hidden_states: Float[Tensor, "tokens 1 hidden"],
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Packing | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        config, attention, mlp = self.config, self.self_attention, self.mlp
        if config.tensor_model_parallel_size > 1 or packed_seq_params is None or rotary_pos_emb is None:
            return super().forward(
                hidden_states,
                *args,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        cos, sin = cos_sin(packed_seq_params, rotary_pos_emb, hidden_states.dtype)
        vary_rows(hidden_states, cos, sin)
        query, key, value = _before_attention(
            hidden_states,
            self.input_layernorm.weight,
            attention.linear_qkv.weight,
            attention.q_layernorm.weight if config.qk_layernorm else None,
            attention.k_layernorm.weight if config.qk_layernorm else None,
            cos,
            sin,
            config.num_query_groups,
            config.layernorm_epsilon,
        )
        attended = attention.core_attention(
            query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), None, packed_seq_params=packed_seq_params
        )
        vary_rows(attended)
        output = _after_attention(
            hidden_states,
            attended,
            attention.linear_proj.weight,
            self.pre_mlp_layernorm.weight,
            mlp.linear_fc1.weight,
            mlp.linear_fc2.weight,
            config.layernorm_epsilon,
        )
        return output, None
