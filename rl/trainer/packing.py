"""Where each token of a micro-batch stands in the model: padding, context-parallel ranks, attention rows.

Samples are packed end to end. Attention alone must not see across samples; instead of one attention call a sample,
samples of similar length become the rows of a dense batch (right padding is harmless under a causal mask), so that
hundreds of short samples cost one call.

Under context parallelism each sample is padded to a multiple of ``2 · context`` and cut into as many chunks; rank ``r``
holds chunks ``r`` and ``2 · context − 1 − r``, which gives every rank the same share of the causal triangle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int, Shaped
from torch import Tensor

from rl.trainer import platform
from rl.trainer.flash import Spans, make_spans

platform.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402  (needs the platform)

if TYPE_CHECKING:
    from rl.trainer.indexer_training import IndexerTraining

SHORT_ROW = 128
"""Rows up to this length share one bucket: padding them costs less than another call."""
BUCKET_RATIO = 0.75
"""Longer rows share a bucket with those of at least this share of its longest one."""


@dataclass(frozen=True)
class Rows:
    """How tokens become the rows of a dense batch, and back."""

    tokens: Int[Tensor, " bucket_tokens"] | None
    """Which of the rank's tokens these are; None for all of them, in order."""
    slots: Int[Tensor, " bucket_tokens"] | None
    """Their places in ``rows · length``; None where there is no padding."""
    rows: int
    length: int

    def spread(self, x: Tensor) -> Tensor:
        """``[tokens, heads, dim]`` to ``[rows, heads, length, dim]``, zeros in the padding."""
        if self.tokens is not None:
            x = x.index_select(0, self.tokens)
        if self.slots is not None:
            x = x.new_zeros(self.rows * self.length, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.view(self.rows, self.length, *x.shape[1:]).transpose(1, 2)

    def collect(self, x: Tensor) -> Tensor:
        """``[rows, heads, length, dim]`` to ``[bucket_tokens, heads, dim]``."""
        x = x.transpose(1, 2).reshape(self.rows * self.length, x.size(1), x.size(3))
        return x if self.slots is None else x.index_select(0, self.slots)


@dataclass(frozen=True)
class Bucket:
    """One attention call. ``mask`` is None where plain causal order holds (without context parallelism)."""

    queries: Rows
    keys: Rows
    mask: Bool[Tensor, "rows 1 queries keys"] | None


@dataclass
class Packing(PackedSeqParams):
    """What the layers need of a ``Layout``. It travels in Megatron's argument for packed sequences; the format it
    states is ``sbhd`` with a batch of one, so that Megatron adds no per-sample loop of its own."""

    positions: Int[Tensor, " local"] | None = None
    """Position within its sample of each of this rank's tokens."""
    buckets: tuple[Bucket, ...] = ()
    order: Int[Tensor, " local"] | None = None
    """Place of each local token in the concatenated outputs of the buckets; None for the same order."""
    gathered_order: Int[Tensor, " padded"] | None = None
    """Place of each token of the padded layout in the rank-major gather over the context-parallel group."""
    real: Bool[Tensor, " local"] | None = None
    """False where it is padding."""
    routed_experts: Int[Tensor, "local layers top_k"] | None = None
    """The engine's choice of experts, negative where there is none; None without a record."""
    selections: dict[int, list[Int[Tensor, "rows queries top_k"] | None]] = field(default_factory=dict)
    """Positions that sparse attention attends to in each bucket (None for all), by the layer whose indexer chose
    them; filled in by the layers."""
    indexer_training: IndexerTraining | None = None
    """Where the layers leave what their indexers learn from; None unless the indexers are trained."""
    spans: Spans | None = None
    """In place of the buckets where FlashAttention runs."""
    cos_sin: tuple[Tensor, Tensor] | None = None
    """Of the rotary angles, filled in by the first layer."""


@dataclass(frozen=True)
class Layout:
    """A micro-batch as the model sees it; ``padded`` tokens in all, ``local`` on this context-parallel rank."""

    packing: Packing
    token_ids: Int[Tensor, "1 local"]
    scored: Int[Tensor, " local_scored"]
    """This rank's positions whose prediction is scored; only for them the output head computes logits."""
    targets: Int[Tensor, " local_scored"]
    """The token that each of them predicts."""
    temperature: Float32[Tensor, " local_scored"]
    predicted: Int[Tensor, " predicted"]
    """The scored tokens of the micro-batch (unpadded)."""
    predictors: Int[Tensor, " predicted"]
    """Their predecessors' places in the padded layout."""
    tokens: int
    """Unpadded."""
    local: int
    """Tokens of this context-parallel rank, padding included."""


def padded_tokens(tokens: int, context: int, multiple: int) -> int:
    """Size of the padded layout of so many tokens, each sample padded already; it has one token a rank at least."""
    chunks = (2 * context if context > 1 else 1) * multiple
    return max(1, -(-tokens // chunks)) * chunks


def build_layout(
    token_ids: Int[Tensor, " tokens"],
    cu_seqlens: Int[Tensor, " samples+1"],
    temperature: Float32[Tensor, " samples"],
    context: int = 1,
    context_rank: int = 0,
    multiple: int = 1,
    scored: Bool[Tensor, " tokens"] | None = None,
    flash: bool = False,
    at_least: int = 0,
    routed_experts: Int[Tensor, "tokens layers top_k"] | None = None,
) -> Layout:
    """Lay out one micro-batch, on the CPU (``rl.trainer.transfer`` sends it off); it may have no token at all.

    Args:
        multiple: each rank's number of tokens is padded to a multiple of it (sequence parallelism).
        scored: tokens whose log-probs are wanted; None for all. A sample's first token has none.
        flash: prepare for FlashAttention in place of dense rows.
        at_least: pad to so many tokens in all (see ``padded_tokens``).
        routed_experts: the engine's choice of experts, negative where it is not recorded.
    """
    chunks = 2 * context if context > 1 else 1
    lengths = cu_seqlens.diff()
    padded = (lengths + chunks - 1) // chunks * chunks
    total = int(padded.sum())
    tail = padded_tokens(max(total, at_least), context, multiple) - total
    rows = torch.cat([padded, torch.tensor([tail])])
    starts = rows.cumsum(0) - rows
    total += tail

    offset = torch.arange(len(token_ids)) - _repeated(cu_seqlens[:-1], lengths)
    place = mine = None
    if context == 1:  # the tokens stand where they stood, and this rank has all of them
        positions, locals_ = torch.cat([offset, torch.arange(tail)]), None
    else:
        place = _repeated(starts[:-1], lengths) + offset
        positions, locals_ = _divide(rows, context)
        mine = locals_[context_rank]

    def placed(x: Tensor, empty: int) -> Tensor:
        whole = _placed(x, place, total, empty)
        return whole if mine is None else whole[mine]

    wanted = offset > 0 if scored is None else scored & (offset > 0)
    predicted = wanted.nonzero().squeeze(1)
    predictors = predicted - 1 if place is None else place[predicted] - 1
    targets, local_scored = token_ids[predicted].long(), predictors
    temperatures = _repeated(torch.cat([temperature.float(), torch.ones(1)]), rows)
    if mine is not None:
        whole = _placed(targets, predictors, total, -1)[mine]
        local_scored = (whole >= 0).nonzero().squeeze(1)
        targets, temperatures = whole[local_scored], temperatures[mine]

    packing = _make_packing(rows, positions, locals_, context_rank, flash)
    packing.real = placed(torch.ones(len(token_ids), dtype=torch.bool), False)
    if routed_experts is not None:
        packing.routed_experts = placed(routed_experts, -1)
    return Layout(
        packing=packing,
        token_ids=placed(token_ids.long(), 0).unsqueeze(0),
        scored=local_scored,
        targets=targets,
        temperature=temperatures[local_scored],
        predicted=predicted,
        predictors=predictors,
        tokens=len(token_ids),
        local=total if mine is None else len(mine),
    )


def _make_packing(
    rows: Int[Tensor, " rows"],
    positions: Int[Tensor, " padded"],
    locals_: list[Int[Tensor, " local"]] | None,
    rank: int,
    flash: bool,
) -> Packing:
    """What attention needs, for one of the context-parallel ranks; ``locals_`` is None where there is only one."""
    context = 1 if locals_ is None else len(locals_)
    mine = None if locals_ is None else locals_[rank]
    gathered_order = None if locals_ is None else torch.cat(locals_).argsort()
    longest = int(rows.max())
    packing = Packing(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions if mine is None else positions[mine],
        gathered_order=gathered_order,
    )
    full_rows = rows[rows > 0]
    if flash:
        packing.spans = make_spans(full_rows, context, rank, gathered_order)
    else:
        _add_buckets(packing, full_rows, positions, mine, context)
    return packing


def _divide(rows: Int[Tensor, " rows"], context: int) -> tuple[Int[Tensor, " padded"], list[Int[Tensor, " local"]]]:
    """The positions of all tokens within their rows, and which tokens each context-parallel rank has."""
    chunks = 2 * context if context > 1 else 1
    starts = rows.cumsum(0) - rows
    positions = torch.arange(int(rows.sum())) - _repeated(starts, rows)
    chunk = positions // (_repeated(rows, rows) // chunks)
    owner = torch.minimum(chunk, chunks - 1 - chunk)
    return positions, [(owner == rank).nonzero().squeeze(1) for rank in range(context)]


def _placed(x: Tensor, place: Int[Tensor, " entries"] | None, total: int, empty: int) -> Tensor:
    """``total`` entries, those of ``x`` at their places (the first ones, if None) and ``empty`` elsewhere."""
    whole = x.new_full((total, *x.shape[1:]), empty)
    if place is None:
        whole[: len(x)] = x
    else:
        whole[place] = x
    return whole


def _bucket_members(lengths: Int[Tensor, " rows"]) -> Iterator[Int[Tensor, " members"]]:
    """Rows of similar length together, in their order; every row in exactly one bucket."""
    by_length = lengths.argsort(descending=True, stable=True)
    ordered = lengths[by_length].tolist()
    begin = 0
    for index, length in enumerate(ordered):
        if ordered[begin] > SHORT_ROW and length < BUCKET_RATIO * ordered[begin]:
            yield by_length[begin:index].sort().values
            begin = index
    yield by_length[begin:].sort().values


def _add_buckets(
    packing: Packing,
    rows: Int[Tensor, " rows"],
    positions: Int[Tensor, " padded"],
    mine: Int[Tensor, " local"] | None,
    context: int,
) -> None:
    buckets, outputs = [], []
    local_rows = rows // context
    for members in _bucket_members(rows):
        keys, query_tokens = _rows(rows, members)
        queries = keys
        if context > 1:
            queries, query_tokens = _rows(local_rows, members)
        mask = None
        if mine is not None:
            query_positions = torch.zeros(queries.rows * queries.length, dtype=torch.long)
            slots = torch.arange(len(query_tokens)) if queries.slots is None else queries.slots
            query_positions[slots] = positions[mine[query_tokens]]
            query_positions = query_positions.view(queries.rows, 1, queries.length, 1)
            mask = query_positions >= torch.arange(keys.length)
        buckets.append(Bucket(queries, keys, mask))
        outputs.append(query_tokens)
    packing.buckets = tuple(buckets)
    packing.order = torch.cat(outputs).argsort() if len(buckets) > 1 else None


def _repeated(x: Shaped[Tensor, " entries"], counts: Int[Tensor, " entries"]) -> Shaped[Tensor, " repeated"]:
    """Each entry as often as its count says; ten times faster than PyTorch, which makes an index first."""
    return torch.from_numpy(np.repeat(x.numpy(), counts.numpy()))


def _rows(
    lengths: Int[Tensor, " rows"], members: Int[Tensor, " members"]
) -> tuple[Rows, Int[Tensor, " bucket_tokens"]]:
    """These members of all rows as a dense batch, and which tokens they are."""
    starts = lengths.cumsum(0) - lengths
    chosen = lengths[members]
    longest = int(chosen.max())
    row = _repeated(torch.arange(len(members)), chosen)
    offset = torch.arange(int(chosen.sum())) - _repeated(chosen.cumsum(0) - chosen, chosen)
    tokens = starts[members][row] + offset
    full = len(members) == len(lengths)
    dense = bool((chosen == longest).all())
    slots = row * longest + offset
    return (
        Rows(None if full else tokens, None if dense else slots, len(members), longest),
        tokens,
    )
