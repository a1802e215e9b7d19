"""Passes over micro-batches through Megatron's pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor

from rl.batch import SampleTokens, TrainBatch, take_samples
from rl.trainer import platform
from rl.trainer.config import TrainerConfig

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from rl.trainer.head import token_logprobs
from rl.trainer.model import PolicyModel
from rl.trainer.packing import Layout, build_layout

MicroBatchLoss = Callable[[SampleTokens, Tensor, Tensor], Tensor]
"""``(samples, log-probs, entropies) → scalar loss``, called on the last stage once a micro-batch that has samples."""


def lay_out(taken: SampleTokens, config: TrainerConfig) -> Layout:
    """The layout of a micro-batch on this rank."""
    return build_layout(
        taken.token_ids,
        taken.cu_seqlens,
        taken.temperature,
        platform.device(),
        context=config.parallel.context,
        context_rank=parallel_state.get_context_parallel_rank(),
        multiple=config.parallel.tensor if config.parallel.sequence_parallel else 1,
    )


def run_passes(
    module: DistributedDataParallel,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
    loss: MicroBatchLoss,
    backward: bool,
) -> None:
    """Forward, and with ``backward`` also backward, passes over this data-parallel rank's micro-batches.

    The gradient is that of the *sum* of the micro-batches' losses over all data-parallel ranks, summed over them when
    the last micro-batch is done. An empty micro-batch runs through the model with a token of padding, because other
    ranks may wait for its collectives; its loss is 0.
    """
    model: PolicyModel = module.module

    def finish(taken: SampleTokens, layout: Layout, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        logprobs, entropy = token_logprobs(model, hidden, layout, config.logits_chunk_tokens)
        # The zero keeps the graph, so that the backward pass visits every parameter.
        value = loss(taken, logprobs, entropy) if layout.tokens else logprobs.sum() * 0.0
        # Three values, the second a count that is not used: with two, Megatron would divide by the micro-batches.
        return value, torch.zeros((), dtype=torch.int, device=value.device), None

    def forward_step(iterator: Iterator[Sequence[int]], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        taken = take_samples(batch, next(iterator))
        layout = lay_out(taken, config)
        hidden = module(layout.token_ids, None, None, packed_seq_params=layout.packing)
        return hidden, partial(finish, taken, layout)

    with torch.set_grad_enabled(backward):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[module],
            num_microbatches=len(micro_batches),
            seq_length=config.max_tokens_per_micro_batch,  # the stages tell each other the real ones
            micro_batch_size=1,
            forward_only=not backward,
        )


def batch_logprobs(
    module: DistributedDataParallel,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
) -> tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]:
    """Log-probs and entropies of the whole global batch's tokens under the current weights, on the CPU of every rank.

    Tokens of samples that no rank has in its micro-batches get 0, as does the first token of each sample.
    """
    whole = torch.zeros(2, len(batch.token_ids), device=platform.device())

    def keep(taken: SampleTokens, logprobs: Tensor, entropy: Tensor) -> Tensor:
        index = taken.index.to(whole.device)
        whole[:, index] = torch.stack([logprobs, entropy])
        return logprobs.sum()

    run_passes(module, batch, micro_batches, config, keep, backward=False)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    # Each sample is on one data-parallel rank alone, so that the sum only adds zeros.
    dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
    if pipeline.size() > 1:
        dist.broadcast(whole, parallel_state.get_pipeline_model_parallel_last_rank(), group=pipeline)
    logprobs, entropy = whole.cpu()
    return logprobs, entropy
