"""A sparse-attention model (DeepSeek-V3.2's architecture) whose top-k locality is chosen.

Written are the tensors that decide what is attended and which experts are used; everything else (experts, output
projections, head) stays as SGLang's ``--load-format dummy`` leaves it: uniform within ±1e-3, so small that no layer
changes the residual stream noticeably. The hidden state of every layer is then the token's embedding,

    h(token) = √hidden · (√shared · u + √(1 − shared) · n(token)),   |u| = |n| = 1, n ⟂ u, independent of each other,

of length √hidden exactly, and sampled tokens are close to uniform over the vocabulary: independent from step to step.

- The indexer's queries read only the shared direction u, through one column of the low-rank query: for all tokens
  the same.
- Its keys and its heads' weights' noise read only n (see ``benchmarks.engine.locality``); dimensions that the rotary
  embedding turns are 0 in the queries, so positions do not matter.
- The router is blind to u, so the experts are used evenly. Were it not, all tokens would use the same few, a step would
  read only those, and every engine would look faster than it is.

The locality sits in the heads' weights alone (``weights_proj``): ``write_locality`` writes just those, and a running
server takes them with ``/update_weights_from_disk``.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engine.locality import noise_for, unit_queries
from benchmarks.engine.reference_indexer import ReferenceIndexer

SHARED = 0.5
"""Of a hidden state's square, the part along the shared direction."""
CONSTANT = 0.95
"""Of a low-rank query's square, the component that is the same for all tokens."""
ROTARY = 64
QUERY_SCALE = 8.0


@dataclass(frozen=True)
class ModelSizes:
    """Four layers, of which the first is dense, that hold about as many bytes a layer as GLM-5 in fp8 (9.5 GB)."""

    layers: int = 4
    dense_layers: int = 1
    hidden: int = 4096
    experts: int = 128
    expert_size: int = 4096
    experts_per_token: int = 8
    heads: int = 64
    query_rank: int = 1536
    latent: int = 512
    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 2048
    vocabulary: int = 32_768

    @property
    def weight_bytes(self) -> int:
        """Of the experts in bfloat16; what a step over many tokens reads, nearly."""
        return (self.layers - self.dense_layers) * (self.experts + 1) * 3 * self.hidden * self.expert_size * 2

    def hf_config(self) -> dict[str, object]:
        """``eos_token_id`` is null: nothing that is sampled ends a request early."""
        return {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "hidden_size": self.hidden,
            "intermediate_size": 6144,
            "moe_intermediate_size": self.expert_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.experts_per_token,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "ep_size": 1,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": ROTARY,
            "v_head_dim": 128,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": self.top_k,
            "num_nextn_predict_layers": 0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "rope_scaling": None,
            "max_position_embeddings": 65_536,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": None,
            "initializer_range": 0.02,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "pretraining_tp": 1,
        }


class CheckpointMaker:
    """Makes the tensors on ``device``, the same for the same seed and kind of device."""

    def __init__(self, sizes: ModelSizes, device: str, seed: int = 0) -> None:
        self.sizes, self.device, self.seed = sizes, device, seed
        self._generator = torch.Generator(device).manual_seed(seed)
        direction = self._normal(sizes.hidden)
        self._shared = direction / direction.norm()
        self._own_weights = [self._across(sizes.index_heads) for _ in range(sizes.layers)]
        self._embedding = self._embeddings()

    def write(self, directory: Path) -> int:
        """Write config and tensors without the heads' weights of the indexers; returns the bytes."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.sizes.hf_config(), indent=1) + "\n")
        tensors = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._ones(self.sizes.hidden)}
        for layer in range(self.sizes.layers):
            for name, tensor in (self._attention(layer) | self._mlp(layer)).items():
                tensors[f"model.layers.{layer}.{name}"] = tensor
        return _save(tensors, directory)

    def write_locality(self, directory: Path, locality: float, indexer: ReferenceIndexer) -> float:
        """Write the heads' weights whose mean locality over the layers is ``locality``; returns their noise."""
        directory.mkdir(parents=True, exist_ok=True)
        noise = noise_for(locality, lambda noise: statistics.fmean(indexer.locality(self.head_weights(noise))))
        names = [f"model.layers.{layer}.self_attn.indexer.weights_proj.weight" for layer in range(self.sizes.layers)]
        _save(dict(zip(names, self.head_weights(noise), strict=True)), directory)
        return noise

    def head_weights(self, noise: float) -> list[Tensor]:
        """By layer: 1 for every token, plus noise that is the token's own."""
        constant = self._shared / math.sqrt(self.sizes.hidden * SHARED)
        return [constant + noise * own for own in self._own_weights]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self.device)

    def _across(self, rows: int) -> Tensor:
        """Rows that do not see the shared direction; each gives standard normal values over the tokens."""
        found = self._normal(rows, self.sizes.hidden)
        found -= torch.outer(found @ self._shared, self._shared)
        return found / math.sqrt(self.sizes.hidden * (1 - SHARED))

    def _embeddings(self) -> Tensor:
        own = self._across(self.sizes.vocabulary)
        own /= own.norm(dim=-1, keepdim=True)
        return math.sqrt(self.sizes.hidden) * (math.sqrt(SHARED) * self._shared + math.sqrt(1 - SHARED) * own)

    def _attention(self, layer: int) -> dict[str, Tensor]:
        sizes = self.sizes
        query_down = math.sqrt(1 - CONSTANT) * self._across(sizes.query_rank)
        constant = math.sqrt(CONSTANT * sizes.query_rank)  # the first component, before and after the norm
        query_down[0] = self._shared * constant / math.sqrt(sizes.hidden * SHARED)
        generator = torch.Generator().manual_seed(self.seed + layer)
        directions = unit_queries(sizes.index_heads, sizes.index_dim - ROTARY, generator).to(self.device)
        queries = torch.zeros(sizes.index_heads, sizes.index_dim, sizes.query_rank, device=self.device)
        queries[:, ROTARY:, 0] = directions * QUERY_SCALE / constant
        keys = self._across(sizes.index_dim)
        keys[:ROTARY] = 0
        return {
            "input_layernorm.weight": self._ones(sizes.hidden),
            "post_attention_layernorm.weight": self._ones(sizes.hidden),
            "self_attn.q_a_proj.weight": query_down,
            "self_attn.q_a_layernorm.weight": self._ones(sizes.query_rank),
            "self_attn.kv_a_proj_with_mqa.weight": self._across(sizes.latent + ROTARY),
            "self_attn.kv_a_layernorm.weight": self._ones(sizes.latent),
            "self_attn.indexer.wq_b.weight": queries.flatten(0, 1),
            "self_attn.indexer.wk.weight": keys,
            "self_attn.indexer.k_norm.weight": self._ones(sizes.index_dim),
            "self_attn.indexer.k_norm.bias": torch.zeros(sizes.index_dim, device=self.device),
        }

    def _mlp(self, layer: int) -> dict[str, Tensor]:
        if layer < self.sizes.dense_layers:
            return {}
        return {
            "mlp.gate.weight": self._across(self.sizes.experts),
            "mlp.gate.e_score_correction_bias": torch.zeros(self.sizes.experts, device=self.device),
        }


def _save(tensors: dict[str, Tensor], directory: Path) -> int:
    """In bfloat16, but for what SGLang keeps in fp32."""
    stored = {
        name: tensor.to(
            "cpu", torch.float32 if name.endswith(("_bias", "k_norm.weight", "k_norm.bias")) else torch.bfloat16
        )
        for name, tensor in tensors.items()
    }
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / "model.safetensors")
    return sum(tensor.nbytes for tensor in stored.values())
