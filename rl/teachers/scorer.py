"""The teachers' side of a trainer rank: their weights in tiers, and what they say of a batch.

    group the batch by teacher ─► one order for all ranks, nearest tier first ─► for each: lease ─► bind ─► forward
                                                                  the next one loads meanwhile ─┘

After the last one the tiers load what the batch after this needs first, while the student trains and the engines
generate.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from algorithms.metrics import Mean, Metric, Sum
from rl.batch import TrainBatch, build_batch
from rl.teachers.fidelity import LogprobError, is_reference, reference, sample
from rl.teachers.importing import Part, import_teachers
from rl.teachers.mixing import Said, Scored, elsewhere, mixed, usable
from rl.teachers.modules import TeacherModel
from rl.teachers.passes import Scores, View, score
from rl.teachers.sources import TeacherSource, architecture, with_bases
from rl.teachers.teaching import TeacherSetup, Teaching
from rl.trainer import platform
from rl.trainer.collective import on_every_rank, on_rank_zero
from rl.trainer.config import TrainerConfig
from rl.trainer.model import read_hf_config
from rollout.trajectory import Trajectory
from teachers.errors import ImportFailedError, TeacherError, TierFullError
from teachers.scoring import scoring_order
from teachers.store import TeacherStore
from teachers.tiers import TierManager
from teachers.upkeep import gc

log = logging.getLogger(__name__)

T = TypeVar("T")
LOADS = ("read", "copy")
"""Kinds of the tiers' spans: disk to pinned memory, and from there to the device."""
STREAMED_PASSES = 4
"""Times the micro-batch of training that a streaming teacher gets: each pass loads all of its layers."""
PlanPasses = Callable[[TrainBatch, int], list[list[int]]]
"""``(batch, tokens of a micro-batch) → this data-parallel rank's micro-batches`` of the samples that count."""


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
        self._sources = {source.name: source for source in setup.sources}
        self._config = config
        self._models: dict[str, TeacherModel] = {}
        self._built: dict[str, TeacherModel] = {}
        """By architecture."""
        self._store = TeacherStore(setup.store)
        self._part = Part.of(config)
        self._errors: dict[str, LogprobError] = {}
        """Of teachers in fp8, where it has been measured."""
        self._references: dict[str, TeacherSource] = {}
        """By teacher, until it is: its exact weights, which are in the store meanwhile."""
        self._tiers: TierManager | None = None
        self._streaming: frozenset[str] = frozenset()
        """Teachers that are larger than the tier of some rank."""
        self.imported = self._import(with_bases(setup.sources), setup)
        self._find_references()
        try:
            self._import(list(self._references.values()), setup)
        except ImportFailedError as error:  # the run can do without
            log.warning("what fp8 does to log-probs is not measured: %s", error)
            self._forget_references()
        if setup.sources:
            # One that a single rank has to stream has the same passes on all, layer by layer.
            try:
                self._streaming = frozenset().union(*on_every_rank(lambda: self._open(setup)))
            except BaseException:  # this rank's tiers may be open, another's are not
                self.close()
                raise
        for name in sorted(self._streaming):
            self._models[name] = self._model(self._source(name), streams=True)

    def _import(self, sources: Sequence[TeacherSource], setup: TeacherSetup) -> list[str]:
        for source in sources:
            self._models[source.name] = self._model(source, source.least_bytes(self._config) > setup.hbm_bytes)
        return import_teachers(self._store, sources, self._models, self._part)

    def _model(self, source: TeacherSource, streams: bool) -> TeacherModel:
        """One for all teachers of an architecture; one that can stream serves those that don't, too."""
        hf = read_hf_config(source.model)
        key = repr(architecture(hf))
        if key not in self._built or (streams and not self._built[key].streams):
            self._built[key] = TeacherModel(hf, self._config, streams)
        return self._built[key]

    def _find_references(self) -> None:
        """Which fp8 teachers have to be measured: where a rank's part has no note, all ranks do it again."""
        for name, source in sorted(self._sources.items()):
            if source.codec != "fp8":
                continue
            notes = on_every_rank(partial(self._noted, name))
            if notes[0] is None or any(note != notes[0] for note in notes):
                self._references[name] = reference(source)
            else:
                self._errors[name] = notes[0]

    def _noted(self, name: str) -> LogprobError | None:
        return LogprobError.noted(self._store.open(name, self._part.shard).meta)

    def _open(self, setup: TeacherSetup) -> frozenset[str]:
        """Returns the teachers that are larger than this rank's tier."""
        names = [*self._sources, *(source.name for source in self._references.values())]
        shard, device = self._part.shard, platform.device()
        try:
            tiers = TierManager(self._store, shard, device, setup.hbm_bytes, setup.pinned_bytes, names)
        except ValueError as error:
            budgets = f"distillation.hbm_bytes={setup.hbm_bytes}, distillation.pinned_bytes={setup.pinned_bytes}"
            raise TierFullError(f"{budgets}: {error}") from error
        self._tiers = tiers
        streaming = frozenset(name for name in names if tiers.streams(name))
        for name in sorted(streaming):
            _check_streams(tiers, name, setup.hbm_bytes)
        return streaming

    def _source(self, name: str) -> TeacherSource:
        return {**self._sources, **{source.name: source for source in self._references.values()}}[name]

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.close()
        self._forget_references()  # of teachers that had no batch

    def offload(self) -> int:
        """Give the device's memory away; returns the bytes that it gained."""
        return 0 if self._tiers is None else self._tiers.offload()

    def onload(self) -> None:
        if self._tiers is not None:
            self._tiers.onload()

    def describe(self) -> str:
        """For the console."""
        references = {source.name for source in self._references.values()}
        sizes = {name: model.nbytes / 2**20 for name, model in self._models.items() if name not in references}
        listed = ", ".join(f"{name} {size:.1f} MiB" for name, size in sorted(sizes.items()))
        measured = [f"; log-prob error of {name} in fp8: {error}" for name, error in sorted(self._errors.items())]
        told = f"teachers (of one rank): {listed}; imported {len(self.imported)} of {len(sizes)}{''.join(measured)}"
        return told if sizes else ""

    def prefetch(self, counts: Mapping[str, int]) -> None:
        """The next batch's prompts by teacher, as far as they are known: load what comes first."""
        self._look_ahead([], counts)

    def _look_ahead(self, now: Sequence[str], ahead: Mapping[str, int]) -> None:
        if self._tiers is None:
            return
        counts = {name: count for name, count in ahead.items() if name in self._sources}
        then = scoring_order(counts, self._tiers.in_hbm, self._tiers.in_pinned)
        self._tiers.plan([*now, *then])

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
            teacher: Said(elsewhere(values, trajectories, groups[teacher]))
            for teacher, values in teaching.scored.items()
            if teacher in groups
        }
        held = {teacher: len(members) for teacher, members in groups.items() if teacher in self._sources}
        # One order for all ranks, since their collectives meet; rank 0's tiers decide.
        order = on_rank_zero(lambda: self._order(held))
        self._look_ahead(order, teaching.ahead)
        for teacher in order:
            own = [trajectories[index].replace(routed_experts=None) for index in groups[teacher]]
            parts[teacher] = self._score_one(teacher, own, batch.rollout.current_version, view, plan)
        self._look_ahead([], teaching.ahead)
        return mixed(parts, groups, batch, teaching, self.vocabulary if view else None, self._tier_metrics())

    def _order(self, held: Mapping[str, int]) -> list[str]:
        return [] if self._tiers is None else scoring_order(held, self._tiers.in_hbm, self._tiers.in_pinned)

    def _score_one(
        self, teacher: str, own: Sequence[Trajectory], version: int, view: View | None, plan: PlanPasses
    ) -> Said:
        batch = build_batch(own, version)
        probe = build_batch(sample(own), version) if teacher in self._references else None
        found = self._found(teacher)
        started = time.perf_counter()
        with self._weights(teacher) as model:
            leased = time.perf_counter()
            scores = self._passes(teacher, model, batch, view, plan)
            done = time.perf_counter()
            probed = None if probe is None else self._passes(teacher, model, probe, None, plan)
        if probe is not None and probed is not None:
            self._measure(teacher, probe, probed, plan)
        mask = usable(batch)
        metrics: dict[str, Metric] = {
            "exposed_s": Sum(leased - started),
            "score_s": Sum(done - leased),
            "entropy": Mean(float(scores.entropy[mask].sum()), float(mask.sum())),
            **found,
        }
        if teacher in self._errors:
            metrics |= self._errors[teacher].metrics()
        return Said(scores.logprobs, scores, metrics)

    def _found(self, teacher: str) -> dict[str, Metric]:
        """Where its weights are when their turn comes."""
        assert self._tiers is not None
        in_hbm = teacher in self._tiers.in_hbm
        in_pinned = not in_hbm and teacher in self._tiers.in_pinned
        return {"hbm_hits": Sum(float(in_hbm)), "pinned_hits": Sum(float(in_pinned))}

    @contextmanager
    def _weights(self, name: str) -> Iterator[TeacherModel]:
        """The model with a teacher's weights. A collective of all ranks: what one of them can't load fails on each,
        before the passes, or after those in which one that streams had to go on for the others' sake."""
        assert self._tiers is not None
        model = self._models[name]
        with ExitStack() as stack:
            if name not in self._streaming:
                stack.enter_context(model.bound(_leased_by_all(stack, self._tiers.lease(name))))
                yield model
                return
            failures: list[Exception] = []
            layers = _leased_by_all(stack, self._tiers.layers(name, failures.append))
            with model.streamed(layers):
                yield model
            on_every_rank(partial(_raise_first, failures))

    def _passes(self, name: str, model: TeacherModel, batch: TrainBatch, view: View | None, plan: PlanPasses) -> Scores:
        tokens = model.config.max_tokens_per_micro_batch * (STREAMED_PASSES if name in self._streaming else 1)
        return score(model.stages, batch, plan(batch, tokens), model.config, view)

    def _measure(self, teacher: str, probe: TrainBatch, found: Scores, plan: PlanPasses) -> None:
        """What fp8 does to a teacher's log-probs; its exact weights go then."""
        mask, source = usable(probe), self._references[teacher]
        if not mask.any():
            return  # another batch will tell
        del self._references[teacher]
        try:
            with self._weights(source.name) as model:
                exact = self._passes(source.name, model, probe, None, plan)
        except TeacherError as failure:  # a run that shares the store may have measured and removed it
            log.warning("what fp8 does to the log-probs of teacher %s was not measured: %s", teacher, failure)
            self._forget(source)
            return
        self._errors[teacher] = error = LogprobError.between(found.logprobs[mask], exact.logprobs[mask])

        def note() -> None:
            if self._part.mine:
                self._store.annotate(teacher, self._part.shard, error.note())
                self._forget(source)

        on_every_rank(note)
        if self._part.first:
            _free(self._store)

    def _forget(self, source: TeacherSource) -> None:
        if self._part.mine:
            self._store.forget(source.name, self._part.shard)

    def _forget_references(self) -> None:
        for source in self._references.values():
            self._forget(source)
        self._references.clear()

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
            of_the_run = not is_reference(span.teacher)
            if of_the_run and span.kind in LOADS and span.stop > self._looked_at:
                loads[span.teacher] += span.stop - span.start
        metrics |= {f"teacher/{teacher}/load_s": Sum(seconds) for teacher, seconds in loads.items()}
        self._counters, self._looked_at = counters, time.perf_counter()
        return metrics


def _leased_by_all(stack: ExitStack, lease: AbstractContextManager[T]) -> T:
    """This rank's lease, once all ranks have theirs."""
    held: list[T] = []
    on_every_rank(lambda: held.append(stack.enter_context(lease)))
    return held[0]


def _raise_first(failures: Sequence[Exception]) -> None:
    for failure in failures:
        raise failure


def _check_streams(tiers: TierManager, name: str, hbm_bytes: int) -> None:
    needed, held = tiers.stream_bytes(name)
    if needed > held:
        raise TierFullError(
            f"teacher {name} streams through two buffers of its largest layer, {needed} bytes, and of "
            f"distillation.hbm_bytes={hbm_bytes} there are {held} for it: raise it"
        )


def _free(store: TeacherStore) -> None:
    try:
        gc(store, wait=False)
    except TeacherError as error:
        log.warning("exact copies of teachers stay on the disk until `atelier teachers gc`: %s", error)
