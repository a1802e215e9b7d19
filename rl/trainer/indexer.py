"""The lightning indexer of sparse attention (DSA): which positions a query attends to.

    I_ts = Σ_j w_tj · ReLU(q_tj · k_s)          the top k of the positions s ≤ t are attended

``q`` comes from the low-rank query, ``k`` and ``w`` from the layer's input. The scores are fp32. Several layers may
share one indexer (IndexShare): the first of them computes the selection, the others read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn

from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from rl.trainer.packing import Bucket, Packing

SCORE_BYTES = 256 * 2**20
"""Of the heads' scores that exist at the same time where no gradient is asked for."""
NORM_EPS = 1e-6


@dataclass(frozen=True)
class IndexerShape:
    heads: int
    dim: int
    rotary: int
    """Dimensions of a head that are rotated, its first ones."""
    top_k: int
    query_rank: int
    """Of the low-rank query."""


def rotate_pairs(
    x: Float[Tensor, "*tokens heads dim"], angles: Float32[Tensor, "*tokens 1 dim"]
) -> Float[Tensor, "*tokens heads dim"]:
    """Rotary embedding of the pairs (x0, x1), (x2, x3), ...; the first members of the pairs come out first. Queries and
    keys have the same order, which is all that counts."""
    half = angles[..., : angles.size(-1) // 2]
    cos, sin = half.cos().to(x.dtype), half.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def index_scores(
    query: Float[Tensor, "rows heads queries dim"],
    key: Float[Tensor, "rows 1 keys dim"],
    weight: Float32[Tensor, "rows heads queries 1"],
) -> Float32[Tensor, "rows queries keys"]:
    """Σ_j w_tj · ReLU(q_tj · k_s / √dim)."""
    products = query.float() @ key.float().transpose(-1, -2) / math.sqrt(query.size(-1))
    return (F.relu(products) * weight).sum(1)


def causal_mask(bucket: Bucket, device: torch.device) -> Bool[Tensor, "rows_or_1 queries keys"]:
    """True where a query may see a key."""
    if bucket.mask is not None:
        return bucket.mask.squeeze(1)
    length = bucket.keys.length
    return torch.ones(1, length, length, dtype=torch.bool, device=device).tril()


def attended(
    bucket: Bucket, chosen: Int[Tensor, "rows queries top_k"] | None, device: torch.device
) -> Bool[Tensor, "rows_or_1 queries keys"]:
    """True at the positions that a query attends to: up to its own, and of those the chosen ones if not all are."""
    mask = causal_mask(bucket, device)
    if chosen is None:
        return mask
    selected = torch.zeros(*chosen.shape[:2], bucket.keys.length, dtype=torch.bool, device=device)
    return selected.scatter_(-1, chosen.long(), True) & mask


class Indexer(MegatronModule):
    """Replicated on the tensor-parallel ranks, which all see all tokens and compute the same."""

    def __init__(self, config: TransformerConfig, shape: IndexerShape, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.shape = shape
        self.context_group = pg_collection.cp

        def linear(size: int, features: int) -> nn.Linear:
            return nn.Linear(size, features, bias=False, dtype=config.params_dtype)

        self.wq_b = linear(shape.query_rank, shape.heads * shape.dim)
        self.wk = linear(config.hidden_size, shape.dim)
        self.k_norm = nn.LayerNorm(shape.dim, eps=NORM_EPS, dtype=config.params_dtype)
        self.weights_proj = linear(config.hidden_size, shape.heads)

    def rows(
        self,
        hidden: Float[Tensor, "local hidden"],
        low_query: Float[Tensor, "local rank"],
        angles: Float32[Tensor, "local 1 rotary"],
        packing: Packing,
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each bucket the arguments of ``index_scores``. Gradients end at ``hidden`` and ``low_query``: the indexer
        learns to imitate the attention, which must not learn to be easy to imitate."""
        hidden, low_query = hidden.detach(), low_query.detach()
        shape = self.shape
        query = self.wq_b(low_query).view(len(hidden), shape.heads, shape.dim)
        key = self.k_norm(self.wk(hidden)).view(len(hidden), 1, shape.dim)
        query, key = (
            torch.cat([rotate_pairs(x[..., : shape.rotary], angles), x[..., shape.rotary :]], dim=-1)
            for x in (query, key)
        )
        weight = self.weights_proj(hidden).float() * shape.heads**-0.5
        if packing.gathered_order is not None:
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.context_group)
            key = key.index_select(0, packing.gathered_order)
        return [
            (b.queries.spread(query), b.keys.spread(key), b.queries.spread(weight.unsqueeze(-1)))
            for b in packing.buckets
        ]

    @torch.no_grad()
    def select(
        self, bucket: Bucket, query: Tensor, key: Tensor, weight: Tensor
    ) -> Int[Tensor, "rows queries top_k"] | None:
        """Positions that each query of a bucket attends to, some of them after it where it has less than k before; None
        for all. ``torch.topk`` gives the same answer every time."""
        keys, queries = bucket.keys.length, bucket.queries.length
        if keys <= self.shape.top_k:
            return None
        mask = causal_mask(bucket, query.device)
        chunk = max(1, SCORE_BYTES // (4 * query.size(0) * query.size(1) * keys))
        chosen = []
        for begin in range(0, queries, chunk):
            part = slice(begin, begin + chunk)
            scores = index_scores(query[:, :, part], key, weight[:, :, part])
            scores.masked_fill_(~mask[:, part], -torch.inf)
            chosen.append(scores.topk(self.shape.top_k, dim=-1).indices.int())
        return torch.cat(chosen, dim=1)
