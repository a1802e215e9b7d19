"""Models and batches that the trainer is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from rollout.trajectory import StopReason, Trajectory


@dataclass(frozen=True)
class Variant:
    """Options of our trainer that change no number."""

    layers_per_graph: int = 1
    cuda_graphs: bool = False
    layer_kernels: str = "triton"
    optimizer_kernel: str = "triton"

    @property
    def name(self) -> str:
        written = self.cuda_graphs and self.layer_kernels == "triton"
        layers = "Triton" if written else f"{self.layers_per_graph} layer(s) compiled"
        graphs = "CUDA graphs" if self.cuda_graphs else "no CUDA graphs"
        return f"{layers}, {graphs}, Adam of {self.optimizer_kernel}"


@dataclass(frozen=True)
class Shape:
    """A random model and one global batch."""

    name: str
    model: PretrainedConfig
    lengths: tuple[int, ...]
    """Tokens of each sample; a quarter of each is its prompt. Groups of four samples share one."""
    repeats: int
    """Rounds of measured steps; in each, every side makes ``measure.STEPS`` in a row."""
    variants: tuple[Variant, ...] = (Variant(),)
    """Of ours; the first that runs is the one that is compared with the others."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def scored(self) -> int:
        """Tokens with a log-prob in the loss."""
        return sum(length - prompt(length) for length in self.lengths)

    def flops(self) -> float:
        """Multiply-adds, twice, that one step needs: three times the forward pass's matrix products, without any
        recomputation; attention counts the causal half; the output projection counts the scored tokens."""
        c = self.model
        heads = c.num_attention_heads * c.head_dim
        keys = c.num_key_value_heads * c.head_dim
        layer = c.hidden_size * (2 * heads + 2 * keys) + 3 * c.hidden_size * c.intermediate_size
        body = 2.0 * layer * c.num_hidden_layers * self.tokens
        attention = 2.0 * heads * c.num_hidden_layers * sum(length**2 for length in self.lengths)
        return 3 * (body + attention + 2.0 * c.vocab_size * c.hidden_size * self.scored)


def prompt(length: int) -> int:
    return length // 4


def _llama(**options: Any) -> LlamaConfig:
    return LlamaConfig(architectures=["LlamaForCausalLM"], tie_word_embeddings=True, **options)


def _smollm2() -> LlamaConfig:
    return _llama(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
    )


def _one_billion() -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        tie_word_embeddings=True,
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
    )


def _small(layers: int, hidden: int, vocab: int) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        tie_word_embeddings=True,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=2048,
    )


EVEN = (1024,) * 8
RAGGED = (2048, 1536, 1408, 1024, 896, 640, 384, 256)
"""8,192 tokens too; padded to the longest they are 16,384."""
SMALL_EVEN = (128,) * 8
SMALL_RAGGED = (256, 192, 176, 128, 112, 80, 48, 32)


def shapes(device: str) -> list[Shape]:
    """In the order in which they are run: what the bars ask for comes first."""
    if device == "cpu":
        return [
            Shape("demo, even", _small(2, 64, 101), SMALL_EVEN, 5),
            Shape("demo, ragged", _small(2, 64, 101), SMALL_RAGGED, 7),
            Shape("small, even", _small(4, 256, 4096), SMALL_EVEN, 5),
            Shape("small, ragged", _small(4, 256, 4096), SMALL_RAGGED, 7),
        ]
    written = (Variant(cuda_graphs=True), Variant(cuda_graphs=True, optimizer_kernel="torch"))
    small, large = (
        (*written, Variant(layers, cuda_graphs=True, layer_kernels="compiled", optimizer_kernel="torch"))
        for layers in (6, 1)
    )
    return [
        Shape("SmolLM2-135M-like, even", _smollm2(), EVEN, 5, small),
        Shape("1B, even", _one_billion(), EVEN, 4, large),
        Shape("SmolLM2-135M-like, ragged", _smollm2(), RAGGED, 5, small[:2]),
        Shape("1B, ragged", _one_billion(), RAGGED, 3, large[:2]),
        Shape("demo, even", _small(2, 64, 101), SMALL_EVEN, 5, written),
    ]


def write_model(shape: Shape, directory: Path, dtype: torch.dtype, device: str) -> None:
    """A Hugging Face directory of random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.model, dtype=dtype)
    model.save_pretrained(directory)


def trajectories(shape: Shape) -> list[Trajectory]:
    """Random tokens, log-probs near those of a random model, and rewards that differ inside each group."""
    rng = np.random.default_rng(0)
    vocab = shape.model.vocab_size
    made = []
    for index, length in enumerate(shape.lengths):
        mask = np.arange(length) >= prompt(length)
        noise = rng.normal(-np.log(vocab), 0.05, length)
        made.append(
            Trajectory(
                token_ids=rng.integers(0, vocab, length).astype(np.int32),
                action_mask=mask,
                rollout_logprobs=np.where(mask, noise, 0).astype(np.float32),
                weight_versions=np.where(mask, 0, -1).astype(np.int32),
                turn_index=np.zeros(length, np.int32),
                temperature=1.0,
                reward=float(index % 2) + float(rng.normal(0, 0.1)),
                task="benchmark",
                epoch=0,
                prompt_id=str(index // 4),
                group_id=index // 4,
                sample_id=index % 4,
                stop_reason=StopReason.STOP,
            )
        )
    return made
