"""Multi-head latent attention (MLA), dense or over the positions that an indexer selects (DSA).

    c_q = norm(W_dq x)      q_h = [W_uq c_q, rotated part]                    heads h are spread over the ranks
    c_kv = norm(W_dkv x)    k_h = [W_uk c_kv, one rotated key for all heads]   v_h = W_uv c_kv

Packed like ``PackedAttention``. The masked product visits all pairs of positions, also those that are not selected: it
trains what the sparse kernel of an engine computes, without its savings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn

from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from rl.trainer.indexer import NORM_EPS, Indexer, IndexerShape, attended, index_scores, rotate_pairs
from rl.trainer.layers import RMSNorm
from rl.trainer.packing import Bucket, Packing


@dataclass(frozen=True)
class LatentShape:
    """Dimensions of one layer's attention."""

    heads: int
    query_rank: int
    kv_rank: int
    unrotated: int
    """Of a head's query and key."""
    rotated: int
    value: int
    indexer: IndexerShape

    @property
    def query(self) -> int:
        return self.unrotated + self.rotated


@dataclass(frozen=True)
class LatentLinears:
    """Modules of the projections that are spread over the heads."""

    column: type
    row: type


class LatentAttention(MegatronModule):
    """The attention of one layer.

    Args:
        selects: number of the layer (from 0) whose indexer selects for this one; its own number where it has one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentLinears,
        layer_number: int,
        shape: LatentShape,
        selects: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config=config)
        self.shape, self.selects = shape, selects
        self.context_group, self.tensor_group = pg_collection.cp, pg_collection.tp
        self.heads = shape.heads // self.tensor_group.size()
        self.scale = shape.query**-0.5

        def replicated(features: int) -> nn.Linear:
            linear = nn.Linear(config.hidden_size, features, bias=False, dtype=config.params_dtype)
            # Under sequence parallelism each rank sees a part of the tokens, and Megatron sums flagged gradients.
            linear.weight.sequence_parallel = config.sequence_parallel
            return linear

        shared = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "is_expert": False,
            "tp_group": self.tensor_group,
        }
        column = shared | {"gather_output": False, "skip_bias_add": False}
        self.linear_q_down_proj = replicated(shape.query_rank)
        self.q_layernorm = RMSNorm(config, shape.query_rank, NORM_EPS)
        self.linear_q_up_proj = submodules.column(shape.query_rank, shape.heads * shape.query, **column)
        self.linear_kv_down_proj = replicated(shape.kv_rank + shape.rotated)
        self.kv_layernorm = RMSNorm(config, shape.kv_rank, NORM_EPS)
        kv_size = shape.heads * (shape.unrotated + shape.value)
        self.linear_kv_up_proj = submodules.column(shape.kv_rank, kv_size, **column)
        row = shared | {"input_is_parallel": True, "skip_bias_add": True}
        self.linear_proj = submodules.row(shape.heads * shape.value, config.hidden_size, **row)
        self.indexer = Indexer(config, shape.indexer, pg_collection) if layer_number - 1 == selects else None

    def forward(
        self,
        hidden_states: Float[Tensor, "local_or_part 1 hidden"],
        attention_mask: None,
        rotary_pos_emb: Float32[Tensor, "local 1 1 rotated"],
        packed_seq_params: Packing,
        **unused: object,
    ) -> tuple[Float[Tensor, "local_or_part 1 hidden"], None]:
        """Megatron's call of a layer's attention: the output and no bias."""
        packing, angles = packed_seq_params, rotary_pos_emb.squeeze(1)
        low_query = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        query, key, value = self._project(hidden_states, low_query, angles)
        if packing.gathered_order is not None:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.context_group).index_select(
                    0, packing.gathered_order
                )
                for x in (key, value)
            )
        if self.indexer is not None:
            self._select(self.indexer, hidden_states, low_query, angles, packing)
        outputs, training = [], packing.indexer_training
        for index, (bucket, chosen) in enumerate(zip(packing.buckets, packing.selections[self.selects], strict=True)):
            queries, keys, values = bucket.queries.spread(query), bucket.keys.spread(key), bucket.keys.spread(value)
            outputs.append(bucket.queries.collect(attend(queries, keys, values, bucket, chosen, self.scale)))
            if training is not None:
                training.groups[self.selects].observe(index, queries, keys, self.scale, self.tensor_group)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if packing.order is not None:
            output = output.index_select(0, packing.order)
        return self.linear_proj(output.reshape(output.size(0), 1, -1))

    def _project(
        self, hidden: Tensor, low_query: Tensor, angles: Tensor
    ) -> tuple[
        Float[Tensor, "local heads query"], Float[Tensor, "local heads query"], Float[Tensor, "local heads value"]
    ]:
        """Queries, keys and values of this rank's heads and tokens."""
        shape = self.shape
        low_kv, rotated_key = self.linear_kv_down_proj(hidden).split([shape.kv_rank, shape.rotated], dim=-1)
        query, _ = self.linear_q_up_proj(low_query)
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(low_kv))
        # The up-projections do for their inputs what is done here for the key that all heads share.
        if self.config.sequence_parallel:
            rotated_key = gather_from_sequence_parallel_region(rotated_key, group=self.tensor_group)
        else:
            rotated_key = copy_to_tensor_model_parallel_region(rotated_key, group=self.tensor_group)
        tokens = query.size(0)
        query = query.view(tokens, self.heads, shape.query)
        plain, turned = query.split([shape.unrotated, shape.rotated], dim=-1)
        query = torch.cat([plain, rotate_pairs(turned, angles)], dim=-1)
        plain, value = kv.view(tokens, self.heads, -1).split([shape.unrotated, shape.value], dim=-1)
        turned = rotate_pairs(rotated_key.view(tokens, 1, shape.rotated), angles).expand(-1, self.heads, -1)
        return query, torch.cat([plain, turned], dim=-1), value

    def _select(self, indexer: Indexer, hidden: Tensor, low_query: Tensor, angles: Tensor, packing: Packing) -> None:
        """Leave the selection in the packing, for this layer and those that share it."""
        training = packing.indexer_training
        with torch.set_grad_enabled(training is not None and torch.is_grad_enabled()):
            if self.config.sequence_parallel:
                hidden, low_query = (
                    gather_from_sequence_parallel_region(x.detach(), group=self.tensor_group)
                    for x in (hidden, low_query)
                )
            rows = indexer.rows(hidden.squeeze(1), low_query.squeeze(1), angles, packing)
            selection: list[Int[Tensor, "rows queries top_k"] | None] = [None] * len(rows)
            if training is None or training.sparse:
                selection = [indexer.select(b, *r) for b, r in zip(packing.buckets, rows, strict=True)]
            packing.selections[self.selects] = selection
            if training is not None:
                masks = [attended(b, c, hidden.device) for b, c in zip(packing.buckets, selection, strict=True)]
                training.add(self.selects, [index_scores(*r) for r in rows], masks)


def attend(
    query: Float[Tensor, "rows heads queries dim"],
    key: Float[Tensor, "rows heads keys dim"],
    value: Float[Tensor, "rows heads keys value"],
    bucket: Bucket,
    chosen: Int[Tensor, "rows queries top_k"] | None,
    scale: float,
) -> Float[Tensor, "rows heads queries value"]:
    """Attention over the chosen positions of a bucket, or over all before a query."""
    if chosen is None and bucket.mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    mask = attended(bucket, chosen, query.device).unsqueeze(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
