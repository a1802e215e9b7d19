"""A training pass of the indexers: what the layers leave behind, and the loss that is made of it.

Everything but the indexers is frozen, so that the trunk runs without gradient, and each pipeline stage has losses of
its own: those of its indexers. ``run_indexer_passes`` hangs them on the stage's output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rl.trainer.indexer_loss import indexer_kl, summed_attention
from rl.trainer.packing import Packing


@dataclass
class IndexerGroup:
    """One indexer and the layers that it serves, while a micro-batch goes through them. One entry a bucket."""

    scores: list[Float32[Tensor, "rows queries keys"]]
    """Of the indexer, with gradient."""
    masks: list[Bool[Tensor, "rows_or_1 queries keys"]]
    """Positions that count."""
    targets: list[Float32[Tensor, "rows queries keys"]]
    """Attention summed over heads and over the layers so far."""

    def observe(
        self,
        bucket: int,
        query: Float[Tensor, "rows heads queries dim"],
        key: Float[Tensor, "rows heads keys dim"],
        scale: float,
        group: dist.ProcessGroup,
    ) -> None:
        """Add a layer's attention in a bucket, with this rank's heads and those of the others in ``group``."""
        attention = summed_attention(query, key, self.masks[bucket], scale)
        if group.size() > 1:
            dist.all_reduce(attention, group=group)
        self.targets[bucket] += attention


@dataclass
class IndexerTraining:
    """Travels with the packing of a micro-batch on which the indexers are trained."""

    sparse: bool
    """Attention, target and softmax over the selected positions instead of all."""
    groups: dict[int, IndexerGroup] = field(default_factory=dict)
    """By the layer that has the indexer, from 0."""

    def add(self, layer: int, scores: list[Tensor], masks: list[Tensor]) -> None:
        self.groups[layer] = IndexerGroup(scores, masks, [torch.zeros_like(x) for x in scores])


def token_losses(group: IndexerGroup, packing: Packing) -> Float32[Tensor, " local"]:
    """KL of each token of this rank; 0 in the padding."""
    parts = []
    for bucket, scores, mask, target in zip(packing.buckets, group.scores, group.masks, group.targets, strict=True):
        kl = indexer_kl(target, scores, mask)
        parts.append(bucket.queries.collect(kl[:, None, :, None]).flatten())
    losses = torch.cat(parts)
    if packing.order is not None:
        losses = losses.index_select(0, packing.order)
    return losses.where(packing.real, 0.0)
