"""trl's GRPO loss, run on a packed batch: ``GRPOTrainer._compute_loss`` with a stand-in for the trainer."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import Tensor

from algorithms.packed import to_tokens
from algorithms.types import RolloutBatch


def trl_loss(
    batch: RolloutBatch,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    loss_type: str,
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    icepop_beta: float | None = 2.0,
    kl_coefficient: float = 0.0,
) -> Tensor:
    """``advantages`` one a sample. ``icepop_beta`` is trl's ``vllm_importance_sampling_mode="token_mask"`` with
    ``clip_min = 1/β`` and ``clip_max = β``: its ratio is kept as it is inside of the bounds and 0 outside."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows, columns = _rows_and_columns(batch)
    shape = (batch.samples, int(batch.lengths().max()))

    def padded(x: Tensor) -> Tensor:
        return x.new_zeros(shape).index_put((rows, columns), x)

    mask, per_token = padded(batch.action_mask.float()), padded(logprobs)
    old, inference = padded(batch.old_logprobs), padded(batch.rollout_logprobs)
    inputs = {
        "prompt_ids": torch.zeros(batch.samples, 1),
        "prompt_mask": torch.ones(batch.samples, 1),
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    if icepop_beta is not None:
        ratio = (old - inference).exp()
        outside = (ratio < 1 / icepop_beta) | (ratio > icepop_beta)
        inputs["importance_sampling_ratio"] = ratio.masked_fill(outside, 0.0)
    if kl_coefficient:
        inputs["ref_per_token_logps"] = padded(batch.ref_logprobs)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (per_token, torch.zeros(shape), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        beta=kl_coefficient,
        use_vllm=icepop_beta is not None,
        vllm_importance_sampling_correction=True,
    )
    loss: Tensor = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    return loss


def _rows_and_columns(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    rows = to_tokens(torch.arange(batch.samples), batch.cu_seqlens)
    return rows, torch.arange(len(rows)) - batch.cu_seqlens[rows]
