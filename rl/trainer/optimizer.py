"""Megatron's distributed Adam: each data-parallel rank keeps the fp32 main weights and moments of its share alone.

    gradients, reduce-scattered ─► norm ─► Adam, which clips, on this rank's shards ─► model weights ─► all-gather

A shard is a range of one flattened parameter, so that a rank's share is even whatever the shapes. It is used for one
data-parallel rank too (the shard is then the whole parameter): state and checkpoints look the same everywhere.

Megatron says which shards there are; the step itself is a few operations on lists of tensors that are made once. The
norm stays on the device, where Adam divides by it or, if it is not finite, does nothing: the host reads it last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
NORM_EPS = 1e-6
"""Added to the norm that clipping divides by, as PyTorch and Megatron do."""


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


@dataclass(frozen=True)
class _Group:
    """Shards with the same options, as Adam's kernel takes them."""

    main: list[Tensor]
    gradients: list[Tensor]
    """Views of the model's gradient buffers, which stay where they are."""
    moments: tuple[list[Tensor], list[Tensor]]
    model: list[Tensor | None]
    """Where the model has its copy of ``main``; None where that is the model's own memory."""
    weight_decay: float


class Optimizer:
    """Steps the parameters of data-parallel modules (one for each virtual pipeline stage) whose gradients are reduced
    already."""

    def __init__(
        self,
        modules: Sequence[DistributedDataParallel],
        options: OptimizerConfig,
        dtype: str,
        written_out: bool = False,
    ) -> None:
        """
        Args:
            written_out: on CUDA, Adam is our kernel in place of PyTorch's.
        """
        self.clip_grad = options.clip_grad
        self.modules = list(modules)
        self._parameters = [parameter for module in self.modules for parameter in module.parameters()]
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
        self._options = options
        self._step = torch.zeros((), device=platform.device())
        """Adam's count, the same for all."""
        for part in self.parts:
            _complete_state(part.optimizer, self._step)
        self.shards = [shard for part in self.parts for shard in _shards(part)]
        self.inner.prepare_grads()  # gives each main weight its range of the gradient buffer
        copies = [shard for shard in self.shards if shard.model.data_ptr() != shard.main.data_ptr()]
        self._model, self._main = [s.model for s in copies], [s.main for s in copies]
        model = {shard.main.data_ptr(): shard.model for shard in copies}
        self._groups = [_group(part, group, model) for part in self.parts for group in part.optimizer.param_groups]
        self._written_out = written_out and platform.device().type == "cuda"
        self._normed = [
            (part.get_grad_stats_parallel_group(), [] if part.is_stub_optimizer else _counted_gradients(part))
            for part in self.inner.chained_optimizers
        ]

    def zero_grad(self) -> None:
        """Forget the gradients of the model."""
        for module in self.modules:
            module.zero_grad_buffer()
        for parameter in self._parameters:
            parameter.grad = None  # what a pass left that did not come to its end

    def step(self, lr: float) -> float:
        """``start``, and what ``check`` says of it."""
        return self.check(self.start(lr))

    @torch.no_grad()
    def start(self, lr: float, loss: Tensor | None = None) -> Float32[Tensor, ""]:
        """Clip and apply the gradients at this rate; returns their L2 norm before clipping, on the device, for which
        the host has not waited. Where it is NaN or infinite no weight and no moment changes.

        Args:
            loss: this rank's part; the norm is NaN or infinite where that is.
        """
        norm = self._norm(loss)
        skipped = norm.isfinite().logical_not_().float()
        divisor = ((norm + NORM_EPS) / self.clip_grad).clamp_(min=1.0) if self.clip_grad else None
        self._step += 1.0 - skipped
        if self._written_out:
            self._step_written_out(lr, skipped, divisor)
            self._share()
        else:
            self._step_fused(lr, skipped, divisor)
            self.publish()
        return norm

    def _step_fused(self, lr: float, skipped: Tensor, divisor: Tensor | None) -> None:
        for group in self._groups:
            if group.main:
                torch._fused_adamw_(
                    group.main,
                    group.gradients,
                    *group.moments,
                    [],
                    [self._step] * len(group.main),
                    lr=lr,
                    beta1=self._options.betas[0],
                    beta2=self._options.betas[1],
                    weight_decay=group.weight_decay,
                    eps=self._options.eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=divisor,
                    found_inf=skipped,
                )

    def _step_written_out(self, lr: float, skipped: Tensor, divisor: Tensor | None) -> None:
        """It also writes the model's weights."""
        from rl.trainer.adam_triton import facts, step_shard

        options = self._options
        read = facts(skipped, divisor, self._step, options.betas)
        for group in self._groups:
            for main, gradient, first, second, model in zip(
                group.main, group.gradients, *group.moments, group.model, strict=True
            ):
                step_shard(
                    main, gradient, (first, second), model, read, lr, group.weight_decay, options.betas, options.eps
                )

    @staticmethod
    def check(norm: Float32[Tensor, ""]) -> float:
        """Wait for the norm that ``start`` gave.

        Raises:
            NonFiniteUpdateError: it is NaN or infinite.
        """
        found = float(norm)
        if not math.isfinite(found):
            raise NonFiniteUpdateError(f"gradient norm {found}")
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank's model the weights that the shards' main weights say."""
        if self._model:
            torch._foreach_copy_(self._model, self._main)
        self._share()

    def _share(self) -> None:
        """Gather the ranks' shards of the model's weights."""
        if any(part.data_parallel_group.size() > 1 for part in self.parts):
            for module in self.modules:
                module.start_param_sync()

    def _norm(self, loss: Tensor | None) -> Float32[Tensor, ""]:
        """Of the whole gradient; NaN or infinite if the loss is on any rank."""
        total = torch.zeros((), device=platform.device())
        nothing = None if loss is None else loss.detach().float() * 0.0  # or NaN
        for group, gradients in self._normed:
            square = torch.zeros_like(total)
            if gradients:
                square = torch.stack(torch._foreach_norm(gradients)).square().sum()
            if nothing is not None:
                square = square + nothing
            if group.size() > 1:
                dist.all_reduce(square, group=group)
            total += square
        return total.sqrt()

    @property
    def adam_steps(self) -> int:
        """Steps since the moments were made or reset."""
        return int(self._step)

    def set_adam_steps(self, steps: int) -> None:
        self._step.fill_(steps)

    def reset_moments(self) -> None:
        """Forget both moments and their step count (bias correction starts again)."""
        for shard in self.shards:
            for name in MOMENTS:
                shard.state[name].zero_()
        self.set_adam_steps(0)


def _complete_state(adam: torch.optim.Optimizer, step: Tensor) -> None:
    """Give every parameter the moments that Adam would create at its first step, so that a checkpoint has the same
    tensors before and after it, and all the same count of steps."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            state["step"] = step
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _group(part: DistributedOptimizer, group: dict[str, Any], model: Mapping[int, Tensor]) -> _Group:
    """``model``: the model's copies, by the address of their main weights."""
    main = group["params"]
    states = [part.optimizer.state[parameter] for parameter in main]
    first, second = ([state[name] for state in states] for name in MOMENTS)
    copies = [model.get(parameter.data_ptr()) for parameter in main]
    return _Group(main, [parameter.grad for parameter in main], (first, second), copies, group["weight_decay"])


def _counted_gradients(part: DistributedOptimizer) -> list[Tensor]:
    """Those that this rank adds to the norm: of what several ranks hold, one counts."""
    return list(part.get_main_grads_for_grad_norm())


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
