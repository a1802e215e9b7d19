"""Megatron's dense transformer layer, as plain functions of tensors that a compiler can fuse.

    q, k, v = rotate(norm(split(rms(x) · W_qkv)))     ─► attention ─►     x' = x + a · W_proj
                                                                           y = x' + swiglu(rms(x') · W_1) · W_2

Without tensor parallelism nothing happens between these steps but arithmetic, so that a compiler can fuse all that is
not a matrix product, and Python runs a few lines a layer instead of a few hundred. The parameters, their names and
their hooks stay Megatron's. Under tensor parallelism Megatron's own forward runs.

With FlashAttention and without context parallelism the attention is one more operation, so that whole layers, and
several in a row, are compiled together, and all of a stage may be replayed as one CUDA graph (``group_layers``): a
small model's layers take less time on a fast GPU than starting them does.

In fp32 on the CPU, without context parallelism, a layer is one function with a backward pass of its own
(``rl.trainer.cpu_layer``), unless only some of its parameters are trained; a model's last one then goes on with the
tokens that are read alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from rl.trainer import platform
from rl.trainer.compiled import compiled, vary_rows
from rl.trainer.cpu_layer import Layer, Shape
from rl.trainer.cpu_norm import Norm, fp32_on_cpu
from rl.trainer.flash import flash_attention
from rl.trainer.layer_graph import LayerGraphs
from rl.trainer.layer_passes import AutogradPasses, HandPasses, Passes, Weights
from rl.trainer.packing import Packing

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer


def rms_norm(x: Float[Tensor, "*dims hidden"], weight: Float[Tensor, " hidden"], eps: float) -> Tensor:
    """Root-mean-square norm in fp32, scaled in the parameters' dtype, as the Hugging Face models do it."""
    if fp32_on_cpu(x):
        return Norm.apply(x, weight, eps)
    return F.rms_norm(x.float(), (x.size(-1),), None, eps).to(x.dtype) * weight


def _rotate(
    x: Float[Tensor, "tokens heads dim"], cos: Float[Tensor, "tokens dim"], sin: Float[Tensor, "tokens dim"]
) -> Float[Tensor, "tokens heads dim"]:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _before_attention(
    x: Float[Tensor, "tokens 1 hidden"],
    weights: Weights,
    cos: Float[Tensor, "tokens dim"],
    sin: Float[Tensor, "tokens dim"],
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[tokens, heads, dim]``, keys and values ``[tokens, groups, dim]``."""
    tokens, dim = x.size(0), cos.size(-1)
    mixed = F.linear(rms_norm(x, weights.norm, eps), weights.qkv).view(tokens, groups, -1, dim)
    query, key, value = mixed.split([mixed.size(2) - 2, 1, 1], dim=2)
    query, key, value = query.reshape(tokens, -1, dim), key.squeeze(2), value.squeeze(2)
    if weights.query_norm is not None and weights.key_norm is not None:
        query, key = rms_norm(query, weights.query_norm, eps), rms_norm(key, weights.key_norm, eps)
    return _rotate(query, cos, sin), _rotate(key, cos, sin), value.contiguous()


def _after_attention(
    x: Float[Tensor, "tokens 1 hidden"], attended: Float[Tensor, "tokens 1 heads*dim"], weights: Weights, eps: float
) -> Float[Tensor, "tokens 1 hidden"]:
    x = x + F.linear(attended, weights.projection)
    gate, up = F.linear(rms_norm(x, weights.mlp_norm, eps), weights.first).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, weights.second)


def _gradient_buffers(weights: Weights) -> Weights | None:
    """Megatron's; None if a parameter has none."""
    parameters = [weight for weight in weights if weight is not None]
    if not all(hasattr(parameter, "main_grad") for parameter in parameters):
        return None
    return Weights(*(None if weight is None else weight.main_grad for weight in weights))


def _whole_layers(
    x: Float[Tensor, "tokens 1 hidden"],
    layers: Sequence[Weights],
    cos: Float[Tensor, "tokens dim"],
    sin: Float[Tensor, "tokens dim"],
    groups: int,
    eps: float,
    edges: Int32[Tensor, " samples+1"],
    longest: int,
    scale: float | None,
) -> Float[Tensor, "tokens 1 hidden"]:
    for weights in layers:
        query, key, value = _before_attention(x, weights, cos, sin, groups, eps)
        attended = flash_attention(query, key, value, edges, edges, longest, longest, scale)
        x = _after_attention(x, attended.reshape(x.size(0), 1, -1), weights, eps)
    return x


_fused_before_attention = compiled(_before_attention)
_fused_after_attention = compiled(_after_attention)
_fused_layers = compiled(_whole_layers)


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
        self._groups: tuple[tuple[DenseLayer, ...], ...] = ((self,),)
        self._graphs: LayerGraphs | None = None
        self.ends_model = False
        """Whether what comes next reads only the output at ``Packing.read``."""

    def forward(
        self,
        hidden_states: Float[Tensor, "tokens 1 hidden"],
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Packing | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        config, attention = self.config, self.self_attention
        if config.tensor_model_parallel_size > 1 or packed_seq_params is None or rotary_pos_emb is None:
            return super().forward(
                hidden_states,
                *args,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        spans, whole = packed_seq_params.spans, False
        if spans is not None and spans.keys is None:
            whole = True
            if not self._groups:  # a layer before it has computed it
                return hidden_states, None
        in_rows = spans is None and packed_seq_params.gathered_order is None
        if in_rows and fp32_on_cpu(hidden_states):
            weights = self.weights()
            buffers = _gradient_buffers(weights)
            if buffers is not None or not torch.is_grad_enabled():
                return self._by_hand(hidden_states, weights, buffers, packed_seq_params, rotary_pos_emb), None
        cos, sin = cos_sin(packed_seq_params, rotary_pos_emb, hidden_states.dtype)
        if whole and spans is not None:
            run = self._graphs or self._run
            return run(hidden_states, cos, sin, spans.query_edges, spans.longest_query), None
        vary_rows(hidden_states, cos, sin)
        weights, eps = self.weights(), config.layernorm_epsilon
        query, key, value = _fused_before_attention(hidden_states, weights, cos, sin, config.num_query_groups, eps)
        attended = attention.core_attention(
            query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), None, packed_seq_params=packed_seq_params
        )
        vary_rows(attended)
        return _fused_after_attention(hidden_states, attended, weights, eps), None

    def _by_hand(
        self, x: Tensor, weights: Weights, buffers: Weights | None, packing: Packing, angles: Tensor
    ) -> Tensor:
        config = self.config
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # or autograd would not come back here for the parameters' gradients
        if packing.rotation is None:
            half = angles[:, 0, 0, : angles.size(-1) // 2]
            packing.rotation = torch.complex(half.cos(), half.sin())
        read = packing.read if self.ends_model else None
        shape = Shape(config.num_query_groups, config.layernorm_epsilon, self.self_attention.core_attention.scale)
        return Layer.apply(x, packing.rotation, weights, buffers, shape, packing, read)

    def _run(
        self,
        x: Float[Tensor, "tokens 1 hidden"],
        cos: Float[Tensor, "tokens dim"],
        sin: Float[Tensor, "tokens dim"],
        edges: Int32[Tensor, " samples+1"],
        longest: int,
        parameters: Sequence[Tensor] | None = None,
    ) -> Float[Tensor, "tokens 1 hidden"]:
        """This layer, and those that it leads.

        Args:
            parameters: taken in place of the layers' own, in the order of ``_parameters_in_order``.
        """
        scale, shape = self.self_attention.core_attention.scale, (self.config.num_query_groups,)
        taken = None if parameters is None else iter(parameters)
        for group in self._groups:
            vary_rows(x, cos, sin, edges)
            layers = [layer.weights() for layer in group]
            if taken is not None:
                layers = [Weights(*(None if own is None else next(taken) for own in weights)) for weights in layers]
            x = _fused_layers(x, layers, cos, sin, *shape, self.config.layernorm_epsilon, edges, longest, scale)
        return x

    def _parameters_in_order(self) -> list[Tensor]:
        weights = (weight for group in self._groups for layer in group for weight in layer.weights())
        return [weight for weight in weights if weight is not None]

    def weights(self) -> Weights:
        attention, mlp, normed = self.self_attention, self.mlp, self.config.qk_layernorm
        return Weights(
            self.input_layernorm.weight,
            attention.linear_qkv.weight,
            attention.q_layernorm.weight if normed else None,
            attention.k_layernorm.weight if normed else None,
            attention.linear_proj.weight,
            self.pre_mlp_layernorm.weight,
            mlp.linear_fc1.weight,
            mlp.linear_fc2.weight,
        )

    def lead(self, groups: Sequence[Sequence[DenseLayer]], graphs: bool, by_hand: bool) -> None:
        """Compute these layers, of which this is the first, wherever whole layers can be computed together.

        Args:
            groups: those of a group are compiled together.
            graphs: replay all of them as one CUDA graph.
            by_hand: record the passes that are written out.
        """
        layers = [layer for group in groups for layer in group]
        for layer in layers:
            layer._groups = ()
        self._groups = tuple(tuple(group) for group in groups)
        if graphs:
            config = self.config
            shape = (config.num_query_groups, config.layernorm_epsilon, self.self_attention.core_attention.scale)
            passes: Passes = HandPasses(config.qk_layernorm, *shape) if by_hand else AutogradPasses(self._run)
            self._graphs = LayerGraphs(passes, self._parameters_in_order())

    def release_graphs(self) -> None:
        """Before the weights move to other addresses."""
        if self._graphs is not None:
            self._graphs.release()


def group_layers(layers: Iterable[Any], count: int, graphs: bool = False, by_hand: bool = False) -> None:
    """Let ``count`` consecutive dense layers at a time be compiled as one; other layers stay alone.

    Args:
        graphs: replay each run of consecutive dense layers as one CUDA graph.
        by_hand: of the passes that are written out, in place of the compiled ones.
    """
    for dense, run in groupby(layers, lambda layer: isinstance(layer, DenseLayer)):
        if dense:
            members = list(run)
            groups = [members[begin : begin + count] for begin in range(0, len(members), count)]
            for together in [groups] if graphs else [[group] for group in groups]:
                together[0][0].lead(together, graphs, by_hand)
