"""Which modules a pipeline stage is built of.

Linear layers come from Transformer Engine where it is installed and from Megatron's own otherwise; attention, norms and
layers are ours, since they know our packing and compute what the Hugging Face models do.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset

from rl.trainer.dense_layer import DenseLayer
from rl.trainer.families.base import Family
from rl.trainer.layers import RMSNorm
from rl.trainer.moe import Layer, dense_spec, moe_spec


def backend() -> BackendSpecProvider:
    """Where linear layers come from in this process."""
    return TESpecProvider() if HAVE_TE else LocalSpecProvider()


def block_spec(
    family: Family, hf: PretrainedConfig, config: TransformerConfig, chunk: int
) -> TransformerBlockSubmodules:
    """The layers of one of this rank's stages, which ``chunk`` counts."""
    vp_stage = chunk if config.virtual_pipeline_model_parallel_size else None
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(family, hf, layer) for layer in layers], layer_norm=RMSNorm
    )


def _layer_spec(family: Family, hf: PretrainedConfig, layer: int) -> ModuleSpec:
    linears = backend()
    moe = family.moe_layers(hf)[layer]
    return ModuleSpec(
        module=DenseLayer if family.plain(hf) and not moe else Layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=family.attention_spec(hf, layer, linears),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=moe_spec(linears) if moe else dense_spec(linears),
            mlp_bda=get_bias_dropout_add,
        ),
    )
