"""One optimizer step on the indexers of sparse attention, from sequences that somebody else made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from algorithms.metrics import Mean, Metric, merge_metrics
from rl.batch import build_batch
from rl.stopwatch import Stopwatch
from rl.trainer import platform
from rl.trainer.learning_rate import learning_rate
from rl.trainer.result import NonFiniteUpdateError, UpdateResult
from rollout.trajectory import Trajectory

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state

from rl.trainer.collective import gather_objects
from rl.trainer.indexer_pass import run_indexer_passes

if TYPE_CHECKING:
    from rl.trainer.worker import TrainerWorker


def update_indexer(worker: TrainerWorker, trajectories: Sequence[Trajectory], current_version: int) -> UpdateResult:
    """Minimise the mean over all tokens (prompts too) of each indexer's KL, summed over the indexers.

    The result's metrics hold ``indexer_kl/layer_N`` in nats a token, by the layer (from 0) that has the indexer. A
    collective of all ranks.

    Raises:
        ValueError: the trainer's ``trained`` is not one of the indexer's phases.
        NonFiniteUpdateError: the loss or the gradient is NaN or infinite; the weights are as before.
    """
    if worker.config.trained == "model":
        raise ValueError("update_indexer needs trainer.trained=indexer_dense or indexer_sparse")
    loaded, watch = worker.loaded, Stopwatch()
    lr = learning_rate(loaded.schedule, loaded.steps, loaded.total_steps)
    with watch.phase("batch"):
        batch = build_batch(trajectories, current_version)
        samples = batch.rollout.samples
        micro_batches, tokens = worker.plan(batch, range(samples))
    parts: list[dict[str, Metric]] = []

    def observe(layer: int, kl: Tensor, count: Tensor) -> None:
        parts.append({f"indexer_kl/layer_{layer}": Mean(float(kl), float(count))})

    with watch.phase("passes"):
        loaded.optimizer.zero_grad()
        run_indexer_passes(loaded.modules, batch, micro_batches, worker.config, tokens, observe)
        # Tensor-parallel ranks computed the same numbers; the others those of their layers and tokens.
        speaks = parallel_state.get_tensor_model_parallel_rank() == 0
        metrics = merge_metrics(gather_objects(merge_metrics(parts) if speaks else {}))
    values = [metric.value() for metric in metrics.values()]
    loss = sum(value for value in values if value is not None)
    if not math.isfinite(loss):
        raise NonFiniteUpdateError(f"indexer update {loaded.steps + 1}: loss {loss}, lr {lr}, {tokens} tokens")
    with watch.phase("optimizer"):
        grad_norm = loaded.optimizer.step(lr)
    loaded.steps += 1
    return UpdateResult(
        step=loaded.steps,
        loss=loss,
        metrics=metrics,
        grad_norm=grad_norm,
        lr=lr,
        samples=samples,
        tokens=tokens,
        trained_tokens=tokens,
        micro_batches=len(micro_batches),
        logprob_gap_max=None,
        logprob_gap_mean=None,
        gradient_digest=None,
        seconds=watch.read(),
    )
