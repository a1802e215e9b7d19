"""Our own core attention, RMSNorm and rotary embedding.

They run on any device that PyTorch does, pack samples without crossing them, and work under tensor, sequence and
context parallelism, which Megatron's local attention refuses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn

from rl.trainer import platform
from rl.trainer.flash import Spans, flash_attention

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from rl.trainer.dense_layer import rms_norm
from rl.trainer.packing import Packing


class PackedAttention(MegatronModule):
    """Causal scaled-dot-product attention inside each sample, with grouped queries.

    Keys and values are gathered over the context-parallel group (their gradients are reduce-scattered).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout or attention_dropout:
            raise ValueError(f"layer {layer_number}: attention dropout is not supported")
        self.scale = softmax_scale
        self.context_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp

    def forward(
        self,
        query: Float[Tensor, "local 1 heads dim"],
        key: Float[Tensor, "local 1 kv_heads dim"],
        value: Float[Tensor, "local 1 kv_heads dim"],
        attention_mask: None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packing | None = None,
    ) -> Float[Tensor, "local 1 heads*dim"]:
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs a Packing")
        packing = packed_seq_params
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if packing.spans is not None:
            return self._flash(query, key, value, packing.spans)
        if packing.gathered_order is not None:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.context_group).index_select(
                    0, packing.gathered_order
                )
                for x in (key, value)
            )
        outputs = [
            bucket.queries.collect(
                F.scaled_dot_product_attention(
                    bucket.queries.spread(query),
                    bucket.keys.spread(key),
                    bucket.keys.spread(value),
                    attn_mask=bucket.mask,
                    is_causal=bucket.mask is None,
                    scale=self.scale,
                    enable_gqa=query.size(1) != key.size(1),
                )
            )
            for bucket in packing.buckets
        ]
        output = packing.in_order(outputs)
        return output.reshape(output.size(0), 1, -1)

    def _flash(
        self,
        query: Float[Tensor, "local heads dim"],
        key: Float[Tensor, "local kv_heads dim"],
        value: Float[Tensor, "local kv_heads dim"],
        spans: Spans,
    ) -> Float[Tensor, "local 1 heads*dim"]:
        if spans.keys is not None:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.context_group).index_select(
                    0, spans.keys
                )
                for x in (key, value)
            )
        output = flash_attention(
            query,
            key,
            value,
            spans.query_edges,
            spans.key_edges,
            spans.longest_query,
            spans.longest_key,
            self.scale,
        )
        return output.reshape(output.size(0), 1, -1)


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, scaled in the parameters' dtype, as the Hugging Face models do it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees a part of the tokens, and Megatron sums flagged gradients.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Float[Tensor, "*dims hidden"]) -> Float[Tensor, "*dims hidden"]:
        return rms_norm(x, self.weight, self.eps)


class PackedRotaryEmbedding(nn.Module):
    """Rotary angles at the positions that a ``Packing`` gives; it answers to the calls that GPTModel makes."""

    def __init__(self, inverse_frequencies: Float32[Tensor, " half_dim"]) -> None:
        super().__init__()
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)

    def get_rotary_seq_len(
        self,
        inference_context: None,
        transformer: nn.Module,
        transformer_input: Tensor | None,
        config: TransformerConfig,
        packed_seq_params: Packing,
    ) -> Int[Tensor, " local"]:
        """The positions, which GPTModel hands to ``forward``."""
        if packed_seq_params.positions is None:
            raise ValueError("the Packing has no positions")
        return packed_seq_params.positions

    def forward(
        self, positions: Int[Tensor, " local"], packed_seq: bool = False, cp_group: None = None
    ) -> Float32[Tensor, "local 1 1 dim"]:
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
