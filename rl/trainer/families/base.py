"""What the trainer asks of a family of models. A new family is one subclass, listed in ``registry``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PretrainedConfig

from rl.trainer import platform
from rl.trainer.config import ParallelConfig
from rl.trainer.stages import stage_problem
from rl.trainer.weight_forms import Weight

platform.install()

from megatron.core.models.backends import BackendSpecProvider  # noqa: E402  (needs the platform)
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402

Division = tuple[str, int, int]
"""Name of a setting, its value, and the parallel size that must divide it."""


class UnsupportedModelError(ValueError):
    """The Hugging Face config, or this layout of it, is something that the trainer does not compute."""


class Family(ABC):
    """One Hugging Face architecture."""

    architecture: str
    """Name of its class with the language-model head."""
    rope_types: tuple[str, ...] = ("default",)
    attends_in_rows: bool = False
    """Whether its attention reads ``Packing.buckets`` on every device."""

    def refused(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Settings that must be false, by name, with their values."""
        settings = hf.to_dict()
        return {name: settings.get(name) for name in ("mlp_bias", "use_sliding_window", "attention_dropout")}

    @abstractmethod
    def options(self, hf: PretrainedConfig) -> dict[str, Any]:
        """Options of Megatron's ``TransformerConfig`` beside the common ones."""

    @abstractmethod
    def divisions(self, hf: PretrainedConfig, parallel: ParallelConfig) -> Iterable[Division]:
        """What the layout must divide."""

    def check_layout(self, hf: PretrainedConfig, parallel: ParallelConfig) -> None:
        """Refuse a layout under which the model can't be computed.

        Raises:
            UnsupportedModelError: names the settings and their values.
        """
        problem = stage_problem(hf.num_hidden_layers, self.indexer_types(hf), parallel.stages)
        if problem is not None:
            raise UnsupportedModelError(problem)
        for name, count, by in self.divisions(hf, parallel):
            if count % by:
                raise UnsupportedModelError(f"{name} {count} is not a multiple of its parallel size {by}")

    def indexer_types(self, hf: PretrainedConfig) -> Sequence[str] | None:
        """Of each layer's sparse attention, "full" where it has an indexer of its own; None for a family without."""
        return None

    @abstractmethod
    def rotary_dim(self, hf: PretrainedConfig) -> int:
        """Dimensions of a head that are rotated."""

    def moe_layers(self, hf: PretrainedConfig) -> list[bool]:
        """For each layer whether it has routed experts."""
        return [False] * hf.num_hidden_layers

    def plain(self, hf: PretrainedConfig) -> bool:
        """Whether a layer without experts is what ``DenseLayer`` computes."""
        return False

    @abstractmethod
    def attention_spec(self, hf: PretrainedConfig, layer: int, backend: BackendSpecProvider) -> ModuleSpec:
        """The attention module of a layer (counted from 0)."""

    @abstractmethod
    def attention_weights(self, hf: PretrainedConfig, layer: int) -> list[Weight]:
        """Its tensors, with names relative to the layer."""

    @abstractmethod
    def mlp_weights(self, hf: PretrainedConfig, layer: int) -> list[Weight]:
        """The tensors of a layer's MLP or experts, with names relative to the layer."""
