"""Mixture-of-experts models with grouped-query attention: Qwen3-MoE and GLM-4.5."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PretrainedConfig

from rl.trainer.config import ParallelConfig
from rl.trainer.families.base import Division, UnsupportedModelError
from rl.trainer.families.grouped_query import GroupedQueryFamily
from rl.trainer.families.mlp import dense_weights, moe_weights
from rl.trainer.weight_forms import Weight


def moe_divisions(hf: PretrainedConfig, experts: int, parallel: ParallelConfig) -> Iterable[Division]:
    """What the layout must divide in any model with routed experts.

    Raises:
        UnsupportedModelError: tensor parallelism without sequence parallelism.
    """
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        # Megatron's dispatcher would send every token once for each tensor-parallel rank.
        raise UnsupportedModelError("a model with experts under tensor parallelism needs parallel.sequence_parallel")
    yield "number of experts", experts, parallel.expert
    yield "moe_intermediate_size", hf.moe_intermediate_size, parallel.expert_tensor


def sigmoid_router(hf: PretrainedConfig) -> dict[str, Any]:
    """Megatron's options for scores by sigmoid, a bias on the choice, and shared experts (GLM, DeepSeek)."""
    shared = hf.n_shared_experts * hf.moe_intermediate_size
    return {
        "num_moe_experts": hf.n_routed_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_shared_expert_intermediate_size": shared or None,
    }


def refuse_unlike_glm(hf: PretrainedConfig) -> dict[str, Any]:
    """Router settings that ``sigmoid_router`` does not stand for."""
    return {
        "n_group > 1": hf.n_group > 1,
        "norm_topk_prob = False": not hf.norm_topk_prob,
        "num_experts_per_tok = 1": hf.num_experts_per_tok == 1,
    }


class Qwen3Moe(GroupedQueryFamily):
    architecture = "Qwen3MoeForCausalLM"

    def qk_norm(self, hf: PretrainedConfig) -> bool:
        return True

    def options(self, hf: PretrainedConfig) -> dict[str, Any]:
        return super().options(hf) | {
            "num_moe_experts": hf.num_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_score_function": "softmax",
            # Softmax over all experts and normalising the chosen is softmax over the chosen.
            "moe_router_pre_softmax": not hf.norm_topk_prob,
        }

    def divisions(self, hf: PretrainedConfig, parallel: ParallelConfig) -> Iterable[Division]:
        yield from super().divisions(hf, parallel)
        yield from moe_divisions(hf, hf.num_experts, parallel)

    def moe_layers(self, hf: PretrainedConfig) -> list[bool]:
        every, dense = hf.decoder_sparse_step, hf.mlp_only_layers or ()
        return [layer not in dense and (layer + 1) % every == 0 for layer in range(hf.num_hidden_layers)]

    def mlp_weights(self, hf: PretrainedConfig, layer: int) -> list[Weight]:
        if not self.moe_layers(hf)[layer]:
            return dense_weights(hf)
        return moe_weights(hf, hf.num_experts, bias=False, shared=0)


class Glm4Moe(GroupedQueryFamily):
    architecture = "Glm4MoeForCausalLM"

    def qk_norm(self, hf: PretrainedConfig) -> bool:
        return hf.use_qk_norm

    def qkv_bias(self, hf: PretrainedConfig) -> bool:
        return hf.attention_bias

    def refused(self, hf: PretrainedConfig) -> dict[str, Any]:
        return super().refused(hf) | refuse_unlike_glm(hf)

    def options(self, hf: PretrainedConfig) -> dict[str, Any]:
        return super().options(hf) | sigmoid_router(hf)

    def divisions(self, hf: PretrainedConfig, parallel: ParallelConfig) -> Iterable[Division]:
        yield from super().divisions(hf, parallel)
        yield from moe_divisions(hf, hf.n_routed_experts, parallel)

    def rotary_dim(self, hf: PretrainedConfig) -> int:
        return int(hf.head_dim * hf.rope_parameters.get("partial_rotary_factor", 1.0))

    def moe_layers(self, hf: PretrainedConfig) -> list[bool]:
        return [layer >= hf.first_k_dense_replace for layer in range(hf.num_hidden_layers)]

    def mlp_weights(self, hf: PretrainedConfig, layer: int) -> list[Weight]:
        if not self.moe_layers(hf)[layer]:
            return dense_weights(hf)
        return moe_weights(hf, hf.n_routed_experts, bias=True, shared=hf.n_shared_experts)
