"""Train a small model for some seconds, so that it behaves like one that was trained; its indexers last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from algorithms import registry
from benchmarks.logprob_gap.language import Language
from benchmarks.logprob_gap.models import USUAL, Name, change_config, make_config, write_model
from benchmarks.logprob_gap.records import record
from benchmarks.trainer.sides import make_worker
from rl.trainer.config import OptimizerConfig
from rl.trainer.worker import TrainerWorker
from rollout.trajectory import Trajectory

HELD_OUT = 4
"""Sequences, of a seed that no batch has."""
CONSTANT = 10**6
"""Steps of a schedule that is ended by the clock."""
MIN_STEPS = 3
DRAWN = 32
"""Batches whose text is made at a time."""


@dataclass(frozen=True)
class Phase:
    """A part of the training of a model."""

    share: float
    """Of the seconds."""
    sequences: int
    length: int
    lr: float


@dataclass(frozen=True)
class Plan:
    """What a child is given; plain data."""

    name: Name
    cuda: bool
    directory: Path
    """It makes ``start``, ``trunk`` and ``final`` in it."""
    seconds: float
    """Of the steps; loading, compiling and writing come on top."""
    length: int
    """Of the longest sequences that will be asked for."""
    words: int

    @property
    def final(self) -> Path:
        return self.directory / "final"

    @property
    def phases(self) -> list[Phase]:
        """Short sequences teach the successors in many steps, long ones the positions."""
        tokens = 8192 if self.cuda else 512
        short = max(2, self.length // 4)
        trunk = [
            Phase(0.55, max(1, tokens // short), short, 1.5e-3),
            Phase(0.45, max(1, tokens // self.length), self.length, 5e-4),
        ]
        if self.name == "dense":
            return trunk
        return [dataclasses.replace(phase, share=0.75 * phase.share) for phase in trunk]

    @property
    def indexer_phase(self) -> Phase:
        return Phase(0.25, 2, self.length, 2e-3)


def train(plan: Plan) -> dict[str, Any]:
    """Write the model to ``plan.final``; returns what it learned, as numbers for the report.

    The trunk is trained with dense attention (a top k that is never reached), then the indexers alone learn to predict
    that attention, as the warm-up of a sparse model does.
    """
    begin = time.monotonic()
    config = make_config(plan.name, plan.cuda, USUAL)
    sparse = getattr(config, "index_topk", None)
    write_model(config, plan.directory / "start", plan.cuda)
    if sparse is not None:
        change_config(plan.directory / "start", index_topk=2 * plan.length)
    worker = make_worker("cuda" if plan.cuda else "cpu", 4 if plan.cuda else 2)
    language = Language(plan.words)
    try:
        worker.load_model(plan.directory / "start")
        found = _train_trunk(worker, plan, language)
        worker.save_hf(plan.final if sparse is None else plan.directory / "trunk")
        if sparse is not None:
            change_config(plan.directory / "trunk", index_topk=sparse)
            found |= _train_indexers(worker, plan, language)
            worker.save_hf(plan.final)
    finally:
        worker.close()
    return found | {"language_entropy": language.entropy, "wall_s": time.monotonic() - begin}


def _train_trunk(worker: TrainerWorker, plan: Plan, language: Language) -> dict[str, Any]:
    objective = registry.build("sft", {})
    held_out = sequences(language, HELD_OUT, plan.length, seed=0)
    before, done = _loss(worker, held_out), 0
    for index, phase in enumerate(plan.phases, 1):
        worker.set_optimizer(OptimizerConfig(lr=phase.lr, warmup_steps=10), CONSTANT)
        batches = _batches(language, phase, index)
        steps = _repeat(lambda b=batches: worker.update(next(b), 0, objective), phase.share * plan.seconds)
        done += phase.sequences * phase.length * steps
    return {"loss_before": before, "loss_after": _loss(worker, held_out), "tokens": done}


def _train_indexers(worker: TrainerWorker, plan: Plan, language: Language) -> dict[str, Any]:
    """Mean over the indexers of the KL to the attention, in nats a token: in the first step and in the last."""
    phase = plan.indexer_phase
    batches = _batches(language, phase, len(plan.phases) + 1)
    # A sequence at a time: its scores of all heads and positions stand in memory for each layer.
    worker.config = worker.config.model_copy(
        update={"trained": "indexer_dense", "max_tokens_per_micro_batch": phase.length}
    )
    worker.load_model(plan.directory / "trunk")
    worker.set_optimizer(OptimizerConfig(lr=phase.lr, warmup_steps=5), CONSTANT)
    losses = []

    def step() -> None:
        result = worker.update_indexer(next(batches), 0)
        losses.append(result.loss / len(result.metrics))

    steps = _repeat(step, phase.share * plan.seconds)
    return {"indexer_kl_before": losses[0], "indexer_kl_after": losses[-1], "indexer_steps": steps}


def _repeat(step: Callable[[], object], seconds: float) -> int:
    """Steps until the time is over, which begins after the first: that one compiles."""
    step()
    done, begin = 1, time.monotonic()
    while done < MIN_STEPS or time.monotonic() - begin < seconds:
        step()
        done += 1
    return done


def _batches(language: Language, phase: Phase, seed: int) -> Iterator[list[Trajectory]]:
    """Endless; some at a time, because a sequence more costs the host little."""
    for drawn in count():
        made = sequences(language, DRAWN * phase.sequences, phase.length, seed=1000 * seed + drawn)
        for begin in range(0, len(made), phase.sequences):
            yield made[begin : begin + phase.sequences]


def sequences(language: Language, number: int, length: int, seed: int) -> list[Trajectory]:
    """All tokens but the first count."""
    counted, logprobs = np.arange(length) > 0, np.zeros(length, np.float32)
    return [
        record(tokens, counted, logprobs, index, reward=1.0)
        for index, tokens in enumerate(language.sample(number, length, seed))
    ]


def _loss(worker: TrainerWorker, held_out: list[Trajectory]) -> float:
    """Nats a token."""
    return float(-np.mean([logprobs[1:].mean() for logprobs in worker.logprobs(held_out)]))
