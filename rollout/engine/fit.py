"""Whether an engine's settings fit a model and a number of GPUs; every line names the settings to change."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.engine import expert_tiles, hisparse
from rollout.engine.config import EngineConfig
from rollout.engine.launch import server_specs
from rollout.engine.model_shape import ModelShape


def problems(config: EngineConfig, shape: ModelShape, gpus: int | None = None) -> Iterator[str]:
    """What does not fit, each beginning with a key.

    Args:
        gpus: there are in all; None is not checked.
    """
    if config.context_length > shape.max_context:
        yield (
            f"engine.context_length={config.context_length} is more than the model has positions for "
            f"(max_position_embeddings={shape.max_context}): lower it"
        )
    if gpus is not None and config.device == "cuda":
        yield from _gpu_problems(config, gpus)
    if shape.model_type == "qwen3_moe" and shape.experts is not None and shape.experts.dense_layers:
        yield (
            "model: SGLang gives every layer of a qwen3_moe model experts, at random where the checkpoint has none "
            f"(seen with 0.5.23): it can't serve one with {shape.experts.dense_layers} dense layers (mlp_only_layers, "
            "decoder_sparse_step)"
        )
    for role in config.roles:
        prefix = "engine" if role == "both" else f"engine.disaggregation.{role}"
        settings = config.for_role(role)
        yield from _division_problems(prefix, settings, shape)
        yield from (f"engine.{problem}" for problem in expert_tiles.problems(settings, shape))
        if settings.hisparse is not None:
            for problem in hisparse.model_problems(settings.hisparse, shape.index_topk, shape.model_type):
                yield f"engine.{problem}"


def gpus_needed(config: EngineConfig) -> int:
    """GPUs of all servers together."""
    return max(spec.first_gpu + spec.settings.tensor_parallel for spec in server_specs(config))


def _gpu_problems(config: EngineConfig, gpus: int) -> Iterator[str]:
    needed = gpus_needed(config)
    if needed > gpus:
        servers = ", ".join(
            f"{config.servers_of(role)} x {config.for_role(role).tensor_parallel}"
            + ("" if role == "both" else f" for {role}")
            for role in config.roles
        )
        yield (
            f"gpus={gpus} are fewer than the {needed} that the servers take (servers x tensor_parallel: {servers}): "
            "lower engine.tensor_parallel or engine.servers, or give more GPUs"
        )


def _division_problems(prefix: str, config: EngineConfig, shape: ModelShape) -> Iterator[str]:
    tp, dp = config.tensor_parallel, config.data_parallel_attention
    group = tp // dp
    width = f"{prefix}.tensor_parallel={tp}" + (f" / data_parallel_attention={dp} = {group}" if dp > 1 else "")
    if shape.heads % group:
        yield f"{width} does not divide the model's {shape.heads} attention heads: choose a divisor"
    elif shape.latent is None and shape.kv_heads % group and group % shape.kv_heads:
        yield f"{width} neither divides the model's {shape.kv_heads} KV heads nor is a multiple: choose one that does"
    if shape.mlp_width % tp:
        yield f"{prefix}.tensor_parallel={tp} does not divide the model's intermediate_size={shape.mlp_width}"
    experts = shape.experts
    if config.expert_parallel > 1:
        if experts is None:
            yield f"{prefix}.expert_parallel={config.expert_parallel}, but {shape.model_type} has no experts: set 1"
        elif experts.routed % config.expert_parallel:
            yield f"{prefix}.expert_parallel={config.expert_parallel} does not divide the {experts.routed} experts"
    elif experts is not None and experts.width % tp:
        yield (
            f"{prefix}.tensor_parallel={tp} does not divide the experts' moe_intermediate_size={experts.width}: choose "
            f"a divisor, or set {prefix}.expert_parallel={tp}"
        )
