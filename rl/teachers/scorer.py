"""The teachers' side of a trainer rank: their weights in tiers, and what they say of a batch.

    group the batch by teacher ─► one order for all ranks, nearest tier first ─► for each: lease ─► bind ─► forward
                                                                  the next one loads meanwhile ─┘

After the last one the tiers load what the batch after this needs first, while the student trains and the engines
generate.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from algorithms.metrics import Mean, Metric, Sum
from algorithms.opd import mix_teachers
from rl.batch import TrainBatch, build_batch
from rl.teachers.importing import import_teachers
from rl.teachers.modules import TeacherModel, architecture, shard_name
from rl.teachers.passes import NOWHERE, Scores, TeacherViews, View, score
from rl.teachers.teaching import TeacherSetup, Teaching
from rl.trainer import platform
from rl.trainer.collective import on_every_rank, on_rank_zero
from rl.trainer.config import TrainerConfig
from rl.trainer.model import read_hf_config
from rollout.trajectory import Trajectory
from teachers.errors import TierFullError
from teachers.scoring import scoring_order
from teachers.shard import StoredShard
from teachers.store import TeacherStore
from teachers.tiers import TierManager

LOADS = ("read", "copy")
"""Kinds of the tiers' spans: disk to pinned memory, and from there to the device."""
STREAMED_PASSES = 4
"""Times the micro-batch of training that a streaming teacher gets: each pass loads all of its layers."""
PlanPasses = Callable[[TrainBatch, int], list[list[int]]]
"""``(batch, tokens of a micro-batch) → this data-parallel rank's micro-batches`` of the samples that count."""


@dataclass(frozen=True)
class Scored:
    """What the teachers say of a batch; the same on every rank."""

    logprobs: Float32[Tensor, " tokens"]
    """The weighted mix of each token's teachers; 0 where it has none."""
    views: TeacherViews | None
    metrics: Mapping[str, Metric]


class TeacherScorer:
    """Made by all ranks together; ``close`` frees the tiers."""

    def __init__(self, setup: TeacherSetup, config: TrainerConfig, vocabulary: int) -> None:
        """
        Args:
            vocabulary: tokens of the student.

        Raises:
            TeacherError: an import failed, or a teacher does not fit.
        """
        self.vocabulary = vocabulary
        self._counters: dict[str, float] = {}
        self._looked_at = time.perf_counter()
        self._models: dict[str, TeacherModel] = {}
        by_architecture: dict[str, TeacherModel] = {}
        for source in setup.sources:
            hf = read_hf_config(source.model)
            key = architecture(hf)
            if key not in by_architecture:
                by_architecture[key] = TeacherModel(hf, config, streams=source.least_bytes(config) > setup.hbm_bytes)
            self._models[source.name] = by_architecture[key]
        store = TeacherStore(setup.store)
        pairs = [(source, self._models[source.name]) for source in setup.sources]
        self.imported = import_teachers(store, pairs, config)
        self._tiers: TierManager | None = None
        self._streaming: frozenset[str] = frozenset()
        """Teachers that are larger than the tier."""
        if pairs:
            on_every_rank(lambda: self._open(store, setup, shard_name(config)))

    def _open(self, store: TeacherStore, setup: TeacherSetup, shard: str) -> None:
        names = [source.name for source in setup.sources]
        self._tiers = TierManager(store, shard, platform.device(), setup.hbm_bytes, setup.pinned_bytes, names)
        shards = self._tiers.shards
        self._streaming = frozenset(name for name in names if shards[name].device_bytes > setup.hbm_bytes)
        for name in sorted(self._streaming):
            _check_streams(shards[name], setup.hbm_bytes)

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.close()

    def describe(self) -> str:
        """For the console."""
        sizes = {name: model.nbytes / 2**20 for name, model in self._models.items()}
        listed = ", ".join(f"{name} {size:.1f} MiB" for name, size in sorted(sizes.items()))
        return f"teachers (of one rank): {listed}; imported {len(self.imported)} of {len(sizes)}" if sizes else ""

    def prefetch(self, counts: Mapping[str, int]) -> None:
        """The next batch's prompts by teacher, as far as they are known: load what comes first."""
        self._look_ahead([], counts)

    def _look_ahead(self, now: Sequence[str], ahead: Mapping[str, int]) -> None:
        if self._tiers is None:
            return
        counts = {name: count for name, count in ahead.items() if name in self._models}
        then = scoring_order(counts, self._tiers.in_hbm, self._tiers.in_pinned)
        self._tiers.plan([teacher for teacher in [*now, *then] if teacher not in self._streaming])

    def score(
        self,
        trajectories: Sequence[Trajectory],
        batch: TrainBatch,
        teaching: Teaching,
        view: View | None,
        plan: PlanPasses,
    ) -> Scored:
        """A collective of all ranks.

        Args:
            batch: of the same trajectories.
            view: what is kept beside the log-probs of the sampled tokens.
        """
        groups = teaching.groups()
        parts = {
            teacher: _Part(_elsewhere(values, trajectories, groups[teacher]))
            for teacher, values in teaching.scored.items()
            if teacher in groups
        }
        held = {teacher: len(members) for teacher, members in groups.items() if teacher in self._models}
        # One order for all ranks, since their collectives meet; rank 0's tiers decide.
        order = on_rank_zero(lambda: self._order(held))
        self._look_ahead(order, teaching.ahead)
        for teacher in order:
            own = build_batch(
                [trajectories[index].replace(routed_experts=None) for index in groups[teacher]],
                batch.rollout.current_version,
            )
            parts[teacher] = self._score_one(teacher, own, view, plan)
        self._look_ahead([], teaching.ahead)
        return _mixed(parts, groups, batch, teaching, self.vocabulary if view else None, self._tier_metrics())

    def _order(self, held: Mapping[str, int]) -> list[str]:
        return [] if self._tiers is None else scoring_order(held, self._tiers.in_hbm, self._tiers.in_pinned)

    def _score_one(self, teacher: str, own: TrainBatch, view: View | None, plan: PlanPasses) -> _Part:
        assert self._tiers is not None
        model, started = self._models[teacher], time.perf_counter()
        tokens = model.config.max_tokens_per_micro_batch
        with ExitStack() as stack:
            if teacher in self._streaming:
                tokens *= STREAMED_PASSES
                stack.enter_context(model.streamed(partial(self._tiers.layers, teacher)))
            else:
                stack.enter_context(model.bound(self._leased(teacher, stack)))
            leased = time.perf_counter()
            scores = score(model.stages, own, plan(own, tokens), model.config, view)
        done = time.perf_counter()
        mask = _usable(own)
        metrics: dict[str, Metric] = {
            "exposed_s": Sum(leased - started),
            "score_s": Sum(done - leased),
            "entropy": Mean(float(scores.entropy[mask].sum()), float(mask.sum())),
        }
        return _Part(scores.logprobs, scores, metrics)

    def _leased(self, teacher: str, stack: ExitStack) -> Mapping[str, Tensor]:
        """Its weights on this rank, once all ranks have theirs: what one can't load fails on every one."""
        assert self._tiers is not None
        tiers = self._tiers
        weights: dict[str, Tensor] = {}

        def lease() -> None:
            weights.update(stack.enter_context(tiers.lease(teacher)))

        on_every_rank(lease)
        return weights

    def _tier_metrics(self) -> dict[str, Metric]:
        """What the tiers did since the call before: hits, waits, and each teacher's loads, whenever they ran."""
        if self._tiers is None:
            return {}
        stats = self._tiers.stats()
        counters: dict[str, float] = {
            "hbm_hits": stats.hbm_hits,
            "pinned_hits": stats.pinned_hits,
            "disk_loads": stats.disk_loads,
            "exposed_s": stats.exposed_seconds,
            "read_bytes": stats.read_bytes,
            "copied_bytes": stats.copied_bytes,
        }
        metrics: dict[str, Metric] = {
            f"teachers/{name}": Sum(value - self._counters.get(name, 0.0)) for name, value in counters.items()
        }
        loads: defaultdict[str, float] = defaultdict(float)
        for span in stats.spans:
            if span.kind in LOADS and span.stop > self._looked_at:
                loads[span.teacher] += span.stop - span.start
        metrics |= {f"teacher/{teacher}/load_s": Sum(seconds) for teacher, seconds in loads.items()}
        self._counters, self._looked_at = counters, time.perf_counter()
        return metrics


def _check_streams(shard: StoredShard, hbm_bytes: int) -> None:
    needed = 2 * max(shard.place(group.tensors)[1] for group in shard.groups)
    if needed > hbm_bytes:
        raise TierFullError(
            f"teacher {shard.teacher} streams through two buffers of its largest layer, {needed} bytes, and "
            f"distillation.hbm_bytes={hbm_bytes}: raise it"
        )


@dataclass(frozen=True)
class _Part:
    """What one teacher says, of its own samples' tokens."""

    logprobs: Float32[Tensor, " tokens"]
    scores: Scores | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)


def _usable(batch: TrainBatch) -> Bool[Tensor, " tokens"]:
    """Action tokens of the rollouts that were scored."""
    rollout = batch.rollout
    usable = rollout.valid & ~rollout.dropped
    return rollout.action_mask & usable[rollout.rollout][rollout.sample_of_token()]


def _elsewhere(
    values: Sequence[np.ndarray | None], trajectories: Sequence[Trajectory], members: Sequence[int]
) -> Float32[Tensor, " tokens"]:
    """Log-probs that another server gave, joined."""
    parts = []
    for index in members:
        found = values[index]
        if found is None or len(found) != len(trajectories[index]):
            raise ValueError(f"trajectory {index}: a teacher elsewhere gave no log-prob for each of its tokens")
        parts.append(torch.from_numpy(np.asarray(found, dtype=np.float32)))
    return torch.cat(parts) if parts else torch.zeros(0)


def _mixed(
    parts: Mapping[str, _Part],
    groups: Mapping[str, Sequence[int]],
    batch: TrainBatch,
    teaching: Teaching,
    vocabulary: int | None,
    metrics: Mapping[str, Metric],
) -> Scored:
    """The teachers' parts put together, each in the places of its own tokens."""
    starts, tokens = batch.rollout.cu_seqlens, len(batch.token_ids)
    mask, ours = _usable(batch), batch.rollout.rollout_logprobs
    logprobs, weights, places, all_metrics = [], [], [], dict(metrics)
    for teacher, part in sorted(parts.items()):
        members = groups[teacher]
        lengths = [int(starts[index + 1] - starts[index]) for index in members]
        where = torch.cat([torch.arange(int(starts[i]), int(starts[i + 1])) for i in members])
        logprobs.append(torch.zeros(tokens).index_copy(0, where, part.logprobs))
        shares = torch.tensor([teaching.shares[index][teacher] for index in members], dtype=torch.float32)
        weights.append(torch.zeros(tokens).index_copy(0, where, shares.repeat_interleave(torch.tensor(lengths))))
        places.append(torch.full((tokens,), NOWHERE).index_copy(0, where, torch.arange(len(where))))
        gap = (ours[where] - part.logprobs)[mask[where]]
        found: dict[str, Metric] = {
            "kl": Mean(float(gap.sum()), float(len(gap))),
            "prompts": Sum(float(len(members))),
            **part.metrics,
        }
        all_metrics |= {f"teacher/{teacher}/{name}": metric for name, metric in found.items()}
    views = None
    if vocabulary is not None:
        scores = [part.scores for _, part in sorted(parts.items()) if part.scores is not None]
        views = TeacherViews(scores, places, weights, vocabulary)
    return Scored(mix_teachers(torch.stack(logprobs), torch.stack(weights)), views, all_metrics)
