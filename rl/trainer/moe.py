"""Routed experts: Megatron's, with a router that can be told what the engine chose.

A trajectory may carry the experts that the engine routed each of its tokens to. Training on them then sends the tokens
to the same experts, whose weights in the sum still come from the trainer's own scores, so that the router learns. Where
the record has a negative number (padding, a token that the engine never put through the model) the router chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from rl.trainer.experts import Experts
from rl.trainer.packing import Packing

NOT_RECORDED = -1
"""In a record of routed experts: the router's own choice is taken."""


class _Replay:
    """Answers in the place of ``torch.topk`` where Megatron's routing function chooses experts."""

    def __init__(self, experts: Int[Tensor, "tokens top_k"]) -> None:
        self.experts = experts

    def get_replay_topk(
        self,
        scores: Float[Tensor, "tokens experts"],
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Float[Tensor, "tokens top_k"], Int[Tensor, "tokens top_k"]]:
        _, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = torch.where(self.experts >= 0, self.experts, own)
        return scores.gather(1, chosen), chosen


class Router(TopKRouter):
    """Megatron's router with replay, and with the bias on the choice as a constant: Megatron would move it after each
    step towards an even load, which reinforcement learning leaves alone."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        if config.moe_router_score_function == "sigmoid":
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts, dtype=torch.float32))

    def gating(self, input: Float[Tensor, "seq 1 hidden"]) -> Float[Tensor, "seq 1 experts"]:
        """Logits in fp32, whatever the model's type. (Megatron's own fails without Transformer Engine.)"""
        return F.linear(input.float(), self.weight.float())

    def follow(self, packing: Packing, layer_number: int) -> None:
        """Take the record of this layer (counted from 1) for the next forward pass, if there is one."""
        self.router_replay = None
        if packing.routed_experts is None:
            return
        experts = packing.routed_experts[:, layer_number - 1]
        if self.config.sequence_parallel:
            experts = experts.chunk(self.tp_group.size())[self.tp_group.rank()]
        self.router_replay = _Replay(experts.long())


class Layer(TransformerLayer):
    """Megatron's layer; it hands the micro-batch's packing to its router, which Megatron tells nothing of it. Here and
    not in the model, so that a layer that is recomputed in the backward pass of another micro-batch follows its own."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.mlp, MoELayer):
            self.mlp.router.follow(kwargs["packed_seq_params"], self.layer_number)
        return super().forward(*args, **kwargs)


def dense_spec(backend: BackendSpecProvider) -> ModuleSpec:
    return ModuleSpec(module=MLP, submodules=_linears(backend))


def moe_spec(backend: BackendSpecProvider) -> ModuleSpec:
    _, submodules = backend.grouped_mlp_modules(False, False)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=Experts, submodules=submodules),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_linears(backend)),
            router=Router,
        ),
    )


def _linears(backend: BackendSpecProvider) -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())


def check_record(experts: Int[Tensor, "tokens layers top_k"], config: TransformerConfig) -> None:
    """Refuse a record of routed experts that is not of this model.

    Raises:
        ValueError: names both shapes, or the expert that the model has not.
    """
    if config.num_moe_experts is None:
        raise ValueError("the trajectories carry routed experts, but the model has none")
    expected = (config.num_layers, config.moe_router_topk)
    if experts.shape[1:] != expected:
        raise ValueError(f"routed_experts has {list(experts.shape[1:])} (layers, top_k), the model {list(expected)}")
    largest = int(experts.max()) if len(experts) else 0
    if largest >= config.num_moe_experts:
        raise ValueError(f"routed_experts names expert {largest}, the model has {config.num_moe_experts}")
