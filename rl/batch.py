"""From trajectories to the tensors of one update, and how its samples are spread over micro-batches. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int, Int64
from torch import Tensor

from algorithms.types import LossInputs, RolloutBatch, Targets
from rollout.trajectory import NO_VERSION, NOT_RECORDED, Trajectory

RolloutKey = tuple[int, int]
"""``(group_id, sample_id)`` of a rollout."""


@dataclass(frozen=True)
class TrainBatch:
    """One update's whole global batch, on the CPU. Sample ``s`` is the ``s``-th trajectory that was given."""

    token_ids: Int[Tensor, " tokens"]
    temperature: Float32[Tensor, " samples"]
    rollout: RolloutBatch
    scored: Bool[Tensor, " tokens"]
    """Tokens whose log-probs are computed: at first those of the action mask."""
    routed_experts: Int[Tensor, "tokens layers top_k"] | None = None
    """The engine's choice of experts (int32), -1 for the tokens of trajectories without; None if none has any."""


@dataclass(frozen=True)
class SampleTokens:
    """What the model needs of some samples, packed."""

    token_ids: Int[Tensor, " tokens"]
    cu_seqlens: Int[Tensor, " samples+1"]
    temperature: Float32[Tensor, " samples"]
    index: Int[Tensor, " tokens"]
    """Place of each of these tokens in the whole batch."""
    scored: Bool[Tensor, " tokens"]
    routed_experts: Int[Tensor, "tokens layers top_k"] | None = None
    on_device: tuple[Int[Tensor, " tokens"], Int[Tensor, " samples+1"]] | None = None
    """``index`` and ``cu_seqlens`` again, where the model is; set by the pass that has sent them there."""


def build_batch(
    trajectories: Sequence[Trajectory], current_version: int, dropped: Collection[RolloutKey] = ()
) -> TrainBatch:
    """Pack trajectories; the segments of one rollout share its index, reward and flags.

    A rollout is valid if all its segments are, and truncated if its last segment is.

    Args:
        dropped: rollouts that are only kept for their group's baseline.

    Raises:
        ValueError: no trajectory; a segment twice; segments of one rollout with different rewards; a token newer than
            ``current_version``; or ``dropped`` names a rollout that is not there.
    """
    if not trajectories:
        raise ValueError("an update needs at least one trajectory")
    ids = np.array([(t.group_id, t.sample_id, t.segment) for t in trajectories], dtype=np.int64)
    rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    temperature = np.array([t.temperature for t in trajectories])
    versions = np.concatenate([t.weight_versions for t in trajectories])
    rollouts = _Rollouts.of(ids)
    _check(trajectories, ids, rewards, rollouts, versions, temperature, current_version)
    known = {key: index for index, key in enumerate(map(tuple, rollouts.keys.tolist()))}
    unknown = sorted(set(dropped) - known.keys())
    if unknown:
        raise ValueError(f"dropped names rollouts (group_id, sample_id) that are not in the batch: {unknown}")

    dropped_mask = np.zeros(len(known), dtype=bool)
    dropped_mask[[known[key] for key in dropped]] = True
    valid = np.array([t.valid for t in trajectories])
    truncated = np.array([t.truncated for t in trajectories])
    repeated = np.array([t.repeated for t in trajectories])
    batch = RolloutBatch(
        cu_seqlens=torch.from_numpy(np.array([0, *accumulate(map(len, trajectories))])),
        action_mask=_joined([t.action_mask for t in trajectories]),
        rollout_logprobs=_joined([t.rollout_logprobs for t in trajectories]),
        weight_versions=torch.from_numpy(versions),
        current_version=current_version,
        rollout=torch.from_numpy(rollouts.index),
        segment=torch.from_numpy(ids[:, 2].copy()),
        group=torch.from_numpy(_ranks(rollouts.keys[:, 0])),
        reward=torch.from_numpy(rewards[rollouts.first]),
        valid=torch.from_numpy(np.logical_and.reduceat(valid[rollouts.by_segment], rollouts.begins)),
        truncated=torch.from_numpy(truncated[rollouts.last]),
        dropped=torch.from_numpy(dropped_mask),
        repeated=torch.from_numpy(repeated[rollouts.first]),
        top_ids=_optional(trajectories, "top_ids", np.int32(NOT_RECORDED)),
        top_logprobs=_optional(trajectories, "top_logprobs", np.float32(0)),
    )
    return TrainBatch(
        _joined([t.token_ids for t in trajectories]),
        torch.from_numpy(temperature.astype(np.float32)),
        batch,
        batch.action_mask,
        _optional(trajectories, "routed_experts", np.int32(NOT_RECORDED)),
    )


@dataclass(frozen=True)
class _Rollouts:
    """Which trajectories are the segments of one rollout; rollouts in the order of their keys."""

    keys: Int64[np.ndarray, "rollouts 2"]
    index: Int64[np.ndarray, " samples"]
    """Of each trajectory's rollout."""
    by_segment: Int64[np.ndarray, " samples"]
    """Trajectories by rollout, then by segment."""
    begins: Int64[np.ndarray, " rollouts"]
    """Where each rollout begins in ``by_segment``."""
    first: Int64[np.ndarray, " rollouts"]
    """Each rollout's first trajectory as they were given."""
    last: Int64[np.ndarray, " rollouts"]
    """The trajectory of its last segment."""

    @staticmethod
    def of(ids: Int64[np.ndarray, "samples 3"]) -> _Rollouts:
        """From ``(group_id, sample_id, segment)`` of each trajectory.

        Raises:
            ValueError: one of them comes more than once.
        """
        by_segment = np.lexsort(ids.T[::-1])
        ordered = ids[by_segment]
        changed = ordered[1:] != ordered[:-1]
        new = changed[:, 0] | changed[:, 1]
        repeated = np.flatnonzero(~new & ~changed[:, 2])
        if len(repeated):
            segment = tuple(ordered[repeated[0]].tolist())
            raise ValueError(f"(group_id, sample_id, segment) = {segment} comes more than once")
        begins = np.flatnonzero(np.concatenate([[True], new]))
        index = np.empty(len(ids), dtype=np.int64)
        index[by_segment] = np.concatenate([[0], new.cumsum()])
        last = by_segment[np.append(begins[1:], len(ids)) - 1]
        return _Rollouts(ordered[begins, :2], index, by_segment, begins, np.minimum.reduceat(by_segment, begins), last)


def _ranks(ascending: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """0 for the smallest number, 1 for the next, …"""
    return np.concatenate([[0], (ascending[1:] != ascending[:-1]).cumsum()])


def _optional(trajectories: Sequence[Trajectory], name: str, unrecorded: np.generic) -> Tensor | None:
    """An array that trajectories may lack: rows of ``unrecorded`` for those that do, None where all do.

    Raises:
        ValueError: its rows have different shapes.
    """
    arrays = [getattr(t, name) for t in trajectories]
    shapes = {array.shape[1:] for array in arrays if array is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"the rows of {name} have different shapes: {sorted(shapes)}")
    shape = shapes.pop()
    parts = [
        np.full((len(t), *shape), unrecorded) if array is None else array
        for t, array in zip(trajectories, arrays, strict=True)
    ]
    return _joined(parts)


def _joined(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _check(
    trajectories: Sequence[Trajectory],
    ids: Int64[np.ndarray, "samples 3"],
    rewards: Float64[np.ndarray, " samples"],
    rollouts: _Rollouts,
    versions: Int[np.ndarray, " tokens"],
    temperature: Float64[np.ndarray, " samples"],
    current_version: int,
) -> None:
    expected = rewards[rollouts.first][rollouts.index]
    different = ~((rewards == expected) | (np.isnan(rewards) & np.isnan(expected)))
    if different.any():
        group, sample, _ = ids[different][0]
        raise ValueError(f"the segments of rollout {sample} of group {group} have different rewards")
    newest = int(versions.max(initial=NO_VERSION))
    if newest > current_version:
        raise ValueError(f"a token was sampled by version {newest}, newer than the current version {current_version}")
    cold = np.flatnonzero(temperature <= 0)
    if len(cold):
        t = trajectories[cold[0]]
        raise ValueError(f"trajectory {t.task}/{t.prompt_id}: temperature {t.temperature} must be above 0")


def sample_cost(length: int, balance_length: float) -> float:
    """Work that a sample of ``n`` tokens makes, in tokens of a very short one: ``n + n² / ν``.

    The matrix products with the weights are linear in the tokens. Attention, causal, is quadratic: at ``n = ν``, the
    ``balance_length``, it costs as much as they do.
    """
    return length + length * length / balance_length


def plan_micro_batches(
    lengths: Sequence[int], budget: int, ranks: int, balance_length: float = math.inf, multiple: int = 1
) -> list[list[list[int]]]:
    """Spread samples over data-parallel ranks and micro-batches: ``plan[rank][micro_batch]`` lists samples, ascending.

    Every sample is in exactly one micro-batch; every rank has the same number of them (at least one), some empty only
    where there are fewer samples than micro-batches. A micro-batch has at most ``budget`` tokens, unless it is a
    single longer sample. Micro-batches, and then ranks, are balanced greedily by ``sample_cost``: no two ranks differ
    by more than the most expensive micro-batch where none is empty.

    Args:
        balance_length: see ``sample_cost``; infinite balances tokens.
        multiple: the number of micro-batches of a rank is a multiple of it (an interleaved pipeline wants that).
    """
    if budget < 1 or ranks < 1 or multiple < 1:
        raise ValueError(f"budget {budget}, ranks {ranks} and multiple {multiple} must be at least 1")
    costs = [sample_cost(length, balance_length) for length in lengths]
    fitted = _first_fit(lengths, budget)
    per_rank = -(-max(1, len(fitted)) // (ranks * multiple)) * multiple
    bins = _even(lengths, costs, budget, per_rank * ranks) or _split_largest(fitted, costs, per_rank * ranks)

    loads = [sum(costs[sample] for sample in members) for members in bins]
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(bins)), key=lambda i: -loads[i]):
        load, rank = heapq.heappop(heap)
        plan[rank].append(sorted(bins[index]))
        if len(plan[rank]) < per_rank:
            heapq.heappush(heap, (load + loads[index], rank))
    return plan


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda sample: -lengths[sample])


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Few bins within the budget: each sample, longest first, goes into the first bin that has room."""
    bins: list[list[int]] = []
    room = np.zeros(len(lengths), dtype=np.int64)
    for sample in _longest_first(lengths):
        fits = room[: len(bins)] >= lengths[sample]
        index = int(fits.argmax()) if fits.any() else len(bins)
        if index == len(bins):
            bins.append([])
            room[index] = budget
        bins[index].append(sample)
        room[index] -= lengths[sample]
    return bins


def _even(lengths: Sequence[int], costs: Sequence[float], budget: int, count: int) -> list[list[int]] | None:
    """``count`` bins of nearly equal cost (longest sample first, into the cheapest bin), or None if that breaks the
    budget of tokens."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0.0, 0, index) for index in range(count)]
    for sample in _longest_first(lengths):
        cost, members, index = heapq.heappop(heap)
        if members and tokens[index] + lengths[sample] > budget:
            return None
        bins[index].append(sample)
        tokens[index] += lengths[sample]
        heapq.heappush(heap, (cost + costs[sample], members + 1, index))
    return bins


def _split_largest(bins: list[list[int]], costs: Sequence[float], count: int) -> list[list[int]]:
    """Halve the most expensive bin until there are ``count``; empty ones where nothing is left to halve."""
    bins = list(bins)
    while len(bins) < count:
        divisible = [members for members in bins if len(members) > 1]
        if not divisible:
            bins.append([])
            continue
        largest = max(divisible, key=lambda members: sum(costs[sample] for sample in members))
        bins.remove(largest)
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0.0, 0.0]
        for sample in sorted(largest, key=lambda s: -costs[s]):
            lighter = int(loads[1] < loads[0])
            halves[lighter].append(sample)
            loads[lighter] += costs[sample]
        # Samples without tokens could all have gone to one side.
        bins.extend(halves if halves[1] else ([halves[0][0]], halves[0][1:]))
    return bins


def take_samples(batch: TrainBatch, samples: Sequence[int]) -> SampleTokens:
    """The tokens of some samples, packed in the given order (which may be empty)."""
    edges = batch.rollout.cu_seqlens.tolist()
    spans = [slice(edges[sample], edges[sample + 1]) for sample in samples]

    def taken(x: Tensor) -> Tensor:
        array = x.numpy()
        return _joined([array[span] for span in spans] or [array[:0]])

    return SampleTokens(
        taken(batch.token_ids),
        torch.from_numpy(np.array([0, *accumulate(span.stop - span.start for span in spans)])),
        torch.from_numpy(batch.temperature.numpy()[list(samples)]),
        _joined([np.arange(span.start, span.stop) for span in spans] or [np.arange(0)]),
        taken(batch.scored),
        None if batch.routed_experts is None else taken(batch.routed_experts),
    )


@dataclass(frozen=True)
class LossConstants:
    """What a loss gets beside the log-probs: that of the whole batch, on the device before the first pass begins."""

    values: Float32[Tensor, "names tokens"]
    names: tuple[str, ...]
    """Of the fields of ``LossInputs`` that the rows of ``values`` are."""
    masks: Bool[Tensor, "2 tokens"]
    """The action mask, and the tokens of it that the current weights sampled."""

    @staticmethod
    def of(batch: RolloutBatch, targets: Targets) -> LossConstants:
        """On the CPU."""
        rows = {
            "rollout_logprobs": batch.rollout_logprobs,
            "advantages": targets.advantages,
            "weights": targets.weights,
            "old_logprobs": batch.old_logprobs,
            "ref_logprobs": batch.ref_logprobs,
            "teacher_logprobs": batch.teacher_logprobs,
        }
        present = {name: row for name, row in rows.items() if row is not None}
        action_mask = batch.action_mask.numpy()
        own = action_mask & (batch.weight_versions.numpy() == batch.current_version)
        values = np.stack([row.numpy() for row in present.values()])
        return LossConstants(torch.from_numpy(values), tuple(present), torch.from_numpy(np.stack([action_mask, own])))

    def inputs(
        self, taken: SampleTokens, logprobs: Float32[Tensor, " tokens"], entropy: Float32[Tensor, " tokens"] | None
    ) -> tuple[LossInputs, Bool[Tensor, " tokens"]]:
        """What an algorithm's loss gets for the samples of ``taken``, and which tokens the current weights sampled; on
        the device of ``logprobs``, where the constants must be."""
        index, cu_seqlens = taken.on_device or (taken.index, taken.cu_seqlens)
        action_mask, own = self.masks.index_select(1, index)
        values = dict(zip(self.names, self.values.index_select(1, index), strict=True))
        inputs = LossInputs(
            cu_seqlens=cu_seqlens, logprobs=logprobs, entropy=entropy, action_mask=action_mask, **values
        )
        return inputs, own
