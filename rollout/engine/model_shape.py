"""A model's sizes, from its HF ``config.json`` alone: parameters, and what a token's KV cache and a decode step cost.

Knows grouped-query attention, multi-head latent attention (MLA), DeepSeek Sparse Attention with its indexer (shared
between layers or not), and mixtures of experts. Symbols are those of ``docs/engine.md``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_BLOCK = 128
"""Channels of an indexer key that share a scale of 4 bytes."""
KNOWN_LAYERS = {"full_attention", "indexed_attention", "deepseek_sparse_attention"}
"""The last two are one: the name that transformers has for DSA, and had until 5.12."""


class ModelShapeError(ValueError):
    """The model's config lacks something or describes what is not known here."""


@dataclass(frozen=True)
class Latent:
    """MLA: all heads read one latent vector and one rotary key a token."""

    q_rank: int | None
    rank: int
    """d, of the latent."""
    rope: int
    """r."""
    nope: int
    value: int


@dataclass(frozen=True)
class Indexer:
    """Scores all earlier tokens for every query; attention reads the best ``topk``."""

    topk: int
    heads: int
    head_dim: int
    layers: int
    """That compute their own indices; the others take those of the layer before."""

    @property
    def key_bytes(self) -> int:
        """Of one token in one layer: fp8 channels and their scales."""
        return self.head_dim + self.head_dim // INDEX_BLOCK * 4


@dataclass(frozen=True)
class Experts:
    routed: int
    per_token: int
    shared: int
    width: int
    dense_layers: int
    """Layers that have a plain MLP instead."""


@dataclass(frozen=True)
class ModelShape:
    model_type: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_context: int
    tied_embeddings: bool
    weight_bytes: float
    """Of one weight of a matrix product; embeddings, norms and routers have 2 where it is less."""
    latent: Latent | None
    indexer: Indexer | None
    experts: Experts | None

    @property
    def index_topk(self) -> int | None:
        return None if self.indexer is None else self.indexer.topk

    @property
    def parameters(self) -> int:
        """Without the layers for multi-token prediction."""
        attention = self.sharded_attention_weights + self.replicated_attention_weights
        return self.embedding_weights + self.mlp_weights(1) + attention

    @property
    def active_parameters(self) -> int:
        """That a token is multiplied with; embeddings counted once, as a look-up costs nothing."""
        head = self.vocab * self.hidden
        attention = self.sharded_attention_weights + self.replicated_attention_weights
        routed = 1.0 if self.experts is None else self.experts.per_token / self.experts.routed
        return head + self.mlp_weights(routed) + attention

    @property
    def embedding_weights(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    def mlp_weights(self, routed_share: float) -> int:
        """Of all layers, with a share of the routed experts."""
        if self.experts is None:
            return 3 * self.hidden * self.mlp_width * self.layers
        moe = self.experts
        expert = 3 * self.hidden * moe.width
        router = self.hidden * moe.routed
        sparse = (self.layers - moe.dense_layers) * (expert * (moe.routed * routed_share + moe.shared) + router)
        return round(sparse) + 3 * self.hidden * self.mlp_width * moe.dense_layers

    @property
    def sharded_attention_weights(self) -> int:
        """Of all layers; each GPU of an attention group holds its heads' share."""
        h, heads = self.hidden, self.heads
        if self.latent is None:
            return self.layers * h * self.head_dim * (2 * heads + 2 * self.kv_heads)
        mla = self.latent
        query = (mla.q_rank or h) * heads * (mla.nope + mla.rope)
        return self.layers * (query + mla.rank * heads * (mla.nope + mla.value) + heads * mla.value * h)

    @property
    def replicated_attention_weights(self) -> int:
        """Of all layers; every GPU holds them: MLA's down-projections and the indexer."""
        if self.latent is None:
            return 0
        mla, h = self.latent, self.hidden
        down = h * (mla.rank + mla.rope) + (h * mla.q_rank if mla.q_rank else 0)
        if self.indexer is None:
            return self.layers * down
        index = self.indexer
        scoring = (mla.q_rank or h) * index.heads * index.head_dim + h * (index.head_dim + index.heads)
        return self.layers * down + index.layers * scoring

    def entry_bytes(self, kv_dtype: str, attention_gpus: int = 1) -> int:
        """KV of one token in one layer on one GPU, without indexer keys.

        The latent is whole on every GPU. fp8 KV of a DSA model is 1 byte a latent channel, a 4-byte scale for 128 of
        them, and the rotary key in bf16 (the layout of the ``flashmla_kv`` kernels).
        """
        if self.latent is None:
            return max(1, self.kv_heads // attention_gpus) * 2 * self.head_dim * dtype_bytes(kv_dtype)
        d, r = self.latent.rank, self.latent.rope
        if self.indexer is not None and kv_dtype == "fp8_e4m3":
            return d + d // INDEX_BLOCK * 4 + 2 * r
        return (d + r) * dtype_bytes(kv_dtype)

    def indexer_bytes(self, shared_layers_stored: bool = False) -> int:
        """Indexer keys of one token over all layers, on each GPU.

        Args:
            shared_layers_stored: whether layers that take another's indices have (unused) room for keys.
        """
        if self.indexer is None:
            return 0
        return self.indexer.key_bytes * (self.layers if shared_layers_stored else self.indexer.layers)


def dtype_bytes(dtype: str) -> int:
    """Bytes of a number, by its name in engine settings.

    Raises:
        ModelShapeError: for a name that is none, such as auto.
    """
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
    if dtype not in sizes:
        raise ModelShapeError(f"{dtype} is no number format of one size; one of {', '.join(sizes)}")
    return sizes[dtype]


def read_model_shape(model_dir: Path) -> ModelShape:
    """The shape of the model in an HF directory.

    Raises:
        ModelShapeError: naming the file, where it can't be read or lacks something.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelShapeError(f"{path}: {error}") from error
    try:
        return model_shape(config)
    except ModelShapeError as error:
        raise ModelShapeError(f"{path}: {error}") from error


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that an HF config describes.

    Raises:
        ModelShapeError: it lacks a size, or has layers that are not known here (sliding windows, recurrent states).
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    layers = _size(text, "num_hidden_layers")
    strange = sorted(set(text.get("layer_types") or ()) - KNOWN_LAYERS)
    if strange:
        raise ModelShapeError(f"layer_types has {', '.join(strange)}: only full attention and DSA are known")
    heads = _size(text, "num_attention_heads")
    hidden = _size(text, "hidden_size")
    experts = _experts(text, layers)
    return ModelShape(
        model_type=str(text.get("model_type", "unnamed")),
        layers=layers,
        hidden=hidden,
        vocab=_size(text, "vocab_size"),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        mlp_width=_size(text, "intermediate_size") if experts is None or experts.dense_layers else 0,
        max_context=_size(text, "max_position_embeddings"),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        weight_bytes=_weight_bytes(config, text),
        latent=_latent(text),
        indexer=_indexer(text, layers),
        experts=experts,
    )


def _size(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise ModelShapeError(f"{' or '.join(names)}: needed, a whole number above 0, but it is {config.get(names[0])!r}")


def _weight_bytes(config: Mapping[str, Any], text: Mapping[str, Any]) -> float:
    quantized = config.get("quantization_config") or {}
    method = str(quantized.get("quant_method", ""))
    if method == "fp8":
        rows, columns = quantized.get("weight_block_size") or (0, 0)
        return 1 + (4 / (rows * columns) if rows else 0)
    if method:
        raise ModelShapeError(f"quantization_config.quant_method={method} is not known here: fp8, or none")
    return dtype_bytes(str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"))


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        q_rank=config.get("q_lora_rank"),
        rank=_size(config, "kv_lora_rank"),
        rope=_size(config, "qk_rope_head_dim"),
        nope=_size(config, "qk_nope_head_dim"),
        value=_size(config, "v_head_dim"),
    )


def _indexer(config: Mapping[str, Any], layers: int) -> Indexer | None:
    if not config.get("index_topk"):
        return None
    own = sum(not _takes_indices(config, layer) for layer in range(layers))
    return Indexer(_size(config, "index_topk"), _size(config, "index_n_heads"), _size(config, "index_head_dim"), own)


def _takes_indices(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer takes the indices of the one before (IndexShare): from a list, a pattern, or every n-th."""
    types = config.get("indexer_types")
    if types is not None:
        return layer < len(types) and types[layer] == "shared"
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return layer < len(pattern) and pattern[layer] == "S"
    every = config.get("index_topk_freq") or 1
    offset = config.get("index_skip_topk_offset") or 2
    return max(layer - offset + 1, 0) % every != 0


def _experts(config: Mapping[str, Any], layers: int) -> Experts | None:
    routed = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")
    if not routed:
        return None
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        dense = kinds.count("dense")
    elif config.get("model_type") == "qwen3_moe":
        dense = _qwen_dense_layers(config, layers)
    else:
        dense = config.get("first_k_dense_replace") or 0
    width = _size(config, "moe_intermediate_size", "intermediate_size")
    shared = config.get("n_shared_experts")
    if shared is None:
        shared = -(-int(config.get("shared_expert_intermediate_size") or 0) // width)
    return Experts(int(routed), _size(config, "num_experts_per_tok"), int(shared), width, min(int(dense), layers))


def _qwen_dense_layers(config: Mapping[str, Any], layers: int) -> int:
    step, named = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return sum(layer in named or (layer + 1) % step != 0 for layer in range(layers))
