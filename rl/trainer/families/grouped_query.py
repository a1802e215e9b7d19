"""Dense models with grouped-query attention: Qwen3 and Llama. Other families with that attention build on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PretrainedConfig

from rl.trainer import platform
from rl.trainer.config import ParallelConfig
from rl.trainer.families.base import Division, Family
from rl.trainer.families.mlp import dense_weights
from rl.trainer.layers import PackedAttention, RMSNorm
from rl.trainer.weight_forms import Form, Weight, copied, row

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec


class GroupedQueryFamily(Family):
    """Attention of ``num_attention_heads`` queries over ``num_key_value_heads`` keys and values."""

    def qk_norm(self, hf: PretrainedConfig) -> bool:
        """Whether queries and keys are normalised."""
        return False

    def qkv_bias(self, hf: PretrainedConfig) -> bool:
        return False

    def refused(self, hf: PretrainedConfig) -> dict[str, Any]:
        rotated = int(hf.head_dim * hf.rope_parameters.get("partial_rotary_factor", 1.0))
        return super().refused(hf) | {
            "attention_bias": hf.attention_bias and not self.qkv_bias(hf),
            "partial_rotary_factor": rotated != self.rotary_dim(hf),
        }

    def options(self, hf: PretrainedConfig) -> dict[str, Any]:
        return {
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": hf.head_dim,
            "qk_layernorm": self.qk_norm(hf),
            "add_qkv_bias": self.qkv_bias(hf),
        }

    def divisions(self, hf: PretrainedConfig, parallel: ParallelConfig) -> Iterable[Division]:
        yield "num_attention_heads", hf.num_attention_heads, parallel.tensor
        yield "num_key_value_heads", hf.num_key_value_heads, parallel.tensor
        yield "intermediate_size", hf.intermediate_size, parallel.tensor

    def rotary_dim(self, hf: PretrainedConfig) -> int:
        return hf.head_dim

    def plain(self, hf: PretrainedConfig) -> bool:
        return self.rotary_dim(hf) == hf.head_dim and not self.qkv_bias(hf)

    def attention_spec(self, hf: PretrainedConfig, layer: int, backend: BackendSpecProvider) -> ModuleSpec:
        norm = RMSNorm if self.qk_norm(hf) else IdentityOp
        return ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=backend.column_parallel_linear(),
                core_attention=PackedAttention,
                linear_proj=backend.row_parallel_linear(),
                q_layernorm=norm,
                k_layernorm=norm,
            ),
        )

    def attention_weights(self, hf: PretrainedConfig, layer: int) -> list[Weight]:
        hidden, head = hf.hidden_size, hf.head_dim
        heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
        rows = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head}
        fused = (kv_heads, (heads // kv_heads + 2) * head)
        matrices = {f"self_attn.{name}.weight": (count, hidden) for name, count in rows.items()}
        weights = [Weight("self_attention.linear_qkv.weight", matrices, Form.QKV, (*fused, hidden))]
        if self.qkv_bias(hf):
            biases = {f"self_attn.{name}.bias": (count,) for name, count in rows.items()}
            weights.append(Weight("self_attention.linear_qkv.bias", biases, Form.QKV, fused))
        if self.qk_norm(hf):
            weights.append(copied("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", head))
            weights.append(copied("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", head))
        weights.append(row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", hidden, heads * head))
        return weights

    def mlp_weights(self, hf: PretrainedConfig, layer: int) -> list[Weight]:
        return dense_weights(hf)


class Llama(GroupedQueryFamily):
    architecture = "LlamaForCausalLM"
    rope_types = ("default", "linear", "llama3")


class Qwen3(GroupedQueryFamily):
    architecture = "Qwen3ForCausalLM"
    rope_types = ("default", "linear", "llama3")

    def qk_norm(self, hf: PretrainedConfig) -> bool:
        return True
