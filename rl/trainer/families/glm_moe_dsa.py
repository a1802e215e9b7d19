"""GLM-5: latent attention over the positions that an indexer selects, shared by groups of layers; GLM-4.5's experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PretrainedConfig

from rl.trainer import platform, stages
from rl.trainer.config import ParallelConfig
from rl.trainer.families.base import Division, Family, UnsupportedModelError
from rl.trainer.families.mlp import dense_weights, moe_weights
from rl.trainer.families.moe import moe_divisions, refuse_unlike_glm, sigmoid_router
from rl.trainer.indexer import IndexerShape
from rl.trainer.latent_attention import LatentAttention, LatentLinears, LatentShape
from rl.trainer.weight_forms import Weight, column, copied, row

platform.install()

from megatron.core.models.backends import BackendSpecProvider  # noqa: E402  (needs the platform)
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402


def selecting_layer(hf: PretrainedConfig, layer: int) -> int:
    """See ``stages.selecting_layer``.

    Raises:
        UnsupportedModelError: no layer up to this one has an indexer.
    """
    try:
        return stages.selecting_layer(hf.indexer_types, layer)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error


class GlmMoeDsa(Family):
    architecture = "GlmMoeDsaForCausalLM"
    attends_in_rows = True

    def refused(self, hf: PretrainedConfig) -> dict[str, Any]:
        return (
            super().refused(hf)
            | refuse_unlike_glm(hf)
            | {"attention_bias": hf.attention_bias, "tie_word_embeddings": hf.tie_word_embeddings}
            # True in GLM-5's own config; SGLang takes a missing one for False, Hugging Face's class for True.
            | {"indexer_rope_interleave = False": not hf.to_dict().get("indexer_rope_interleave", True)}
        )

    def indexer_types(self, hf: PretrainedConfig) -> Sequence[str]:
        selecting_layer(hf, 0)
        types: Sequence[str] = hf.indexer_types
        return types

    def options(self, hf: PretrainedConfig) -> dict[str, Any]:
        return sigmoid_router(hf)

    def divisions(self, hf: PretrainedConfig, parallel: ParallelConfig) -> Iterable[Division]:
        yield "num_attention_heads", hf.num_attention_heads, parallel.tensor
        yield "intermediate_size", hf.intermediate_size, parallel.tensor
        yield from moe_divisions(hf, hf.n_routed_experts, parallel)

    def rotary_dim(self, hf: PretrainedConfig) -> int:
        return hf.qk_rope_head_dim

    def moe_layers(self, hf: PretrainedConfig) -> list[bool]:
        return [kind == "sparse" for kind in hf.mlp_layer_types]

    def attention_spec(self, hf: PretrainedConfig, layer: int, backend: BackendSpecProvider) -> ModuleSpec:
        shape = LatentShape(
            heads=hf.num_attention_heads,
            query_rank=hf.q_lora_rank,
            kv_rank=hf.kv_lora_rank,
            unrotated=hf.qk_nope_head_dim,
            rotated=hf.qk_rope_head_dim,
            value=hf.v_head_dim,
            indexer=IndexerShape(
                heads=hf.index_n_heads,
                dim=hf.index_head_dim,
                rotary=hf.qk_rope_head_dim,
                top_k=hf.index_topk,
                query_rank=hf.q_lora_rank,
            ),
        )
        return ModuleSpec(
            module=LatentAttention,
            params={"shape": shape, "selects": selecting_layer(hf, layer)},
            submodules=LatentLinears(column=backend.column_parallel_linear(), row=backend.row_parallel_linear()),
        )

    def attention_weights(self, hf: PretrainedConfig, layer: int) -> list[Weight]:
        hidden, heads, low = hf.hidden_size, hf.num_attention_heads, hf.q_lora_rank
        latent, rotated, value = hf.kv_lora_rank, hf.qk_rope_head_dim, hf.v_head_dim
        ours, theirs = "self_attention.", "self_attn."
        query, kv = heads * (hf.qk_nope_head_dim + rotated), heads * (hf.qk_nope_head_dim + value)
        weights = [
            copied(f"{ours}linear_q_down_proj.weight", f"{theirs}q_a_proj.weight", low, hidden),
            copied(f"{ours}q_layernorm.weight", f"{theirs}q_a_layernorm.weight", low),
            column(f"{ours}linear_q_up_proj.weight", f"{theirs}q_b_proj.weight", query, low),
            copied(f"{ours}linear_kv_down_proj.weight", f"{theirs}kv_a_proj_with_mqa.weight", latent + rotated, hidden),
            copied(f"{ours}kv_layernorm.weight", f"{theirs}kv_a_layernorm.weight", latent),
            column(f"{ours}linear_kv_up_proj.weight", f"{theirs}kv_b_proj.weight", kv, latent),
            row(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", hidden, heads * value),
        ]
        if selecting_layer(hf, layer) == layer:
            size, count = hf.index_head_dim, hf.index_n_heads
            shapes = {
                "wq_b.weight": (count * size, low),
                "wk.weight": (size, hidden),
                "k_norm.weight": (size,),
                "k_norm.bias": (size,),
                "weights_proj.weight": (count, hidden),
            }
            weights += [copied(f"{ours}indexer.{n}", f"{theirs}indexer.{n}", *shape) for n, shape in shapes.items()]
        return weights

    def mlp_weights(self, hf: PretrainedConfig, layer: int) -> list[Weight]:
        if not self.moe_layers(hf)[layer]:
            return dense_weights(hf)
        return moe_weights(hf, hf.n_routed_experts, bias=True, shared=hf.n_shared_experts)
