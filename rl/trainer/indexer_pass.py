"""One pass that trains the indexers of sparse attention, over micro-batches and pipeline stages.

Everything but the indexers is frozen: the trunk runs without gradient, and each stage's indexers have losses of their
own. Megatron's schedule knows a loss on the last stage alone, so that the others hang theirs on what they send: its
gradient, which is 0, comes back when the stage's backward pass is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from rl.batch import SampleTokens, TrainBatch
from rl.trainer import platform
from rl.trainer.config import TrainerConfig

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.distributed import DistributedDataParallel

from rl.trainer.forward import run_schedule
from rl.trainer.indexer_training import IndexerTraining, token_losses
from rl.trainer.packing import Layout

Observe = Callable[[int, Tensor, Tensor], None]
"""``(layer from 0, Σ KL over this rank's tokens, number of them)``, once a micro-batch and indexer of this stage."""


class _Carry(torch.autograd.Function):
    """``hidden``, whose backward pass is that of ``loss`` whatever its gradient; the stage before gets zeros."""

    @staticmethod
    def forward(ctx: Any, received: Tensor | None, hidden: Tensor, loss: Float32[Tensor, ""]) -> Tensor:
        ctx.received = None if received is None else (received.shape, received.dtype, received.device)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor]:
        zeros = None
        if ctx.received is not None:
            shape, dtype, device = ctx.received
            zeros = torch.zeros(shape, dtype=dtype, device=device)
        return zeros, None, torch.ones((), device=grad.device)


def run_indexer_passes(
    modules: Sequence[DistributedDataParallel],
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
    tokens: int,
    observe: Observe,
) -> None:
    """Leave in the indexers the gradient of Σ_t KL_t / ``tokens``, summed over indexers and over all ranks' tokens."""

    def forward(module: Any, layout: Layout) -> Float[Tensor, "local 1 hidden"]:
        packing = layout.packing
        packing.indexer_training = training = IndexerTraining(sparse=config.trained == "indexer_sparse")
        decoder = module.module.decoder
        received = decoder.input_tensor
        if received is not None:  # it asks for a gradient, which would keep the whole trunk's activations
            decoder.set_input_tensor(received.detach())
        hidden = module(layout.token_ids, None, None, packed_seq_params=packing)
        assert packing.real is not None
        total = torch.zeros((), device=hidden.device)
        for layer, group in sorted(training.groups.items()):
            loss = token_losses(group, packing).sum()
            observe(layer, loss.detach(), packing.real.sum())
            total = total + loss
        return _Carry.apply(received, hidden, total / tokens)

    def finish(taken: SampleTokens, layout: Layout, hidden: Tensor) -> Tensor:
        return hidden.sum() * 0.0

    run_schedule(modules, batch, micro_batches, config, finish, backward=True, forward=forward)
