"""Megatron's Adam: fp32 moments, fp32 main weights under bfloat16, the gradient clipped by its global norm."""

from __future__ import annotations

import math

import torch

from rl.trainer import platform
from rl.trainer.config import OptimizerConfig
from rl.trainer.result import NonFiniteUpdateError

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from rl.trainer.model import DTYPES


class Optimizer:
    """Steps the parameters of one data-parallel module with gradients that are reduced already."""

    def __init__(self, module: DistributedDataParallel, options: OptimizerConfig, dtype: str) -> None:
        self.clip_grad = options.clip_grad
        self.inner = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                min_lr=options.lr * options.min_lr_ratio,
                adam_beta1=options.betas[0],
                adam_beta2=options.betas[1],
                adam_eps=options.eps,
                weight_decay=options.weight_decay,
                clip_grad=options.clip_grad,
                params_dtype=DTYPES[dtype],
                bf16=dtype == "bfloat16",
            ),
            [module],
            use_gloo_process_groups=False,
        )
        self._complete_state()

    def _complete_state(self) -> None:
        """Give every parameter the moments that Adam would create at its first step, so that a checkpoint has the
        same tensors before and after it."""
        for part in self.inner.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    state.setdefault("step", torch.tensor(0.0))
                    for name in ("exp_avg", "exp_avg_sq"):
                        if name not in state:
                            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def step(self, lr: float) -> float:
        """Clip and apply the gradients at this rate; returns their L2 norm before clipping.

        Raises:
            NonFiniteUpdateError: the norm is NaN or infinite. No weight and no moment has changed.
        """
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteUpdateError(f"gradient norm {norm}")
        for part in self.inner.chained_optimizers:
            parameters = part.get_parameters()
            if self.clip_grad > 0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, max_norm=self.clip_grad, total_norm=norm)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step_with_ready_grads()
        return norm

    def reset_moments(self) -> None:
        """Forget both moments and their step count (bias correction starts again)."""
        for part in self.inner.chained_optimizers:
            for state in part.optimizer.state.values():
                for name in ("step", "exp_avg", "exp_avg_sq"):
                    state[name].zero_()

    def sharded_state_dict(self, model: ShardedStateDict, loading: bool) -> ShardedStateDict:
        state = self.inner.sharded_state_dict(model, is_loading=loading)
        parts = [state] if len(self.inner.chained_optimizers) == 1 else list(state.values())
        for part in parts:
            # Megatron leaves a step count of 0 out, and torch's Adam does not load without one.
            part.get("optimizer", part)["state"].setdefault("common_step", torch.tensor(0.0))
        return state

    def load_state_dict(self, state: ShardedStateDict) -> None:
        self.inner.load_state_dict(state)
