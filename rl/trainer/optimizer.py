"""Megatron's distributed Adam: each data-parallel rank keeps the fp32 main weights and moments of its share alone.

    gradients, reduce-scattered ─► norm ─► clip ─► Adam on this rank's shards ─► model weights ─► all-gather

A shard is a range of one flattened parameter, so that a rank's share is even whatever the shapes. It is used for one
data-parallel rank too (the shard is then the whole parameter): state and checkpoints look the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor

from rl.trainer import platform
from rl.trainer.config import OptimizerConfig
from rl.trainer.result import NonFiniteUpdateError

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rl.trainer.model import DTYPES

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """This rank's range ``[begin, end)`` of a flattened parameter of the model."""

    parameter: Tensor
    begin: int
    end: int
    model: Tensor
    """The range itself, in the model's dtype; a view of the model's weights."""
    main: Float32[Tensor, " range"]
    """What Adam steps; the same memory as ``model`` where the model is fp32."""
    state: dict[str, Tensor]
    """Adam's: ``step``, ``exp_avg``, ``exp_avg_sq``."""


class Optimizer:
    """Steps the parameters of data-parallel modules (one for each virtual pipeline stage) whose gradients are reduced
    already."""

    def __init__(self, modules: Sequence[DistributedDataParallel], options: OptimizerConfig, dtype: str) -> None:
        self.clip_grad = options.clip_grad
        self.modules = list(modules)
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
                use_distributed_optimizer=True,
            ),
            self.modules,
            use_gloo_process_groups=False,
        )
        self.parts: list[DistributedOptimizer] = [
            part for part in self.inner.chained_optimizers if not part.is_stub_optimizer
        ]
        for part in self.parts:
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
            _complete_state(part.optimizer)
        self.shards = [shard for part in self.parts for shard in _shards(part)]
        copies = [shard for shard in self.shards if shard.model.data_ptr() != shard.main.data_ptr()]
        self._model, self._main = [s.model for s in copies], [s.main for s in copies]

    def zero_grad(self) -> None:
        """Forget the gradients of the model and of the shards."""
        for module in self.modules:
            module.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clip and apply the gradients at this rate; returns their L2 norm before clipping.

        Raises:
            NonFiniteUpdateError: the norm is NaN or infinite. No weight and no moment has changed.
        """
        self.inner.prepare_grads()
        norm = self._norm()
        if not math.isfinite(norm):
            raise NonFiniteUpdateError(f"gradient norm {norm}")
        if 0 < self.clip_grad < norm and self.shards:
            gradients = [gradient for shard in self.shards if (gradient := shard.main.grad) is not None]
            torch._foreach_mul_(gradients, self.clip_grad / (norm + 1e-6))
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.optimizer.step()
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank's model the weights that the shards' main weights say."""
        if self._model:
            torch._foreach_copy_(self._model, self._main)
        if any(part.data_parallel_group.size() > 1 for part in self.parts):
            for module in self.modules:
                module.start_param_sync()

    def _norm(self) -> float:
        """Of the whole gradient. The one place of a step where the host waits for the device."""
        device = platform.device()
        total = torch.zeros((), device=device)
        for part in self.inner.chained_optimizers:
            gradients = [] if part.is_stub_optimizer else part.get_main_grads_for_grad_norm()
            norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1, device=device)
            square = norms.square().sum()
            dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
            total += square
        return math.sqrt(float(total))

    @property
    def adam_steps(self) -> int:
        """Steps since the moments were made or reset."""
        return int(self.shards[0].state["step"]) if self.shards else 0

    def set_adam_steps(self, steps: int) -> None:
        for shard in self.shards:
            shard.state["step"].fill_(steps)

    def reset_moments(self) -> None:
        """Forget both moments and their step count (bias correction starts again)."""
        for shard in self.shards:
            for name in MOMENTS:
                shard.state[name].zero_()
        self.set_adam_steps(0)


def _complete_state(adam: torch.optim.Optimizer) -> None:
    """Give every parameter the moments that Adam would create at its first step, so that a checkpoint has the same
    tensors before and after it."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            state["step"] = torch.zeros((), device=parameter.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _shards(part: DistributedOptimizer) -> Iterator[Shard]:
    """The pieces that Megatron assigns to this rank."""
    groups = (
        (part.model_float16_groups, part.shard_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups, part.shard_fp32_groups),
    )
    for parameters, model, main in groups:
        for of_group in zip(parameters, model, main, strict=True):
            for parameter, model_shard, main_shard in zip(*of_group, strict=True):
                span = part._get_model_param_range_map(parameter)["param"]
                state = part.optimizer.state[main_shard]
                yield Shard(parameter, span.start, span.end, model_shard.detach(), main_shard, state)
