import dataclasses
import math

import numpy as np
import pytest
import torch

from algorithms.types import Need, Targets
from rl.trainer.config import OptimizerConfig
from rl.trainer.result import MissingInputError, NonFiniteUpdateError
from rollout.trajectory import StopReason
from tests.trainer.common import Ratio, assert_close, capture_update, make_trajectories, make_trajectory


@pytest.mark.parametrize("budget", [1, 60])
def test_micro_batches_change_nothing(worker, model_dir, budget):
    trajectories = make_trajectories()
    whole, gradient = capture_update(worker, trajectories, Ratio())
    worker.config = worker.config.model_copy(update={"max_tokens_per_micro_batch": budget})
    worker.load_model(model_dir)
    split, parts = capture_update(worker, trajectories, Ratio())
    assert whole.micro_batches == 1
    assert split.micro_batches == (len(trajectories) if budget == 1 else split.metrics["calls"].value())
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert_close(parts, gradient)
    assert split.metrics["prepared"].value() == 1


def test_the_order_of_samples_changes_nothing(worker, model_dir):
    trajectories = make_trajectories()
    _, gradient = capture_update(worker, trajectories, Ratio())
    worker.load_model(model_dir)
    _, reordered = capture_update(worker, trajectories[::-1], Ratio())
    assert_close(reordered, gradient)


def test_failed_and_dropped_samples_have_no_part(worker, model_dir):
    kept = make_trajectories(groups=2)
    extra = [
        make_trajectory(30, 0, 7, reward=5.0),
        make_trajectory(30, 0, 8, reward=float("nan"), stop_reason=StopReason.FAILED),
        make_trajectory(30, 0, 9, action_mask=np.zeros(30, bool)),
    ]
    alone, gradient = capture_update(worker, kept, Ratio())
    worker.load_model(model_dir)
    result, with_extra = capture_update(worker, kept + extra, Ratio(), dropped=[(0, 7)])
    assert (result.samples, result.tokens) == (alone.samples, alone.tokens)
    assert_close(with_extra, gradient)
    with pytest.raises(ValueError, match="none of 3 samples has a trained token"):
        worker.update(extra, 0, Ratio(), dropped=[(0, 7)])


class NotFinite(Ratio):
    def __init__(self, where):
        self.where = where

    def loss(self, inputs):
        output = super().loss(inputs)
        # sqrt at 0: a finite value with an infinite slope
        factor = math.nan if self.where == "loss" else 1 + (inputs.logprobs * 0).sum().abs().sqrt()
        return dataclasses.replace(output, loss=output.loss * factor)


@pytest.mark.parametrize(("where", "message"), [("loss", "loss nan"), ("gradient", "gradient norm")])
def test_a_step_that_is_not_finite_leaves_the_weights(worker, where, message):
    trajectories = make_trajectories(groups=1)
    before = {name: tensor.clone() for name, tensor in worker.export_weights()}
    with pytest.raises(NonFiniteUpdateError, match=f"update 1 of weights version 3: .*{message}"):
        worker.update(trajectories, 3, NotFinite(where))
    assert all(torch.equal(before[name], tensor) for name, tensor in worker.export_weights())
    result = worker.update(trajectories, 3, Ratio())  # and the trainer goes on
    assert result.step == 1
    assert math.isfinite(result.grad_norm)


def test_needs_that_it_cannot_compute_are_named(worker):
    class Critic(Ratio):
        needs = frozenset({Need.VALUES})

    with pytest.raises(MissingInputError, match=r"Critic needs .*values"):
        worker.update(make_trajectories(groups=1), 0, Critic())


def test_the_gap_counts_tokens_of_the_current_weights_only(worker):
    trajectory = make_trajectory(30)
    exact = worker.logprobs([trajectory])[0]
    mine = trajectory.action_mask & (np.arange(30) >= 20)
    trajectory = trajectory.replace(
        weight_versions=np.where(mine, 4, np.where(trajectory.action_mask, 3, -1)).astype(np.int32),
        rollout_logprobs=np.where(mine, exact - 0.25, np.where(trajectory.action_mask, -9, 0)).astype(np.float32),
    )
    result = worker.update([trajectory], 4, Ratio())
    assert result.logprob_gap_max == pytest.approx(0.25, abs=1e-5)
    assert result.logprob_gap_mean == pytest.approx(0.25, abs=1e-5)
    assert worker.update([trajectory], 5, Ratio()).logprob_gap_max is None


def test_training_raises_the_rewarded_log_probs(worker):
    worker.set_optimizer(OptimizerConfig(lr=1e-2, warmup_steps=2, decay="linear"), 10)
    good, bad = make_trajectory(20, 0, 0, reward=1.0), make_trajectory(20, 0, 1, reward=-1.0)
    before = worker.logprobs([good, bad])
    results = [worker.update([good, bad], 0, Ratio()) for _ in range(5)]
    after = worker.logprobs([good, bad])
    assert after[0].sum() > before[0].sum() + 1
    assert after[1].sum() < before[1].sum() - 1
    assert [r.step for r in results] == [1, 2, 3, 4, 5]
    assert [r.lr for r in results] == pytest.approx([0.005, 0.01, 0.01, 0.00875, 0.0075])
    assert results[0].loss == pytest.approx(0.0, abs=1e-6)  # the ratio is 1, the rewards cancel


def test_moments_can_be_forgotten(worker):
    trajectories = make_trajectories(groups=1)
    worker.update(trajectories, 0, Ratio())
    state = worker.loaded.optimizer.inner.chained_optimizers[0].optimizer.state
    assert any(s["exp_avg"].abs().max() > 0 for s in state.values())
    worker.reset_moments()
    assert all(s["exp_avg"].abs().max() == s["exp_avg_sq"].abs().max() == s["step"] == 0 for s in state.values())
    assert math.isfinite(worker.update(trajectories, 0, Ratio()).loss)


def test_weights_constant_in_the_batch_reach_the_loss(worker):
    """A weighted negative log-likelihood is an algorithm like any other."""

    class Likelihood(Ratio):
        needs = frozenset()

        def prepare(self, batch):
            weights = batch.action_mask.float() / batch.action_mask.sum()
            return Targets(torch.zeros_like(weights), weights)

        def loss(self, inputs):
            return dataclasses.replace(
                super().loss(dataclasses.replace(inputs, old_logprobs=inputs.logprobs)),
                loss=-(inputs.weights * inputs.logprobs).sum(),
            )

    trajectory = make_trajectory(30)
    expected = -worker.logprobs([trajectory])[0][trajectory.action_mask].mean()
    assert worker.update([trajectory], 0, Likelihood()).loss == pytest.approx(float(expected), rel=1e-5)
