"""PyTorch's FlashAttention over packed sequences: one call for a whole micro-batch, without padding.

A *span* is a run of consecutive tokens of one sample on this rank that attends to the sample up to its own end. Without
context parallelism each sample is one span. Under it a rank holds two spans of each sample, and the keys that a span
sees are copied end to end out of the gathered ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

SHORTEST_BOUND = 128


@dataclass(frozen=True)
class Spans:
    """Bounds of the lengths are known on the host, so that no layer waits for the device: powers of two,
    because a compiled graph is made for each bound that it meets."""

    query_edges: Int32[Tensor, " spans+1"]
    key_edges: Int32[Tensor, " spans+1"]
    longest_query: int
    longest_key: int
    keys: Int[Tensor, " span_keys"] | None
    """Which of the gathered tokens (rank-major) each key is; None for all, in order."""


def make_spans(rows: Int[Tensor, " samples"], context: int, rank: int, gathered_order: Tensor | None) -> Spans:
    """The spans of padded samples, on the CPU.

    Args:
        rows: lengths; multiples of ``2 · context`` under context parallelism.
        gathered_order: place of each token in the gathered keys (see ``Packing``).
    """
    if context == 1:
        edges = _edges(rows)
        longest = length_bound(int(rows.max()))
        return Spans(edges, edges, longest, longest, None)
    piece = rows // (2 * context)
    queries = torch.stack([piece, piece], 1).flatten()
    # A span ends where its chunk does: chunk ``rank`` and, counted from the end, the same again.
    lengths = torch.stack([piece * (rank + 1), piece * (2 * context - rank)], 1).flatten()
    starts = torch.repeat_interleave(rows.cumsum(0) - rows, 2)
    offset = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    assert gathered_order is not None
    keys = gathered_order[torch.repeat_interleave(starts, lengths) + offset]
    return Spans(
        _edges(queries),
        _edges(lengths),
        length_bound(int(queries.max())),
        length_bound(int(lengths.max())),
        keys,
    )


def _edges(lengths: Int[Tensor, " spans"]) -> Int32[Tensor, " spans+1"]:
    edges = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return edges.int()


def length_bound(length: int) -> int:
    """What a graph of samples up to this length is made for."""
    return max(SHORTEST_BOUND, 1 << max(0, length - 1).bit_length())


def flash_attention(
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "keys kv_heads dim"],
    value: Float[Tensor, "keys kv_heads dim"],
    query_edges: Int32[Tensor, " spans+1"],
    key_edges: Int32[Tensor, " spans+1"],
    longest_query: int,
    longest_key: int,
    scale: float | None,
) -> Float[Tensor, "tokens heads dim"]:
    """Causal attention inside each span, aligned at its end; bfloat16 or float16 on CUDA, ``dim`` a multiple of 8 up to
    256, the same for queries, keys and values."""
    output, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        query_edges,
        key_edges,
        longest_query,
        longest_key,
        0.0,
        True,
        False,
        scale=scale,
    )
    return output


def flash_forward(
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens kv_heads dim"],
    value: Float[Tensor, "tokens kv_heads dim"],
    edges: Int32[Tensor, " samples+1"],
    longest: int,
    scale: float | None,
) -> tuple[Float[Tensor, "tokens heads dim"], tuple[Tensor, ...]]:
    """``flash_attention`` of whole samples outside of autograd: the output, and what ``flash_backward`` needs of it."""
    output, normalizers, state, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, edges, edges, longest, longest, 0.0, True, False, scale=scale
    )
    return output, (normalizers, state, unused)


def flash_backward(
    gradient: Float[Tensor, "tokens heads dim"],
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens kv_heads dim"],
    value: Float[Tensor, "tokens kv_heads dim"],
    output: Float[Tensor, "tokens heads dim"],
    kept: tuple[Tensor, ...],
    edges: Int32[Tensor, " samples+1"],
    longest: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    normalizers, state, unused = kept
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        *(gradient, query, key, value, output, normalizers, edges, edges, longest, longest, 0.0, True, state, unused),
        scale=scale,
    )
    return grad_query, grad_key, grad_value
