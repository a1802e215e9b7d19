"""Tiny models of every family, made by Hugging Face's own classes, and what those compute."""

import shutil

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

COMMON = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
QUERIES = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}


def _dsa(*indexers):
    """Of a layer each."""
    return GlmMoeDsaConfig(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=len(indexers),
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=16,
        index_topk=6,
        indexer_rope_interleave=True,
        index_n_heads=16,  # with few heads many scores are exactly 0, and the choice among them is open
        index_head_dim=16,
        indexer_types=list(indexers),
    )


MODELS = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **COMMON,
            **QUERIES,
            num_hidden_layers=4,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        ),
    ),
    "qwen3_moe_dense_layer": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **COMMON,
            **QUERIES,
            num_hidden_layers=2,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            mlp_only_layers=[0],
        ),
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **COMMON,
            **QUERIES,
            num_hidden_layers=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
        ),
    ),
    # The first group is smaller than the others.
    "glm_moe_dsa": (GlmMoeDsaForCausalLM, _dsa("full", "full", "shared", "full", "shared", "shared")),
    "glm_moe_dsa_pairs": (GlmMoeDsaForCausalLM, _dsa(*("full", "shared") * 4)),
}


def save_model(name, directory, changes=None):
    """Random weights, with biases and router biases that are not zero; ``changes`` of the config's settings."""
    build, config = MODELS[name]
    config = type(config)(**(config.to_dict() | (changes or {})))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config)
        with torch.no_grad():
            for key, tensor in (*model.named_parameters(), *model.named_buffers()):
                if key.endswith("bias"):
                    tensor.normal_(std=0.1)
    model.save_pretrained(directory)


def hf_logprobs(model, trajectories):
    """Log-probs of each trajectory's tokens by Hugging Face's model, one sample at a time, with gradient."""
    logprobs = []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids).long()
        distribution = (model(ids[None]).logits[0, :-1] / trajectory.temperature).log_softmax(-1)
        logprobs.append(torch.cat([torch.zeros(1), distribution.gather(1, ids[1:, None]).squeeze(1)]))
    return logprobs


def load_hf(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def hf_gradient(model, directory):
    """The model's gradients by their names in a checkpoint, where experts are apart; parameters without one are left
    out. The model is spent."""
    zeros = set()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            zeros.add(name)
            parameter.grad = torch.zeros_like(parameter)
        parameter.data = parameter.grad
    model.save_pretrained(directory)
    gradient = load_file(directory / "model.safetensors")
    shutil.rmtree(directory)
    return {name: g for name, g in gradient.items() if name not in zeros and not name.endswith("correction_bias")}
