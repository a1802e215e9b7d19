"""The two models, at sizes for a GPU and, dense, for the CPU; and the cases that are asked of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig, LlamaConfig, PretrainedConfig

Name = Literal["dense", "dsa"]
Weights = Literal["trained", "random"]
LATENT, ROTARY, INDEX_DIM, TOP_K, DSA_LAYERS, DENSE_LAYERS = 512, 64, 128, 2048, 4, 1
"""As GLM-5's; the kernels of servers want most of them."""
WORDS = {True: 2048, False: 64}
"""Of the language, with CUDA and without."""


@dataclass(frozen=True)
class Case:
    """Prompts, and how many tokens are sampled after each."""

    name: str
    model: Name
    server: str
    prompt: int
    output: int
    requests: int

    @property
    def length(self) -> int:
        return self.prompt + self.output


FP32_HEAD = "dense-fp32-head"
"""The server that keeps its logits in float32, which SGLang otherwise rounds to the weights' type."""
SERVER_MODELS: dict[str, Name] = {"dense": "dense", FP32_HEAD: "dense", "dsa": "dsa", "hisparse": "dsa"}


def cases(cuda: bool, requests: int, fp32_head: bool) -> list[Case]:
    dense, short, long = (512, 512) if cuda else (32, 32), (TOP_K // 4, 512), (3 * TOP_K // 2, 512)
    found = [Case("dense", "dense", server, *dense, requests) for server in ("dense", FP32_HEAD)[: 1 + fp32_head]]
    if not cuda:
        return found
    for server in ("dsa", "hisparse"):
        found.append(Case("dsa-short", "dsa", server, *short, requests))
        found.append(Case("dsa-long", "dsa", server, *long, max(1, requests // 2)))
    return found


def longest(found: Iterable[Case]) -> int:
    """Tokens of a sequence."""
    return max(case.length for case in found)


def dense_model(cuda: bool, spread: float) -> PretrainedConfig:
    sizes = (576, 1536, 30, 9, 3, 49_152) if cuda else (64, 128, 2, 4, 2, 512)
    hidden, mlp, layers, heads, kv_heads, vocabulary = sizes
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64 if cuda else 16,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def dsa_model(cuda: bool, spread: float) -> PretrainedConfig:
    """GLM-5's attention and routing with four layers and few, narrow experts. SGLang serves it on CUDA alone; the small
    one is for trying the training on the CPU."""
    experts = 64 if cuda else 4
    sizes = {
        "vocab_size": 32_768 if cuda else 512,
        "hidden_size": 1024 if cuda else 64,
        "intermediate_size": 2048 if cuda else 128,
        "moe_intermediate_size": 512 if cuda else 32,
        "num_attention_heads": 64 if cuda else 4,
        "num_key_value_heads": 64 if cuda else 4,
        "n_routed_experts": experts,
        "num_experts": experts,  # transformers 5.12 would write 256 beside n_routed_experts, and 5.19 believe it
        "num_experts_per_tok": 8 if cuda else 2,
        "q_lora_rank": 768 if cuda else 32,
        "kv_lora_rank": LATENT if cuda else 32,
        "qk_rope_head_dim": ROTARY if cuda else 8,
        "qk_nope_head_dim": 192 if cuda else 24,
        "v_head_dim": 256 if cuda else 16,
        "index_topk": TOP_K if cuda else 16,
        "index_n_heads": 32 if cuda else 4,
        "index_head_dim": INDEX_DIM if cuda else 16,
    }
    return GlmMoeDsaConfig(
        **sizes,
        num_hidden_layers=DSA_LAYERS,
        n_shared_experts=1,
        first_k_dense_replace=DENSE_LAYERS,
        mlp_layer_types=["dense"] * DENSE_LAYERS + ["sparse"] * (DSA_LAYERS - DENSE_LAYERS),
        indexer_types=["full"] * DSA_LAYERS,
        # As GLM-5's own config says it, for SGLang; it would take a missing interleave for False.
        indexer_rope_interleave=True,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        ep_size=1,
        pretraining_tp=1,
        max_position_embeddings=65_536,
        initializer_range=spread,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


WIDE = {"dense": 0.08, "dsa": 0.05}
"""Spread of weights that no training made, for a distribution that is not flat."""
USUAL = 0.02


def make_config(name: Name, cuda: bool, spread: float) -> PretrainedConfig:
    config = dense_model(cuda, spread) if name == "dense" else dsa_model(cuda, spread)
    config.architectures = ["LlamaForCausalLM" if name == "dense" else "GlmMoeDsaForCausalLM"]
    return config


def routed(name: Name, cuda: bool) -> tuple[int, int]:
    """Layers, and experts that each takes of a token."""
    config = make_config(name, cuda, USUAL)
    return config.num_hidden_layers, config.num_experts_per_tok


def write_model(config: PretrainedConfig, directory: Path, cuda: bool) -> None:
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
    model.save_pretrained(directory)


def write_random(name: Name, directory: Path, cuda: bool, spread: float) -> None:
    write_model(make_config(name, cuda, spread), directory, cuda)


def change_config(directory: Path, **changes: int) -> None:
    """Of a written model."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2) + "\n")
