"""Models that teachers' weights are put into: the student's code a second time, over memory that is not its own.

A ``TeacherModel`` is this rank's part of one architecture without storage. ``bind`` points its parameters at a
teacher's tensors, which are views of a tier's buffers; nothing is copied, and the student's parameters are never
touched. One model serves all teachers of an architecture. Of a teacher that is larger than the tier a layer at a time
is bound, in ``streamed``, when its turn comes in the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from rl.trainer import platform
from rl.trainer.config import TrainerConfig

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state

from rl.trainer.convert import rank_state
from rl.trainer.model import PolicyModel, build_chunks
from rl.trainer.unstored import nothing

Groups = Iterable[tuple[str, Mapping[str, Tensor]]]
"""A teacher's tensors in the order of the forward pass, each group valid until the next; each iteration begins anew."""


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

    def __init__(self, hf: PretrainedConfig, config: TrainerConfig, streams: bool = False) -> None:
        """
        Args:
            streams: layers stay apart, so that ``streamed`` can bind one at a time.

        It takes no memory for weights, not even while it is built.
        """
        # Graphs would keep the addresses of one teacher's weights; nothing is trained, so nothing is recomputed.
        changes = {"cuda_graphs": False, "recompute": False, "trained": "model"}
        self.config = config.model_copy(update=changes | ({"layers_per_graph": 1} if streams else {}))
        self.hf, self.streams = hf, streams
        self.models = build_chunks(hf, self.config, stored=False)
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
        """Without weights, so that no result could pass for a teacher's."""
        for name, tensor in self._tensors.items():
            tensor.data = nothing(self.shapes[name], self.dtypes[name], platform.device())

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
        try:
            self._bind(weights)
            yield
        finally:
            self._release()

    @contextmanager
    def streamed(self, groups: Groups) -> Iterator[None]:
        """Compute with one group of tensors bound at a time: forward passes call for them, layer after layer, each pass
        anew."""
        walk = _Walk(self, groups)
        hooks = []
        for model in self.models:
            for prefix, unit in _units(model):
                hooks.append(unit.register_forward_pre_hook(walk.before(f"{model.stage}/{prefix}")))
            if model.post_process:
                hooks.append(model.decoder.final_layernorm.register_forward_hook(walk.before(self._head(model))))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            walk.close()
            self._release()

    def _head(self, model: PolicyModel) -> str:
        """Name of the output projection."""
        own = f"{model.stage}/output_layer.weight"
        return own if own in self.shapes else f"{model.stage}/embedding.word_embeddings.weight"

    def _bind(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in weights.items():
            wanted = (self.dtypes[name], self.shapes[name])
            if (tensor.dtype, tensor.shape) != wanted:
                raise ValueError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)} in place of {wanted[0]} {list(wanted[1])}"
                )
        for name, tensor in weights.items():
            self._tensors[name].data = tensor


class _Walk:
    """Goes over a teacher's groups as the modules of a forward pass ask for them."""

    def __init__(self, model: TeacherModel, groups: Groups) -> None:
        self._model, self._groups = model, groups
        self._rest = self._begin()
        self._bound: Mapping[str, Tensor] = {}

    def _begin(self) -> Generator[Mapping[str, Tensor], None, None]:
        for _, weights in self._groups:
            yield weights

    def before(self, prefix: str) -> Callable[..., None]:
        """A hook that binds the group of the tensors with this prefix."""

        def bind(*_: object) -> None:
            if any(name.startswith(prefix) for name in self._bound):
                return
            if not self._advance(prefix):  # behind the walk: another pass begins
                self.close()
                self._rest = self._begin()
                if not self._advance(prefix):
                    raise ValueError(f"no group has the tensors {prefix}*")

        return bind

    def _advance(self, prefix: str) -> bool:
        for weights in self._rest:
            self._model._release()
            self._bound = weights
            if any(name.startswith(prefix) for name in weights):
                self._model._bind(weights)
                return True
        self._bound = {}
        return False

    def close(self) -> None:
        self._rest.close()
        self._bound = {}


def _units(model: PolicyModel) -> Iterator[tuple[str, nn.Module]]:
    """What is bound together, in the order of the forward pass, and the prefix of its tensors' names."""
    if model.pre_process:
        yield "embedding.", model.embedding
    for index, layer in enumerate(model.decoder.layers):
        yield f"decoder.layers.{index}.", layer
    if model.post_process:
        yield "decoder.final_layernorm.", model.decoder.final_layernorm


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
