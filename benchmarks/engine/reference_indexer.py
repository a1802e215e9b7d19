"""The indexer's path in plain PyTorch over a written checkpoint: what it selects for random tokens, step by step.

Tells before any server is started whether the checkpoint has the locality that was asked for, and serves to set it.
Rounding follows SGLang's: bfloat16 weights and projections, queries and keys in fp8 with one scale a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Float32
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import layer_norm

from benchmarks.engine.locality import kept_share

FP8_MAX = 448.0
NAMES = ("q_a_proj.weight", "indexer.wq_b.weight", "indexer.wk.weight", "indexer.k_norm.weight", "indexer.k_norm.bias")


class ReferenceIndexer:
    """The indexers of all layers over one history of random tokens, for ``steps`` + 1 random tokens.

    The model's layers leave the hidden state as it is (``benchmarks.engine.checkpoint``), so each sees the embeddings.
    """

    def __init__(
        self,
        directory: Path,
        layers: int,
        rotary: int,
        top_k: int,
        positions: int,
        steps: int = 8,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.top_k, self.positions = top_k, positions
        generator = torch.Generator().manual_seed(seed)
        with safe_open(directory / "model.safetensors", "pt", device=device) as file:
            embedding = file.get_tensor("model.embed_tokens.weight")
            history, current = (
                embedding[torch.randint(len(embedding), (n,), generator=generator).to(device)]
                for n in (positions, steps + 1)
            )
            self.current = current
            self._matches = [
                _matches(
                    history, current, {n: file.get_tensor(f"model.layers.{i}.self_attn.{n}") for n in NAMES}, rotary
                )
                for i in range(layers)
            ]

    def locality(self, head_weights: Sequence[Float[Tensor, "heads hidden"]]) -> list[float]:
        """Share of the top k that stays from one token to the next, by layer, with these ``weights_proj``."""
        shares = []
        for matches, weights in zip(self._matches, head_weights, strict=True):
            gates = (self.current @ weights.to(self.current).T).float()
            scores = torch.einsum("tph,th->tp", matches, gates)
            selected = scores.topk(self.top_k, dim=-1).indices
            shares.append(kept_share(selected[:-1], selected[1:], self.positions))
        return shares


def _matches(
    history: Float[Tensor, "positions hidden"],
    current: Float[Tensor, "tokens hidden"],
    tensors: dict[str, Tensor],
    rotary: int,
) -> Float32[Tensor, "tokens positions heads"]:
    """relu(q · k). The dimensions that are turned are left out: in the queries they are 0."""
    low = (current @ tensors["q_a_proj.weight"].T).float()
    low = (low * low.pow(2).mean(-1, keepdim=True).rsqrt()).to(current.dtype)
    keys = (history @ tensors["indexer.wk.weight"].T).float()
    keys = layer_norm(keys, keys.shape[-1:], tensors["indexer.k_norm.weight"], tensors["indexer.k_norm.bias"])
    queries = (low @ tensors["indexer.wq_b.weight"].T).float().unflatten(-1, (-1, keys.shape[-1]))
    return torch.relu(torch.einsum("pd,thd->tph", _fp8(keys[..., rotary:]), _fp8(queries[..., rotary:])))


def _fp8(vectors: Tensor) -> Tensor:
    """As they come back from fp8 with one scale a vector."""
    scale = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-4) / FP8_MAX
    return (vectors / scale).to(torch.float8_e4m3fn).float() * scale
