"""Multi-head latent attention (MLA), dense or over the positions that an indexer selects (DSA).

    c_q = norm(W_dq x)      q_h = [W_uq c_q, rotated part]                    heads h are spread over the ranks
    c_kv = norm(W_dkv x)    k_h = [W_uk c_kv, one rotated key for all heads]   v_h = W_uv c_kv

Packed like ``PackedAttention``. Over selected positions the up-projections of keys and values move to the other side of
the products, so that all heads read one key, c_kv and its rotated part, and a value that is c_kv:

    q_h · k_h = [W_ukᵀ q_h, rotated part] · [c_kv, rotated key]                o_h = W_uv Σ_s p_hs c_kv,s
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

from rl.trainer.chosen_attention import ChosenAttention
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
        low_kv, rotated_key = self.linear_kv_down_proj(hidden_states).split(
            [self.shape.kv_rank, self.shape.rotated], dim=-1
        )
        low_kv = self.kv_layernorm(low_kv)
        if self.indexer is not None:
            self._select(self.indexer, hidden_states, low_query, angles, packing)
        selection, training = packing.selections[self.selects], packing.indexer_training
        query = self._queries(low_query, angles)
        every, some = any(chosen is None for chosen in selection), any(chosen is not None for chosen in selection)
        if every or training is not None:
            key, value = self._keys_and_values(low_kv, rotated_key, angles, packing)
        if some:
            latent_query, latent_key = self._latent(query, low_kv, rotated_key, angles, packing)
        outputs = []
        for index, (bucket, chosen) in enumerate(zip(packing.buckets, selection, strict=True)):
            if chosen is None:
                all_three = (bucket.queries.spread(query), bucket.keys.spread(key), bucket.keys.spread(value))
                output = bucket.queries.collect(attend_to_all(*all_three, bucket, self.scale))
            else:
                both = (bucket.queries.spread(latent_query), bucket.keys.spread(latent_key).squeeze(1))
                latent = attend_to_chosen(*both, bucket, chosen, self.shape.kv_rank, self.scale)
                output = torch.einsum("thr,hvr->thv", bucket.queries.collect(latent), self._up_projections()[1])
            outputs.append(output)
            if training is not None:
                both = bucket.queries.spread(query), bucket.keys.spread(key)
                training.groups[self.selects].observe(index, *both, self.scale, self.tensor_group)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if packing.order is not None:
            output = output.index_select(0, packing.order)
        return self.linear_proj(output.reshape(output.size(0), 1, -1))

    def _queries(self, low_query: Tensor, angles: Tensor) -> Float[Tensor, "local heads query"]:
        """Of this rank's heads."""
        query, _ = self.linear_q_up_proj(low_query)
        query = query.view(query.size(0), self.heads, self.shape.query)
        plain, turned = query.split([self.shape.unrotated, self.shape.rotated], dim=-1)
        return torch.cat([plain, rotate_pairs(turned, angles)], dim=-1)

    def _keys_and_values(
        self, low_kv: Tensor, rotated_key: Tensor, angles: Tensor, packing: Packing
    ) -> tuple[Float[Tensor, "keys heads query"], Float[Tensor, "keys heads value"]]:
        """Of this rank's heads, and of the tokens of all context-parallel ranks."""
        shape = self.shape
        kv, _ = self.linear_kv_up_proj(low_kv)
        plain, value = kv.view(kv.size(0), self.heads, -1).split([shape.unrotated, shape.value], dim=-1)
        rotated_key = self._for_own_heads(rotated_key)
        turned = rotate_pairs(rotated_key.view(-1, 1, shape.rotated), angles).expand(-1, self.heads, -1)
        return self._of_all_tokens(torch.cat([plain, turned], dim=-1), packing), self._of_all_tokens(value, packing)

    def _latent(
        self, query: Tensor, low_kv: Tensor, rotated_key: Tensor, angles: Tensor, packing: Packing
    ) -> tuple[Float[Tensor, "local heads latent"], Float[Tensor, "keys 1 latent"]]:
        """Queries, and the key of all heads, of ``kv_rank + rotated`` dimensions."""
        shape = self.shape
        plain, turned = query.split([shape.unrotated, shape.rotated], dim=-1)
        query = torch.cat([torch.einsum("thn,hnr->thr", plain, self._up_projections()[0]), turned], dim=-1)
        shared = self._for_own_heads(torch.cat([low_kv, rotated_key], dim=-1)).view(
            -1, 1, shape.kv_rank + shape.rotated
        )
        plain, turned = shared.split([shape.kv_rank, shape.rotated], dim=-1)
        return query, self._of_all_tokens(torch.cat([plain, rotate_pairs(turned, angles)], dim=-1), packing)

    def _up_projections(self) -> tuple[Float[Tensor, "heads unrotated rank"], Float[Tensor, "heads value rank"]]:
        """W_uk and W_uv of this rank's heads."""
        weight = self.linear_kv_up_proj.weight.view(self.heads, -1, self.shape.kv_rank)
        plain, value = weight.split([self.shape.unrotated, self.shape.value], dim=1)
        return plain, value

    def _for_own_heads(self, x: Tensor) -> Tensor:
        """What all heads share, as an up-projection takes it: all tokens, and gradients summed over the ranks."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.tensor_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tensor_group)

    def _of_all_tokens(self, x: Tensor, packing: Packing) -> Tensor:
        if packing.gathered_order is None:
            return x
        gathered = gather_from_sequence_parallel_region(x.contiguous(), group=self.context_group)
        return gathered.index_select(0, packing.gathered_order)

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


def attend_to_all(
    query: Float[Tensor, "rows heads queries dim"],
    key: Float[Tensor, "rows heads keys dim"],
    value: Float[Tensor, "rows heads keys value"],
    bucket: Bucket,
    scale: float,
) -> Float[Tensor, "rows heads queries value"]:
    """Attention over all positions up to a query's own."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bucket.mask, is_causal=bucket.mask is None, scale=scale
    )


def attend_to_chosen(
    query: Float[Tensor, "rows heads queries latent"],
    key: Float[Tensor, "rows keys latent"],
    bucket: Bucket,
    chosen: Int[Tensor, "rows queries top_k"],
    value: int,
    scale: float,
) -> Float[Tensor, "rows heads queries value"]:
    """Attention over the chosen positions up to a query's own; a key's first ``value`` dimensions are its value."""
    places = chosen.long()
    if bucket.mask is None:
        visible = places <= torch.arange(places.size(1), device=places.device)[:, None]
    else:
        visible = bucket.mask.squeeze(1).gather(-1, places)
    return ChosenAttention.apply(query, key, places, visible, value, scale)
