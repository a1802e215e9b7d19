"""Where each token of a micro-batch stands in the model: padding, context-parallel ranks, attention rows.

Samples are packed end to end. Attention alone must not see across samples; instead of one attention call a sample,
samples of similar length become the rows of a dense batch (right padding is harmless under a causal mask), so that
hundreds of short samples cost one call.

Under context parallelism each sample is padded to a multiple of ``2 · context`` and cut into as many chunks; rank ``r``
holds chunks ``r`` and ``2 · context − 1 − r``, which gives every rank the same share of the causal triangle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Complex64, Float32, Int, Shaped
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
    rotation: Complex64[Tensor, "local dim//2"] | None = None
    """The same as complex numbers, where layers rotate by multiplying those."""
    read: Int[Tensor, " local_scored"] | None = None
    """The layout's ``scored``: positions whose last hidden state is read."""

    def in_order(self, outputs: Sequence[Shaped[Tensor, "bucket_tokens ..."]]) -> Shaped[Tensor, "local ..."]:
        """Of all tokens, from the outputs of the buckets."""
        joined = outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))
        return joined if self.order is None else joined.index_select(0, self.order)


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

    def read(self, hidden: Shaped[Tensor, "positions hidden"]) -> Shaped[Tensor, "local_scored hidden"]:
        """The rows of the last hidden state at ``scored``, also where the last layer went on with those alone: the
        positions are ascending, so that as many rows as there are of them are theirs."""
        return hidden if len(hidden) == len(self.scored) else hidden.index_select(0, self.scored)


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
    ids, edges = token_ids.numpy(), cu_seqlens.numpy()
    chunks = 2 * context if context > 1 else 1
    lengths = np.diff(edges)
    padded = (lengths + chunks - 1) // chunks * chunks
    total = int(padded.sum())
    tail = padded_tokens(max(total, at_least), context, multiple) - total
    rows = np.append(padded, tail)
    total += tail

    offset = _counted(np.zeros_like(lengths), lengths)
    place = mine = None
    if context == 1:  # the tokens stand where they stood, and this rank has all of them
        positions, locals_ = np.concatenate([offset, np.arange(tail)]), None
    else:
        place = _counted((rows.cumsum() - rows)[:-1], lengths)
        positions, locals_ = _divide(rows, context)
        mine = locals_[context_rank]

    def placed(x: Shaped[np.ndarray, "tokens ..."], empty: int) -> Tensor:
        whole = _placed(x, place, total, empty)
        return torch.from_numpy(whole if mine is None else whole[mine])

    wanted = offset > 0 if scored is None else scored.numpy() & (offset > 0)
    predicted = np.flatnonzero(wanted)
    predictors = (predicted if place is None else place[predicted]) - 1
    before = torch.from_numpy(predictors)
    targets, local_scored = ids[predicted].astype(np.int64), predictors
    temperatures = np.repeat(np.append(temperature.numpy(), np.float32(1)), rows)
    if mine is not None:
        whole = _placed(targets, predictors, total, -1)[mine]
        local_scored = np.flatnonzero(whole >= 0)
        targets, temperatures = whole[local_scored], temperatures[mine]

    packing = _make_packing(rows, positions, locals_, context_rank, flash)
    packing.real = placed(np.ones(len(ids), dtype=bool), False)
    if routed_experts is not None:
        packing.routed_experts = placed(routed_experts.numpy(), -1)
    packing.read = before if mine is None else torch.from_numpy(local_scored)  # one tensor is sent once
    return Layout(
        packing=packing,
        token_ids=placed(ids.astype(np.int64), 0).unsqueeze(0),
        scored=packing.read,
        targets=torch.from_numpy(targets),
        temperature=torch.from_numpy(temperatures[local_scored]),
        predicted=torch.from_numpy(predicted),
        predictors=before,
        tokens=len(ids),
        local=total if mine is None else len(mine),
    )


def _make_packing(
    rows: Int[np.ndarray, " rows"],
    positions: Int[np.ndarray, " padded"],
    locals_: list[Int[np.ndarray, " local"]] | None,
    rank: int,
    flash: bool,
) -> Packing:
    """What attention needs, for one of the context-parallel ranks; ``locals_`` is None where there is only one."""
    context = 1 if locals_ is None else len(locals_)
    mine = None if locals_ is None else locals_[rank]
    gathered_order = None if locals_ is None else torch.from_numpy(np.concatenate(locals_).argsort())
    longest = int(rows.max())
    packing = Packing(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=torch.from_numpy(positions if mine is None else positions[mine]),
        gathered_order=gathered_order,
    )
    full_rows = rows[rows > 0]
    if flash:
        packing.spans = make_spans(torch.from_numpy(full_rows), context, rank, gathered_order)
    else:
        _add_buckets(packing, full_rows, positions, mine, context)
    return packing


def _divide(
    rows: Int[np.ndarray, " rows"], context: int
) -> tuple[Int[np.ndarray, " padded"], list[Int[np.ndarray, " local"]]]:
    """The positions of all tokens within their rows, and which tokens each context-parallel rank has."""
    chunks = 2 * context if context > 1 else 1
    positions = _counted(np.zeros_like(rows), rows)
    chunk = positions // np.repeat(rows // chunks, rows)
    owner = np.minimum(chunk, chunks - 1 - chunk)
    return positions, [np.flatnonzero(owner == rank) for rank in range(context)]


def _placed(
    x: Shaped[np.ndarray, "entries ..."], place: Int[np.ndarray, " entries"] | None, total: int, empty: int
) -> Shaped[np.ndarray, "total ..."]:
    """``total`` entries, those of ``x`` at their places (the first ones, if None) and ``empty`` elsewhere."""
    if place is None and len(x) == total:
        return x
    whole = np.full((total, *x.shape[1:]), empty, dtype=x.dtype)
    whole[slice(len(x)) if place is None else place] = x
    return whole


def _bucket_members(lengths: Int[np.ndarray, " rows"]) -> Iterator[Int[np.ndarray, " members"]]:
    """Rows of similar length together, in their order; every row in exactly one bucket."""
    by_length = np.argsort(-lengths, kind="stable")
    ordered = lengths[by_length].tolist()
    begin = 0
    for index, length in enumerate(ordered):
        if ordered[begin] > SHORT_ROW and length < BUCKET_RATIO * ordered[begin]:
            yield np.sort(by_length[begin:index])
            begin = index
    yield np.sort(by_length[begin:])


def _add_buckets(
    packing: Packing,
    rows: Int[np.ndarray, " rows"],
    positions: Int[np.ndarray, " padded"],
    mine: Int[np.ndarray, " local"] | None,
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
            query_positions = np.zeros(queries.rows * queries.length, dtype=np.int64)
            slots = slice(None) if queries.slots is None else queries.slots.numpy()
            query_positions[slots] = positions[mine[query_tokens]]
            whole = torch.from_numpy(query_positions).view(queries.rows, 1, queries.length, 1)
            mask = whole >= torch.arange(keys.length)
        buckets.append(Bucket(queries, keys, mask))
        outputs.append(query_tokens)
    packing.buckets = tuple(buckets)
    packing.order = torch.from_numpy(np.concatenate(outputs).argsort()) if len(buckets) > 1 else None


def _counted(starts: Int[np.ndarray, " rows"], counts: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " counted"]:
    """For each row as many successive numbers as its count says, from its start."""
    shift = starts - (counts.cumsum() - counts)
    return np.arange(counts.sum()) + np.repeat(shift, counts)


def _rows(
    lengths: Int[np.ndarray, " rows"], members: Int[np.ndarray, " members"]
) -> tuple[Rows, Int[np.ndarray, " bucket_tokens"]]:
    """These members of all rows as a dense batch, and which tokens they are."""
    chosen, starts = lengths[members], (lengths.cumsum() - lengths)[members]
    longest = int(chosen.max())
    tokens = _counted(starts, chosen)
    slots = None
    if (chosen < longest).any():
        slots = torch.from_numpy(_counted(np.arange(len(members)) * longest, chosen))
    some = len(members) < len(lengths)
    return Rows(torch.from_numpy(tokens) if some else None, slots, len(members), longest), tokens
