"""Models that teachers' weights are put into: the student's code a second time, over memory that is not its own.

A ``TeacherModel`` is this rank's part of one architecture without storage. ``bind`` points its parameters at a
teacher's tensors, which are views of a tier's buffers; nothing is copied, and the student's parameters are never
touched. One model serves all teachers of an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rl.trainer import platform
from rl.trainer.config import TrainerConfig

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state

from rl.trainer.convert import rank_state
from rl.trainer.model import PolicyModel, build_chunks

NOT_OF_THE_ARCHITECTURE = (
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "architectures",
    "use_cache",
)
"""Keys of a config that two models of one architecture may differ in."""


def architecture(hf: PretrainedConfig) -> str:
    """Equal for configs whose models have the same code and shapes."""
    settings = {k: v for k, v in hf.to_dict().items() if k not in NOT_OF_THE_ARCHITECTURE and "token_id" not in k}
    return repr((hf.architectures, sorted(settings.items(), key=lambda item: item[0])))


class _Stage(nn.Module):
    """Stands where Megatron's schedules expect a wrapper with gradient buffers."""

    def __init__(self, model: PolicyModel) -> None:
        super().__init__()
        self.module = model
        self.config = model.config

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return self.module(*inputs, **named)


class TeacherModel:
    """This rank's stages of one architecture."""

    def __init__(self, hf: PretrainedConfig, config: TrainerConfig) -> None:
        # Graphs would keep the addresses of one teacher's weights; nothing is trained, so nothing is recomputed.
        self.config = config.model_copy(update={"cuda_graphs": False, "recompute": False, "trained": "model"})
        self.hf = hf
        self.models = build_chunks(hf, self.config)
        self.stages: list[Any] = []
        self._tensors: dict[str, Tensor] = {}
        for model in self.models:
            model.eval()
            model.requires_grad_(False)
            self.stages.append(_Stage(model))
            for name, tensor in rank_state(model).items():
                self._tensors[f"{model.stage}/{name}"] = tensor
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        self._release()

    def _release(self) -> None:
        """Without weights: of one number each, which is none, so that no result could pass for a teacher's."""
        for name, tensor in self._tensors.items():
            nothing = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device)
            tensor.data = nothing.expand(self.shapes[name])

    @property
    def nbytes(self) -> int:
        return sum(shape.numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    @contextmanager
    def bound(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute with these tensors, views of which the parameters are until the end.

        Raises:
            ValueError: they are not this model's.
        """
        if weights.keys() != self.shapes.keys():
            raise ValueError(f"tensors that are not this model's: {sorted(weights.keys() ^ self.shapes.keys())[:5]}")
        for name, tensor in weights.items():
            wanted = (self.dtypes[name], self.shapes[name])
            if (tensor.dtype, tensor.shape) != wanted:
                raise ValueError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)} in place of {wanted[0]} {list(wanted[1])}"
                )
        try:
            for name, tensor in weights.items():
                self._tensors[name].data = tensor
            yield
        finally:
            self._release()


def shard_name(config: TrainerConfig) -> str:
    """Of this rank's part of any model: ranks with the same name have the same tensors."""
    parallel, ranks = config.parallel, parallel_state
    places = {
        "tp": (ranks.get_tensor_model_parallel_rank(), parallel.tensor),
        "pp": (ranks.get_pipeline_model_parallel_rank(), parallel.pipeline),
        "ep": (ranks.get_expert_model_parallel_rank(), parallel.expert),
        "etp": (ranks.get_expert_tensor_parallel_rank(), parallel.expert_tensor),
    }
    parts = [f"{name}{rank}of{size}" for name, (rank, size) in places.items()]
    return ".".join([*parts, f"vp{parallel.virtual_pipeline}", config.dtype])
