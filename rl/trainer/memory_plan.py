"""How much memory each pipeline stage's ranks need, from the model's and the trainer's configs alone.

    parameters    the model's, in its dtype                                    exact
    gradients     fp32, of what is trained                                     exact
    optimizer     this rank's share of fp32 moments, and of main weights       exact for one data-parallel rank, else at
                  where the model is not fp32                                  most a few padding elements too many
    activations   of the micro-batches in flight, at max_tokens_per_micro_batch   within ACTIVATION_TOLERANCE
    head          one chunk's logits and slopes, and slopes that are kept      exact, if all tokens of a micro-batch are
                                                                               scored

Activations are counted as what a layer keeps for its backward pass. Not counted: the framework's own memory, what lives
within one operation, and what the CPU makes of logits whose vocabulary is spread over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PretrainedConfig

from rl.trainer import platform
from rl.trainer.config import TrainerConfig
from rl.trainer.convert import weights_of
from rl.trainer.families.registry import family_of
from rl.trainer.model import DTYPES
from rl.trainer.token_logprobs import kept_chunks
from rl.trainer.weight_forms import Weight

ACTIVATION_TOLERANCE = 0.3
"""Relative error of ``activations`` for dense models."""
START_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
"""Of parameters and of buckets in Megatron's buffers, in elements."""
GIB = 2**30


class MemoryPlanError(ValueError):
    """The model does not fit the device; the message has the plan."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank of a pipeline stage; the ranks of a stage are equal."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.head


def plan_memory(hf: PretrainedConfig, config: TrainerConfig, value: bool = False) -> list[StageMemory]:
    """The plan of every pipeline stage. Pure.

    Args:
        value: the model ends in a value head.

    Raises:
        UnsupportedModelError: the layout does not divide the model.
    """
    family_of(hf).check_layout(hf, config.parallel)
    weights = weights_of(hf, config.parallel, value)
    return [_stage(hf, config, weights, stage, value) for stage in range(config.parallel.pipeline)]


def _stage(
    hf: PretrainedConfig, config: TrainerConfig, weights: Iterable[Weight], stage: int, value: bool
) -> StageMemory:
    parallel, size = config.parallel, 2 if config.dtype == "bfloat16" else 4
    mine = [weight for weight in weights if weight.stage % parallel.pipeline == stage]
    dense = [w for w in mine if w.expert is None]
    experts = [w for w in mine if w.expert is not None]
    # Every expert-parallel rank has as many experts.
    experts = experts[: len(experts) // parallel.expert]
    shared = bool(hf.tie_word_embeddings) and parallel.pipeline > 1
    replicas = config.world_size // (parallel.tensor * parallel.pipeline)
    expert_replicas = config.world_size // (parallel.expert_tensor * parallel.expert * parallel.pipeline)
    parameters = gradients = optimizer = 0
    chunks = range(stage, parallel.stages, parallel.pipeline)
    for part, ranks, copies in ((dense, parallel.tensor, replicas), (experts, parallel.expert_tensor, expert_replicas)):
        for float32 in (False, True):
            chosen = [w for w in part if w.float32 == float32]
            trained = [w for w in chosen if _trained(w, config)]
            own = 4 if float32 else size
            frozen = sum(_count(w, ranks) for w in chosen if not _trained(w, config))
            padded = sum(_buffer([w for w in trained if w.stage == s], ranks, copies, shared) for s in chunks)
            parameters += own * (padded + frozen)
            gradients += 4 * padded
            held = min(sum(_count(w, ranks) for w in trained), padded // copies)
            optimizer += (8 if own == 4 else 12) * held
    last = stage == parallel.pipeline - 1
    return StageMemory(
        stage,
        parameters,
        gradients,
        optimizer,
        _activations(hf, config, size, stage),
        _head(hf, config, size) if last and not value else 0,
    )


def _trained(weight: Weight, config: TrainerConfig) -> bool:
    return (".indexer." in weight.megatron) != (config.trained == "model")


def _count(weight: Weight, ranks: int) -> int:
    return math.prod(weight.piece_shape(ranks))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _buffer(weights: Iterable[Weight], ranks: int, replicas: int, shared: bool) -> int:
    """Elements of Megatron's buffer of these; a table that two stages share has a bucket of its own."""
    whole, tables = 0, 0
    multiple = math.lcm(replicas, BUCKET_ALIGNMENT)
    for weight in weights:
        count = _up(_count(weight, ranks), START_ALIGNMENT)
        if shared and weight.megatron in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tables += _up(count, multiple)
        else:
            whole += count
    return _up(whole, multiple) + tables


def layer_activations(hf: PretrainedConfig, by_hand: bool = False) -> tuple[float, float]:
    """Elements that a layer keeps a token: those that every tensor-parallel rank has (unless sequences are split), and
    those that are spread over them.

    Args:
        by_hand: the layer is ``rl.trainer.cpu_layer``'s.
    """
    heads, hidden = hf.num_attention_heads, hf.hidden_size
    settings = hf.to_dict()
    if settings.get("kv_lora_rank"):
        query = key = heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim)
        val, latent = heads * hf.v_head_dim, (hf.q_lora_rank or 0) + hf.kv_lora_rank + hf.qk_rope_head_dim
    else:
        query, latent = heads * hf.head_dim, 0
        key = val = hf.num_key_value_heads * hf.head_dim
    normed = 2 * (query + key) if "qwen3" in hf.model_type else 0
    if by_hand:  # of a norm the normalised input alone; of the MLP what it opened, and the gate's sigmoid
        return 2.0 * hidden, query + key + val + normed / 2 + query + 3.0 * hf.intermediate_size
    # Two norms keep their input, the normalised and the scaled one; attention its inputs and its output.
    common = 6.0 * hidden + 3.0 * latent
    split = query + key + val + normed + query + 4.0 * hf.intermediate_size
    if any(family_of(hf).moe_layers(hf)):
        chosen, width = hf.num_experts_per_tok, hf.moe_intermediate_size
        share = sum(family_of(hf).moe_layers(hf)) / hf.num_hidden_layers
        routed = chosen * (2.0 * hidden + 4.0 * width) + 4.0 * width * (settings.get("n_shared_experts") or 0)
        split += share * (routed - 4.0 * hf.intermediate_size)
    return common, split


def _activations(hf: PretrainedConfig, config: TrainerConfig, size: int, stage: int) -> int:
    parallel = config.parallel
    tokens = _up(config.max_tokens_per_micro_batch, parallel.context) // parallel.context
    family = family_of(hf)
    dense = family.plain(hf) and not any(family.moe_layers(hf)) and parallel.tensor == parallel.context == 1
    by_hand = dense and platform.device().type == "cpu" and config.dtype == "float32"
    common, split = layer_activations(hf, by_hand)
    common /= parallel.tensor if parallel.sequence_parallel else 1
    layer = tokens * size * (common + split / parallel.tensor)
    layers = hf.num_hidden_layers // parallel.stages
    # Passes through a stage whose backward pass is still to come, at most.
    flights = parallel.pipeline - stage
    if parallel.virtual_pipeline > 1:
        flights = 2 * (flights - 1) + (parallel.virtual_pipeline - 1) * parallel.pipeline + 1
    if not config.recompute:
        return round(flights * layers * layer)
    kept = tokens * size * hf.hidden_size / (parallel.tensor if parallel.sequence_parallel else 1)
    return round(flights * layers * kept + layer * min(layers, config.layers_per_graph))


def _head(hf: PretrainedConfig, config: TrainerConfig, size: int) -> int:
    """When the last chunk's slopes are made, which the CPU does in fp32, those of the chunks before it are kept."""
    rows = -(-hf.vocab_size // config.parallel.tensor)
    chunk = min(config.logits_chunk_tokens, config.max_tokens_per_micro_batch)
    kept = min(kept_chunks(DTYPES[config.dtype]), -(-config.max_tokens_per_micro_batch // chunk)) - 1
    made = 4 if platform.device().type == "cpu" else size
    return rows * chunk * (4 + made + kept * size)


def describe(plan: Iterable[StageMemory]) -> str:
    """A table, a line a stage, in GiB."""
    names = ("parameters", "gradients", "optimizer", "activations", "head", "total")
    lines = ["memory a rank, GiB: " + "  ".join(f"{name:>11}" for name in names)]
    for part in plan:
        numbers = "  ".join(f"{getattr(part, name) / GIB:11.3f}" for name in names)
        lines.append(f"{f'stage {part.stage}':>18}: {numbers}")
    return "\n".join(lines)


def check_fits(part: StageMemory, available: int, ranks: int, device: str) -> None:
    """Refuse a stage that cannot fit.

    Args:
        available: bytes of the device that ``ranks`` ranks share.

    Raises:
        MemoryPlanError: names the plan, and what would make it smaller.
    """
    needed = part.total * ranks
    if needed > available:
        raise MemoryPlanError(
            f"{ranks} rank(s) need {needed / GIB:.2f} GiB of {device}, which has {available / GIB:.2f}:\n"
            f"{describe([part])}\n"
            "recompute=true, a smaller max_tokens_per_micro_batch or logits_chunk_tokens, or more tensor, pipeline or "
            "data-parallel ranks need less"
        )
