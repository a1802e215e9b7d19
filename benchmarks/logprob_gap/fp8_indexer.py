"""What an indexer in fp8 does to log-probs by itself: ``python -m benchmarks.logprob_gap.fp8_indexer``.

SGLang's indexer multiplies queries and keys in fp8, each with a scale of its own; the trainer's does not. Here a random
sparse model computes log-probs four times, in fp32 and in bfloat16, with and without that rounding, and nothing else
differs: no server, no other kernels. It runs on the CPU in two minutes. The model is small; its weights are spread so
that queries, keys and the products of both have the size that GLM-5's dimensions give them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import GlmMoeDsaConfig

from benchmarks.logprob_gap.language import FIRST, Language
from benchmarks.logprob_gap.models import dsa_model, write_model
from benchmarks.logprob_gap.statistics import gap_statistics
from benchmarks.logprob_gap.training import sequences
from benchmarks.trainer.sides import make_worker
from rl.trainer.indexer import Indexer

LARGEST = 448.0
"""Of e4m3."""
LEAST = 1e-4
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 64,
    "index_topk": 256,
    "index_n_heads": 32,
    "index_head_dim": 32,
}
SPREADS = {"wide": 0.1, "usual": 0.04}
"""``models.WIDE`` and ``models.USUAL`` for the width of 2,048 that a product of this one's width stands for."""
COUNT, LENGTH = 3, 448
NOT_NAMES = ("model_type", "transformers_version", "rope_parameters", "layer_types", "qk_head_dim", "head_dim", "dtype")


def rounded(x: Float[Tensor, "*heads dim"]) -> Float[Tensor, "*heads dim"]:
    """To fp8 (e4m3) with a scale for each vector, as SGLang's indexer stores them, and back."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(LEAST) / LARGEST
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


@contextmanager
def fp8_indexer() -> Iterator[None]:
    """The trainer's indexers round their queries and keys, in this process and meanwhile."""
    rows = Indexer.rows

    def fp8_rows(self: Indexer, *arguments: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(rounded(query), rounded(key), weight) for query, key, weight in rows(self, *arguments)]

    Indexer.rows = fp8_rows
    try:
        yield
    finally:
        Indexer.rows = rows


def small_model(spread: float) -> GlmMoeDsaConfig:
    options = {name: value for name, value in dsa_model(False, spread).to_dict().items() if name not in NOT_NAMES}
    return GlmMoeDsaConfig(**options | SIZES)


def main() -> None:
    texts = np.random.default_rng(0).integers(FIRST, SIZES["vocab_size"], (COUNT, LENGTH)).astype(np.int32)
    made = [t.replace(token_ids=ids) for t, ids in zip(sequences(Language(64), COUNT, LENGTH, 0), texts, strict=True)]
    parts = {
        "up to the top k": slice(1, SIZES["index_topk"]),
        "past 1.5 times": slice(3 * SIZES["index_topk"] // 2, None),
    }
    worker = make_worker("cpu", 2)
    for name, spread in SPREADS.items():
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            write_model(small_model(spread), Path(folder), False)
            for dtype in ("float32", "bfloat16"):
                worker.config = worker.config.model_copy(update={"dtype": dtype})
                worker.load_model(Path(folder))
                for rounding, context in (("", nullcontext), (", fp8 indexer", fp8_indexer)):
                    with context():
                        found[dtype + rounding] = worker.logprobs(made)
        reference, *others = found
        for other in others:
            for part, places in parts.items():
                sides = (np.concatenate([x[places] for x in found[side]]) for side in (other, reference))
                gap = {key: f"{value:.3g}" for key, value in gap_statistics(*sides).items()}
                print(name, "|", other, "|", part, "|", gap, flush=True)
    worker.close()


if __name__ == "__main__":
    main()
