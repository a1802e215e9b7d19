"""Passes over micro-batches through Megatron's pipeline schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int
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
from rl.trainer.moe import check_record
from rl.trainer.packing import Layout, build_layout, padded_tokens
from rl.trainer.topk import token_topk
from rl.trainer.transfer import sent
from rl.trainer.value import token_values

MicroBatchLoss = Callable[[SampleTokens, Tensor, Tensor], Tensor]
"""``(samples, log-probs, entropies) → scalar loss``, called on the last stage once a micro-batch that has samples."""
ValueLoss = Callable[[SampleTokens, Tensor], Tensor]
"""``(samples, values) → scalar loss``, likewise."""
Forward = Callable[[DistributedDataParallel, Layout], Tensor]
"""``(module, layout) → this stage's output``."""
Modules = Sequence[DistributedDataParallel]
"""This rank's stages, several in an interleaved pipeline; the model ends in the last one of the last rank."""
Finish = Callable[[SampleTokens, Layout, Tensor], Tensor]
"""``(samples, layout, last hidden state) → scalar loss``, called on the last stage once a micro-batch, also an empty
one, for which the loss must be 0 but depend on every parameter of the head."""


def lay_out(taken: SampleTokens, config: TrainerConfig, in_rows: bool = False, at_least: int = 0) -> Layout:
    """The layout of a micro-batch on this rank, on the CPU.

    Args:
        in_rows: the model's attention has no other form than rows.
        at_least: pad to so many tokens over all context-parallel ranks.
    """
    return build_layout(
        taken.token_ids,
        taken.cu_seqlens,
        taken.temperature,
        context=config.parallel.context,
        context_rank=parallel_state.get_context_parallel_rank(),
        multiple=_multiple(config),
        scored=taken.scored,
        routed_experts=taken.routed_experts,
        flash=platform.device().type == "cuda" and config.dtype == "bfloat16" and not in_rows,
        at_least=at_least,
    )


def run_module(module: DistributedDataParallel, layout: Layout) -> Float[Tensor, "local 1 hidden"]:
    """This stage's output for a micro-batch."""
    return module(layout.token_ids, None, None, packed_seq_params=layout.packing)


def run_schedule(
    modules: Modules,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
    finish: Finish,
    backward: bool,
    forward: Forward = run_module,
) -> None:
    """Forward, and with ``backward`` also backward, passes over this data-parallel rank's micro-batches.

    The gradient is that of the *sum* of the micro-batches' losses over all data-parallel ranks, summed over them when
    the last micro-batch is done. An empty micro-batch runs through the model with a token of padding, because other
    ranks may wait for its collectives; its loss is 0.

    Raises:
        ValueError: the batch has routed experts that are not of this model.
    """

    def end(taken: SampleTokens, layout: Layout, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        loss = finish(taken, layout, hidden)
        # Three values, the second a count that is not used: with two, Megatron would divide by the micro-batches.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), None

    def forward_step(iterator: Iterator[Sequence[int]], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        taken = take_samples(batch, next(iterator))
        if taken.routed_experts is not None:
            check_record(taken.routed_experts, module.config)
        laid_out = lay_out(taken, config, module.module.attends_in_rows, at_least)
        layout, index, cu_seqlens = sent((laid_out, taken.index, taken.cu_seqlens), platform.device())
        taken = dataclasses.replace(taken, on_device=(index, cu_seqlens))
        return forward(module, layout), partial(end, taken, layout)

    at_least = _common_length(batch, micro_batches, config) if len(modules) > 1 else 0
    iterators = [iter(micro_batches) for _ in modules]
    with torch.set_grad_enabled(backward):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(modules) > 1 else iterators[0],
            model=list(modules),
            num_microbatches=len(micro_batches),
            seq_length=at_least or config.max_tokens_per_micro_batch,  # the stages tell each other the real ones
            micro_batch_size=1,
            forward_only=not backward,
        )


def _common_length(batch: TrainBatch, micro_batches: Sequence[Sequence[int]], config: TrainerConfig) -> int:
    """Tokens of the largest micro-batch, to which an interleaved pipeline pads all of them: Megatron's exchange of
    sizes mixes up what goes forward and what comes back where two ranks are neighbours on both sides."""
    chunks = 2 * config.parallel.context if config.parallel.context > 1 else 1
    padded = (batch.rollout.lengths() + chunks - 1) // chunks * chunks
    longest = max(int(padded[list(members)].sum()) for members in micro_batches)
    return padded_tokens(longest, config.parallel.context, _multiple(config))


def _multiple(config: TrainerConfig) -> int:
    """What each rank's number of tokens must be a multiple of."""
    return config.parallel.tensor if config.parallel.sequence_parallel else 1


def run_passes(
    modules: Modules,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
    loss: MicroBatchLoss,
    backward: bool,
) -> None:
    """``run_schedule`` of a language model with a loss of log-probs and entropies."""

    def finish(taken: SampleTokens, layout: Layout, hidden: Tensor) -> Tensor:
        logprobs, entropy = token_logprobs(modules[-1].module, hidden, layout, config.logits_chunk_tokens)
        # The zero keeps the graph, so that the backward pass visits every parameter.
        return loss(taken, logprobs, entropy) if layout.tokens else logprobs.sum() * 0.0

    run_schedule(modules, batch, micro_batches, config, finish, backward)


def run_value_passes(
    modules: Modules,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
    loss: ValueLoss,
    backward: bool,
) -> None:
    """``run_schedule`` of a value model with a loss of values."""

    def finish(taken: SampleTokens, layout: Layout, hidden: Tensor) -> Tensor:
        values = token_values(modules[-1].module, hidden, layout)
        return loss(taken, values) if layout.tokens else values.sum() * 0.0

    run_schedule(modules, batch, micro_batches, config, finish, backward)


def batch_logprobs(
    modules: Modules,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
) -> tuple[Float32[Tensor, " tokens"], Float32[Tensor, " tokens"]]:
    """Log-probs and entropies of the whole global batch's tokens under the current weights, on the CPU of every rank.

    Tokens that are not scored get 0, as do those of samples that no rank has in its micro-batches, and the first token
    of each sample.
    """
    whole = torch.zeros(len(batch.token_ids), 2, device=platform.device())

    def keep(taken: SampleTokens, logprobs: Tensor, entropy: Tensor) -> Tensor:
        put_tokens(whole, taken, torch.stack([logprobs, entropy], dim=-1))
        return logprobs.sum()

    run_passes(modules, batch, micro_batches, config, keep, backward=False)
    logprobs, entropy = collected(whole).unbind(-1)
    return logprobs, entropy


def batch_values(
    modules: Modules,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
) -> Float32[Tensor, " tokens"]:
    """Values of the whole global batch's tokens by a value model, on the CPU of every rank; 0 where ``batch_logprobs``
    has 0."""
    whole = torch.zeros(len(batch.token_ids), device=platform.device())

    def keep(taken: SampleTokens, values: Tensor) -> Tensor:
        put_tokens(whole, taken, values)
        return values.sum()

    run_value_passes(modules, batch, micro_batches, config, keep, backward=False)
    return collected(whole)


def batch_topk(
    modules: Modules,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
    k: int,
) -> tuple[Float32[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """For each token of the whole global batch the ``k`` most likely tokens in its place: their log-probs, descending,
    and their ids, on the CPU of every rank; zeros where ``batch_logprobs`` has 0."""
    logprobs = torch.zeros(len(batch.token_ids), k, device=platform.device())
    ids = torch.zeros_like(logprobs, dtype=torch.int32)

    def finish(taken: SampleTokens, layout: Layout, hidden: Tensor) -> Tensor:
        values, chosen = token_topk(modules[-1].module, hidden, layout, k, config.logits_chunk_tokens)
        put_tokens(logprobs, taken, values)
        put_tokens(ids, taken, chosen)
        return values.sum()

    run_schedule(modules, batch, micro_batches, config, finish, backward=False)
    return collected(logprobs), collected(ids)


def put_tokens(whole: Tensor, taken: SampleTokens, part: Tensor) -> None:
    """Put what is known of some samples' tokens into its place."""
    index, _ = taken.on_device or (taken.index.to(whole.device), None)
    whole[index] = part


def collected(whole: Tensor) -> Tensor:
    """What the ranks have put together, on the CPU. Each sample is on one data-parallel rank alone, so that the sum
    only adds zeros."""
    dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        dist.broadcast(whole, parallel_state.get_pipeline_model_parallel_last_rank(), group=pipeline)
    return whole.cpu()
