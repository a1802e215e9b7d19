"""What the trainer's tests share, also those that run in spawned ranks."""

import numpy as np
import torch
import torch.distributed as dist

from algorithms.metrics import Sum
from algorithms.types import Algorithm, LossOutput, Need, Targets
from rollout.trajectory import StopReason, Trajectory


def make_trajectory(length, group=0, sample=0, version=0, reward=1.0, seed=0, temperature=1.0, **changes):
    rng = np.random.default_rng((seed, group, sample, changes.get("segment", 0)))
    mask = np.arange(length) >= length // 3
    values = {
        "token_ids": rng.integers(6, 100, length).astype(np.int32),
        "action_mask": mask,
        "rollout_logprobs": np.where(mask, -4.6, 0).astype(np.float32),
        "weight_versions": np.where(mask, version, -1).astype(np.int32),
        "turn_index": np.zeros(length, np.int32),
        "temperature": temperature,
        "reward": reward,
        "task": "test",
        "epoch": 0,
        "prompt_id": str(group),
        "group_id": group,
        "sample_id": sample,
        "stop_reason": StopReason.STOP,
    }
    return Trajectory(**(values | changes))


def make_trajectories(groups=4, samples=3, seed=0, temperature=1.0):
    """Uneven lengths between 5 and 40, rewards that differ inside a group."""
    rng = np.random.default_rng(seed)
    return [
        make_trajectory(int(rng.integers(5, 40)), g, s, reward=float(rng.normal()), temperature=temperature)
        for g in range(groups)
        for s in range(samples)
    ]


def with_routed_experts(trajectories, layers, experts, top_k):
    """The trajectories with a record of experts drawn at random for each token but the last, which has none."""
    rng = np.random.default_rng(0)
    recorded = []
    for trajectory in trajectories:
        order = np.tile(np.arange(experts, dtype=np.int32), (len(trajectory), layers, 1))
        record = rng.permuted(order, axis=-1)[..., :top_k]
        record[-1] = -1
        recorded.append(trajectory.replace(routed_experts=record))
    return recorded


class Ratio(Algorithm):
    """−Σ w · exp(log π − log π_old) · R: needs the old log-probs; the denominator is the whole batch's tokens."""

    needs = frozenset({Need.OLD_LOGPROBS})

    def prepare(self, batch):
        live = (batch.valid & ~batch.dropped)[batch.rollout][batch.sample_of_token()]
        weights = (batch.action_mask & live).float()
        return Targets(
            advantages=batch.reward[batch.rollout][batch.sample_of_token()].float(),
            weights=weights / weights.sum().clamp(min=1),
            metrics={"prepared": Sum(1.0)},
        )

    def loss(self, inputs):
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        return LossOutput(-(inputs.weights * ratio * inputs.advantages).sum(), {"calls": Sum(1.0)})


def reduced_gradients(optimizer):
    """Whole gradients by parameter, of which each data-parallel rank has reduced its shards alone."""
    gradients = {}
    shards = {shard.parameter: shard for shard in optimizer.shards}
    for part in optimizer.parts:
        for parameter in (p for buffer in part.buffers for p in buffer.params):
            whole = torch.zeros(parameter.numel(), device=parameter.device)
            if (shard := shards.get(parameter)) is not None:
                whole[shard.begin : shard.end] = parameter.main_grad.view(-1)[shard.begin : shard.end]
            dist.all_reduce(whole, group=part.data_parallel_group)
            gradients[parameter] = whole.view_as(parameter)
    return gradients


def capture_update(worker, trajectories, algorithm, version=0, dropped=()):
    """An update; returns its result and the reduced gradient before clipping, by Hugging Face name."""
    optimizer, gradient = worker.loaded.optimizer, {}
    start = optimizer.start

    def capture(lr, loss):
        parameters = [p for model in worker.loaded.models for p in model.parameters()]
        weights = [p.detach().clone() for p in parameters]
        reduced = reduced_gradients(optimizer)
        with torch.no_grad():
            for p in parameters:
                p.copy_(reduced[p] if p.requires_grad else torch.zeros_like(p))
            gradient.update({name: tensor.clone() for name, tensor in worker.export_weights()})
            for p, weight in zip(parameters, weights, strict=True):
                p.copy_(weight)
        return start(lr, loss)

    optimizer.start = capture
    try:
        result = worker.update(trajectories, version, algorithm, dropped)
    finally:
        del optimizer.start
    return result, gradient


def assert_close(found, expected, relative=2e-5):
    """Tensors by name, relative to each one's largest value."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        assert float((found[name] - tensor).abs().max()) <= relative * scale, name
