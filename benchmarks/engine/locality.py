"""Top-k locality, how to set it: the share of an indexer's selected positions that stay selected at the next token.

An indexer of sparse attention (DeepSeek-V3.2, GLM-5) scores position j for the token at t as

    s(t, j) = sum over heads h of  w(t, h) · relu(q(t, h) · k(j))

with one key k(j) a position, and selects the top k of it. Here the queries are the same for all tokens, q(t, h) =
q(h), and only the heads' weights move:

    w(t, h) = 1 + noise · e(t, h),   e standard normal, drawn anew for every token

so the score of a position is a part that stays plus a part that is new at every token, and ``noise`` alone sets how
many positions change. The heads' weights stay in bfloat16 or better in SGLang, while queries and keys are rounded to
fp8: a small noise in the queries would be drowned by their rounding, in the weights it is not. The share has no closed
form that is worth having (relu's features are not normal, and rounding adds a little), so ``noise_for`` finds it by
bisection on ``benchmarks.engine.reference_indexer``. What the server then really selects is measured, too
(``benchmarks.engine.observe``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float32, Int
from torch import Tensor

BISECTIONS = 14
"""Of four orders of magnitude: the noise is found to 0.1 %."""


def unit_queries(heads: int, dim: int, generator: torch.Generator) -> Float32[Tensor, "heads dim"]:
    """Random directions, one a head."""
    queries = torch.randn(heads, dim, generator=generator)
    return queries / queries.norm(dim=-1, keepdim=True)


def kept_share(before: Int[Tensor, "rows top_k"], after: Int[Tensor, "rows top_k"], positions: int) -> float:
    """Share of the positions selected before that are selected after, too; a mean over rows (requests or steps)."""
    marked = torch.zeros(before.shape[0], positions, dtype=torch.bool, device=before.device)
    marked.scatter_(1, before.long(), True)
    return marked.gather(1, after.long()).float().mean().item()


def noise_for(locality: float, share: Callable[[float], float]) -> float:
    """The noise of the heads' weights at which ``share(noise)``, which falls with the noise, is ``locality``.

    Raises:
        ValueError: no noise gives it; with pure noise still ``top_k / positions`` stay.
    """
    low, high = 1e-4, 10.0
    most, least = share(low), share(high)
    if not least < locality < most:
        raise ValueError(f"locality {locality} is not between {least:.4f} and {most:.4f}, which this indexer can have")
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if share(middle) > locality:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
