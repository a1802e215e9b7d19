"""Models of random weights for the benchmark: HF directories, made on the machine that runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Weights = dict[str, Tensor]
STANDARD_DEVIATION = 0.02


@dataclass(frozen=True)
class Size:
    """A Llama with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, by HF name."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            found |= {
                f"{at}.input_layernorm.weight": (self.hidden,),
                f"{at}.self_attn.q_proj.weight": (query, self.hidden),
                f"{at}.self_attn.k_proj.weight": (kv, self.hidden),
                f"{at}.self_attn.v_proj.weight": (kv, self.hidden),
                f"{at}.self_attn.o_proj.weight": (self.hidden, query),
                f"{at}.post_attention_layernorm.weight": (self.hidden,),
                f"{at}.mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{at}.mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{at}.mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        return found | {"model.norm.weight": (self.hidden,)}

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def config(self, context: int, dtype: str) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": dtype,
            "torch_dtype": dtype,
        }


SIZES: Mapping[str, Size] = {
    "tiny": Size(64, 2, 4, 2, 16, 256, 512),
    "135m": Size(576, 30, 9, 3, 64, 1536, 49_152),
    "1b": Size(2048, 16, 32, 8, 64, 8192, 128_256),
    "8b": Size(4096, 34, 32, 8, 128, 14_336, 128_256),
}


def random_weights(size: Size, seed: int, device: str, dtype: torch.dtype) -> Weights:
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        drawn = torch.randn(shape, generator=generator, device=device)
        return (drawn * STANDARD_DEVIATION).to(dtype)

    return {name: tensor(name, shape) for name, shape in size.shapes.items()}


def turn(weights: Weights) -> None:
    """Change every matrix in its place, as an optimizer does; again, and it is what it was."""
    for tensor in weights.values():
        if tensor.dim() > 1:
            tensor.copy_(tensor.flip(0))


def changed(weights: Weights, share: float, seed: int) -> Weights:
    """The same but for a share of the values, each of which differs in its last bit, as after a small step."""

    def change(tensor: Tensor) -> Tensor:
        generator = torch.Generator(tensor.device).manual_seed(seed)
        mask = torch.rand(tensor.shape, generator=generator, device=tensor.device) < share
        bits = tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)
        return torch.where(mask, bits ^ 1, bits).view(tensor.dtype)

    return {name: change(tensor) for name, tensor in weights.items()}


def write_config(directory: Path, size: Size, dtype: torch.dtype, context: int) -> Path:
    directory.mkdir(parents=True)
    config = size.config(context, str(dtype).removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def write(directory: Path, size: Size, weights: Weights, context: int) -> Path:
    write_config(directory, size, next(iter(weights.values())).dtype, context)
    save_file(
        {name: tensor.cpu() for name, tensor in weights.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    return directory
