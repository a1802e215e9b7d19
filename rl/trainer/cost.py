"""What a sample costs to train on, for balancing the ranks (see ``rl.batch.sample_cost``)."""

from __future__ import annotations

import math

from transformers import PretrainedConfig

from rl.trainer.config import ParallelConfig
from rl.trainer.convert import weights_of


def balance_length(hf: PretrainedConfig) -> float:
    """The length ν, in tokens, of a sample for which causal attention costs as much as the products with the weights.

    A token meets ``P`` weights (of the routed experts those that are chosen). With ``n / 2`` tokens before it on
    average, each layer of ``H`` heads takes ``n / 2 · H · (d_qk + d_v)`` multiply-adds for its attention, so that

        ν = 2 P / (layers · H · (d_qk + d_v))
    """
    listed, settings = weights_of(hf, ParallelConfig.model_validate({})), hf.to_dict()
    experts = 1 + max((weight.expert for weight in listed if weight.expert is not None), default=0)
    weights = 0.0
    for weight in listed:
        looked_up = weight.megatron.startswith("embedding.") and not hf.tie_word_embeddings
        share = 1.0 if weight.expert is None else hf.num_experts_per_tok / experts
        weights += 0.0 if looked_up else share * math.prod(weight.whole)
    if settings.get("kv_lora_rank"):
        dims = hf.qk_nope_head_dim + hf.qk_rope_head_dim + hf.v_head_dim
    else:
        dims = 2 * hf.head_dim
    return 2 * weights / (hf.num_hidden_layers * hf.num_attention_heads * dims)
