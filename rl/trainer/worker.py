"""One rank of the trainer: a plain class, used in process by tests and inside a Ray actor by ``TrainerGroup``.

All ranks get the same calls with the same arguments. An update is

    build the batch ─► log-probs that the algorithm needs ─► prepare (whole batch) ─► passes over micro-batches
    ─► sum of the gradients over the data-parallel ranks ─► checks ─► optimizer step
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from transformers import PretrainedConfig

from algorithms.host import sample_counts
from algorithms.metrics import merge_metrics
from algorithms.types import Algorithm, Need, Targets
from rl.batch import LossConstants, RolloutKey, SampleTokens, TrainBatch, build_batch, plan_micro_batches
from rl.stopwatch import Stopwatch
from rl.teachers.teaching import TeacherSetup, Teaching
from rl.trainer import platform
from rl.trainer.config import OptimizerConfig, TrainerConfig
from rl.trainer.learning_rate import learning_rate
from rl.trainer.result import (
    COMPUTED_NEEDS,
    RECORDED_NEEDS,
    MissingInputError,
    NonFiniteUpdateError,
    UpdateResult,
)
from rl.weights.rank import RankSender
from rl.weights.serialize import Bucket, make_buckets
from rollout.trajectory import Trajectory

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from rl.teachers.mixing import Scored
from rl.teachers.passes import View, run_distribution_passes
from rl.teachers.scorer import TeacherScorer
from rl.trainer import convert
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.collective import gather_objects, on_every_rank, on_rank_zero
from rl.trainer.cost import balance_length
from rl.trainer.distributions import PolicyLogits
from rl.trainer.forward import batch_logprobs, batch_topk, run_passes
from rl.trainer.indexer_update import update_indexer
from rl.trainer.memory_plan import check_fits, describe, plan_memory
from rl.trainer.model import PolicyModel, build_chunks, read_hf_config
from rl.trainer.offload import Offload
from rl.trainer.optimizer import Optimizer
from rl.trainer.transfer import sent
from rl.trainer.update_figures import Unread

TEACHER_NEEDS = frozenset({Need.TEACHER_LOGPROBS, Need.TEACHER_VIEWS, Need.LOGITS})


@dataclasses.dataclass
class _Loaded:
    """What exists once a model is loaded."""

    source: Path
    hf: PretrainedConfig
    modules: list[DistributedDataParallel]
    """This rank's stages of the model."""
    optimizer: Optimizer
    schedule: OptimizerConfig
    balance_length: float
    """See ``rl.batch.sample_cost``."""
    total_steps: int | None = None
    steps: int = 0
    """Updates since the optimizer was made."""

    @property
    def module(self) -> DistributedDataParallel:
        """The only stage, or the last of several."""
        return self.modules[-1]

    @property
    def model(self) -> PolicyModel:
        return self.module.module

    @property
    def models(self) -> list[PolicyModel]:
        return [module.module for module in self.modules]


class TrainerWorker:
    """Joins the process group when it is made; ``load_model`` comes next. ``close`` leaves the group."""

    def __init__(
        self, config: TrainerConfig, rank: int, world_size: int, master_address: str, master_port: int
    ) -> None:
        if world_size != config.world_size:
            raise ValueError(f"world_size {world_size} differs from the config's {config.world_size}")
        self.config = config
        self._loaded: _Loaded | None = None
        torch.set_num_threads(config.threads_per_rank)
        platform.init_distributed(
            config.parallel, rank, world_size, master_address, master_port, config.timeout_s, config.seed
        )
        self._checkpoints = Checkpoints(config.timeout_s)
        self._offload = Offload()
        self._teachers: TeacherScorer | None = None

    def close(self) -> None:
        try:
            if self._teachers is not None:
                self._teachers.close()
            self._checkpoints.close()
        finally:
            self._offload.close()
            platform.shutdown_distributed()

    def load_model(self, hf_dir: Path) -> str:
        """Build the model that ``hf_dir`` describes, load its weights, and make a fresh optimizer; returns the memory
        plan as a table.

        Raises:
            UnsupportedModelError: names what is not supported.
            MemoryPlanError: the model cannot fit the device, on any rank.
            WeightMismatchError: names the tensors.
        """
        self._offload.onload()  # what is away belongs to the model that goes
        hf = read_hf_config(hf_dir)
        table = self._check_memory(hf)
        if self._loaded is not None:
            self._loaded = None
            gc.collect()  # Megatron's modules and buffers hold each other; the next model may need their memory
        modules = []
        for model in build_chunks(hf, self.config):
            convert.load_hf(model, hf, hf_dir)
            options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            modules.append(DistributedDataParallel(model.config, options, model))
            model.config.finalize_model_grads_func = _finalize_gradients
        schedule = self.config.optimizer
        optimizer = Optimizer(modules, schedule, self.config.dtype, self.config.optimizer_kernel == "triton")
        self._loaded = _Loaded(hf_dir, hf, modules, optimizer, schedule, balance_length(hf))
        return table

    def _check_memory(self, hf: PretrainedConfig) -> str:
        """The memory plan; what cannot fit on any rank is refused."""
        plan = plan_memory(hf, self.config)
        # On the CPU the ranks of a host share its memory; a GPU is one rank's.
        host = "gpu" if torch.cuda.is_available() else socket.gethostname()
        hosts = gather_objects(host)
        ranks = 1 if torch.cuda.is_available() else hosts.count(host)
        part = plan[parallel_state.get_pipeline_model_parallel_rank()]
        on_every_rank(lambda: check_fits(part, platform.device_bytes(), ranks, f"{platform.device()} memory"))
        return describe(plan)

    def load_teachers(self, setup: TeacherSetup) -> str:
        """Import the teachers that the store lacks, and open the tiers; returns a line that says so. A collective of
        all ranks."""
        if self._teachers is not None:
            self._teachers.close()
            self._teachers = None
        self._teachers = TeacherScorer(setup, self.config, self.loaded.hf.vocab_size)
        return self._teachers.describe()

    def prefetch_teachers(self, counts: Mapping[str, int]) -> None:
        """See ``TeacherScorer.prefetch``. No collective."""
        if self._teachers is not None:
            self._teachers.prefetch(counts)

    def set_optimizer(self, options: OptimizerConfig, total_steps: int) -> None:
        """Begin a phase of ``total_steps`` updates: fresh moments, and the learning rate from its start."""
        if total_steps < 1:
            raise ValueError(f"total_steps {total_steps} must be at least 1")
        loaded = self.loaded
        loaded.optimizer = Optimizer(
            loaded.modules, options, self.config.dtype, self.config.optimizer_kernel == "triton"
        )
        loaded.schedule, loaded.total_steps, loaded.steps = options, total_steps, 0

    @property
    def loaded(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError("no model is loaded; call load_model first")
        if self._offload.away:
            raise RuntimeError("the model is in host memory; call onload first")
        return self._loaded

    def update(
        self,
        trajectories: Sequence[Trajectory],
        current_version: int,
        algorithm: Algorithm,
        dropped: Collection[RolloutKey] = (),
        teaching: Teaching | None = None,
    ) -> UpdateResult:
        """One optimizer step on one global batch. A collective of all ranks.

        Args:
            current_version: version of the weights before this step.
            dropped: rollouts, as ``(group_id, sample_id)``, that are only kept for their group's baseline.
            teaching: the teachers of each trajectory, for an algorithm that needs them.

        Raises:
            MissingInputError: the algorithm needs something that this trainer does not compute.
            NonFiniteUpdateError: the loss or the gradient is NaN or infinite; the weights are as before.
            ValueError: the batch is malformed, or has no token to train on.
        """
        loaded, watch = self.loaded, Stopwatch()
        name = f"update {loaded.steps + 1} of weights version {current_version}"
        lr = learning_rate(loaded.schedule, loaded.steps, loaded.total_steps)
        loaded.optimizer.zero_grad()  # first: a GPU does it while the host builds the batch
        with watch.phase("batch"):
            batch = build_batch(trajectories, current_version, dropped)
        with watch.phase("logprobs"):
            batch = self._with_needs(batch, algorithm)
        scored = None
        if algorithm.needs & TEACHER_NEEDS:
            with watch.phase("teachers"):
                scored = self._score(trajectories, batch, algorithm, teaching)
                batch = _replace_rollout(batch, teacher_logprobs=scored.logprobs)
        with watch.phase("prepare"):
            targets = algorithm.prepare(batch.rollout)
            trained = _samples_with(targets.weights != 0, batch)
            if not trained:
                raise ValueError(f"{name}: none of {batch.rollout.samples} samples has a trained token")
            micro_batches, tokens = self.plan(batch, trained)
        with watch.phase("passes"):
            unread = self._passes(batch, targets, micro_batches, algorithm, scored)
        digest = _gradient_digest(loaded.optimizer) if self.config.digest_gradients else None
        # A GPU is still at work on the passes when it is given the optimizer's step: the host reads nothing before. The
        # step checks itself that all is finite.
        with watch.phase("optimizer"):
            norm = loaded.optimizer.start(lr, unread.loss())
        with watch.phase("report"):
            figures = unread.read()
            facts = f"{name}: loss {figures.loss}, lr {lr}, {len(trained)} samples, {tokens} tokens"
            loss, grad_norm = self._checked(figures.loss, norm, facts)
        loaded.steps += 1
        return UpdateResult(
            step=loaded.steps,
            loss=loss,
            logprob_gap_max=figures.gap_max,
            logprob_gap_mean=figures.gap_mean,
            gradient_digest=digest,
            metrics=merge_metrics([targets.metrics, figures.metrics, scored.metrics if scored else {}]),
            grad_norm=grad_norm,
            lr=lr,
            samples=len(trained),
            tokens=tokens,
            trained_tokens=int((targets.weights != 0).sum()),
            micro_batches=len(micro_batches),
            seconds=watch.read(),
        )

    def _checked(self, loss: float | None, norm: Tensor, facts: str) -> tuple[float, float]:
        """Loss and gradient norm of a step that was taken.

        Raises:
            NonFiniteUpdateError: one of them is not finite, so that the step changed nothing.
        """
        if loss is None or not math.isfinite(loss):
            raise NonFiniteUpdateError(facts)
        try:
            return loss, self.loaded.optimizer.check(norm)
        except NonFiniteUpdateError as error:
            raise NonFiniteUpdateError(f"{facts}, {error}") from error

    def plan(self, batch: TrainBatch, samples: Sequence[int], budget: int | None = None) -> tuple[list[list[int]], int]:
        """This data-parallel rank's micro-batches of these samples, and the tokens of all of them.

        Args:
            budget: tokens of a micro-batch, if not the config's.
        """
        lengths = np.diff(batch.rollout.cu_seqlens.numpy())[list(samples)].tolist()
        config = self.config
        multiple = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
        plan = plan_micro_batches(
            lengths,
            budget or config.max_tokens_per_micro_batch,
            config.data_parallel,
            self.loaded.balance_length,
            multiple,
        )
        mine = plan[parallel_state.get_data_parallel_rank()]
        return [[samples[index] for index in members] for members in mine], sum(lengths)

    def _with_needs(self, batch: TrainBatch, algorithm: Algorithm) -> TrainBatch:
        missing = sorted(algorithm.needs - COMPUTED_NEEDS - RECORDED_NEEDS)
        if missing:
            raise MissingInputError(
                f"{type(algorithm).__name__} needs {missing}; this trainer computes {sorted(COMPUTED_NEEDS)}"
            )
        if Need.OLD_LOGPROBS not in algorithm.needs:
            return batch
        logprobs, _ = batch_logprobs(self.loaded.modules, batch, self._plan_usable(batch), self.config)
        return _replace_rollout(batch, old_logprobs=logprobs)

    def _plan_usable(self, batch: TrainBatch, tokens: int | None = None) -> list[list[int]]:
        """This data-parallel rank's micro-batches of the samples that may be trained on."""
        rollout = batch.rollout
        usable = (rollout.valid & ~rollout.dropped)[rollout.rollout].tolist()
        samples = [sample for sample in _samples_with(rollout.action_mask, batch) if usable[sample]]
        return self.plan(batch, samples, tokens)[0]

    def _score(
        self, trajectories: Sequence[Trajectory], batch: TrainBatch, algorithm: Algorithm, teaching: Teaching | None
    ) -> Scored:
        if self._teachers is None or teaching is None:
            raise MissingInputError(
                f"{type(algorithm).__name__} needs teachers: call load_teachers, and give update each batch's teaching"
            )
        view = View(algorithm.teacher_top_k) if Need.TEACHER_VIEWS in algorithm.needs else None
        return self._teachers.score(trajectories, batch, teaching, view, self._plan_usable)

    def _passes(
        self,
        batch: TrainBatch,
        targets: Targets,
        micro_batches: list[list[int]],
        algorithm: Algorithm,
        scored: Scored | None,
    ) -> Unread:
        """Add the summed gradient to what is in the model."""
        unread = Unread()
        whole = LossConstants.of(batch.rollout, targets)
        # Sent when the first loss is computed: by then a GPU is at work on the forward pass.
        constants = functools.cache(lambda: sent(whole, platform.device()))
        views = scored.views if scored else None

        def loss(taken: SampleTokens, logprobs: Tensor, entropy: Tensor, logits: PolicyLogits | None = None) -> Tensor:
            inputs, own = constants().inputs(taken, logprobs, entropy)
            if views is not None:
                inputs = dataclasses.replace(inputs, logits=logits, teacher_views=views.of(taken))
            output = algorithm.loss(inputs)
            unread.note(output, inputs, own)
            return output.loss

        passes = run_passes if views is None else run_distribution_passes
        passes(self.loaded.modules, batch, micro_batches, self.config, loss, backward=True)
        return unread

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Log-probs of each trajectory's tokens (float32, natural, at its temperature) under the current weights; a
        sample's first token has 0. A collective of all ranks."""
        batch = build_batch(trajectories, _newest_version(trajectories))
        batch = dataclasses.replace(batch, scored=torch.ones_like(batch.scored))
        micro_batches, _ = self.plan(batch, range(batch.rollout.samples))
        values, _ = batch_logprobs(self.loaded.modules, batch, micro_batches, self.config)
        return np.split(values.numpy(), batch.rollout.cu_seqlens[1:-1].tolist())

    def topk_logprobs(self, trajectories: Sequence[Trajectory], k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each trajectory, at the place of each token, the ``k`` most likely tokens under the current weights:
        log-probs (float32 ``[tokens, k]``, natural, at its temperature, descending) and ids (int32); a sample's first
        token has zeros. A collective of all ranks."""
        batch = build_batch(trajectories, _newest_version(trajectories))
        batch = dataclasses.replace(batch, scored=torch.ones_like(batch.scored))
        micro_batches, _ = self.plan(batch, range(batch.rollout.samples))
        both = batch_topk(self.loaded.modules, batch, micro_batches, self.config, k)
        edges = batch.rollout.cu_seqlens[1:-1].tolist()
        logprobs, ids = (np.split(x.numpy(), edges) for x in both)
        return list(zip(logprobs, ids, strict=True))

    def update_indexer(self, trajectories: Sequence[Trajectory], current_version: int) -> UpdateResult:
        """See ``indexer_update.update_indexer``."""
        return update_indexer(self, trajectories, current_version)

    def reset_moments(self) -> None:
        """Forget Adam's moments."""
        self.loaded.optimizer.reset_moments()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and tensors, on this rank's device; see ``convert.export_weights``."""
        return convert.export_weights(self.loaded.models, self.loaded.hf)

    @functools.cached_property
    def sending(self) -> RankSender:
        """The weights in buckets, for engines that open this rank's memory or joined rank 0's group."""
        return RankSender(lambda: self._with_untrained(self.export_weights()), platform.device())

    def weight_buckets(self, bucket_bytes: int) -> list[Bucket]:
        """The weights as engines load them; on rank 0, and an empty list on the others. A collective of all ranks."""
        weights = self.export_weights()
        if dist.get_rank() == 0:
            return list(make_buckets(self._with_untrained(weights), bucket_bytes))
        _exhaust(weights)
        return []

    def _with_untrained(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Exported weights, and the tensors of the source that the trainer does not have."""
        return chain(weights, convert.untrained_weights(self.loaded.hf, self.loaded.source))

    def save_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory (weights, config, tokenizer). A collective of all ranks.

        Raises:
            FileExistsError: ``directory`` exists.
        """
        exists = on_rank_zero(directory.exists)
        if exists:
            raise FileExistsError(f"{directory} exists; it is not overwritten")
        weights = self.export_weights()
        if dist.get_rank() == 0:
            convert.save_hf(self._with_untrained(weights), self.loaded.source, directory, self.config.dtype)
        else:
            _exhaust(weights)
        dist.barrier()

    def offload(self) -> int:
        """Move weights and optimizer to host memory, and drop the gradients and the teachers' images, so that an engine
        can have the device; returns the bytes that this rank's device gained. Until ``onload`` only the teachers' tiers
        go on, between disk and host memory. Idempotent."""
        loaded = self._loaded
        if loaded is None:
            raise RuntimeError("no model is loaded; call load_model first")
        return self._offload.offload(loaded.modules, loaded.optimizer, self._teachers)

    def onload(self) -> None:
        """Bring back what ``offload`` moved. Idempotent."""
        self._offload.onload()

    def save_checkpoint(self, directory: Path, extra: Mapping[str, Any], background: bool = False) -> None:
        """See ``Checkpoints.save``. A collective of all ranks."""
        loaded = self.loaded
        self._checkpoints.save(directory, loaded.models, loaded.optimizer, loaded.steps, extra, self.config, background)

    def wait_for_checkpoint(self) -> None:
        """Until the checkpoint that is being saved in the background is on the disk; raises what it failed with."""
        self._checkpoints.wait()

    def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        """Restore a checkpoint into the loaded model; returns the caller's extra state. A collective of all ranks."""
        loaded = self.loaded
        restored = self._checkpoints.load(directory, loaded.models, loaded.optimizer, self.config)
        loaded.steps = restored.step
        return restored.extra


def _newest_version(trajectories: Sequence[Trajectory]) -> int:
    """Of the weights that sampled a token; 0 where none was sampled."""
    return max([0, *(int(t.weight_versions.max()) for t in trajectories if len(t))])


def _finalize_gradients(model: list[Any], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Reduce the gradients over the ranks; without a number of tokens Megatron leaves them undivided."""
    if dist.get_world_size() > 1:  # a rank alone has them where they belong, undivided
        finalize_model_grads(model, None, **kwargs)


def _gradient_digest(optimizer: Optimizer) -> int:
    """Equal only for bit-equal gradients on every rank. Small enough to be exact as a JSON number."""
    mine = xxhash.xxh3_64()
    for shard in optimizer.shards:
        # Only this range has been reduced; the rest of the gradient is another rank's to hash.
        part = shard.parameter.main_grad.detach().view(-1)[shard.begin : shard.end]
        mine.update(part.cpu().contiguous().view(torch.uint8).numpy())
    everyone = xxhash.xxh3_64(repr(gather_objects(mine.hexdigest())).encode())
    return everyone.intdigest() & (2**53 - 1)


def _replace_rollout(batch: TrainBatch, **changes: Tensor) -> TrainBatch:
    return dataclasses.replace(batch, rollout=dataclasses.replace(batch.rollout, **changes))


def _samples_with(tokens: Tensor, batch: TrainBatch) -> list[int]:
    """Samples that have at least one of the marked tokens, ascending."""
    return np.flatnonzero(sample_counts(tokens.numpy(), batch.rollout.cu_seqlens.numpy())).tolist()


def _exhaust(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Take part in an export whose tensors this rank does not need."""
    for _ in weights:
        pass
