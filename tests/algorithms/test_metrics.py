"""Metrics merge to what the whole would give, and say what their names promise."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.advantages import moments
from algorithms.diagnostics import log_ratio_histogram
from algorithms.metrics import EffectiveShare, LogRatioQuantile, Std, merge_metrics, metric_values
from algorithms.registry import build
from tests.algorithms.batches import loss_inputs, make_case


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=4))
def test_moments_merge(parts):
    whole = [x for part in parts for x in part]
    merged = metric_values(merge_metrics(moments(np.array(part)) for part in parts))
    assert merged == pytest.approx(metric_values(moments(np.array(whole))), rel=1e-6, abs=1e-4)
    if len(whole) > 1:
        assert merged["advantage/std"] == pytest.approx(np.std(whole, ddof=1), rel=1e-4, abs=1e-4)


def test_moments_of_a_large_mean_lose_nothing():
    assert Std(2, 1e9, 0.5).merge(Std(0, 0, 0)).value() == Std(2, 1e9, 0.5).value()
    assert Std(0, 0, 0).value() is None


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.1, 2.0])
def test_quantiles_from_the_histogram(scale):
    d = torch.randn(20_001, generator=torch.Generator().manual_seed(0)) * scale
    counts = tuple((log_ratio_histogram(d[:7000]) + log_ratio_histogram(d[7000:])).tolist())
    for q in (0.01, 0.5, 0.99):
        exact = float(d.quantile(q))
        got = LogRatioQuantile(q, counts).value()
        assert np.log(got) == pytest.approx(exact, rel=0.06, abs=1e-5)
    assert LogRatioQuantile(0.5, (0,) * len(counts)).value() is None


def test_effective_share():
    assert EffectiveShare(3, 3, 3).value() == 1
    assert EffectiveShare(4, 1, 1).value() == 0.25
    assert EffectiveShare(0, 0, 0).value() is None


def test_every_named_metric_is_there_and_right():
    case = make_case([[[9, 9], [8]], [[9], [7]]], 4, spoil=False)
    algorithm = build("grpo", {"max_staleness": 9, "epsilon_high": 0.1, "epsilon_low": 0.1})
    targets = algorithm.prepare(case.batch)
    entropy = torch.rand(len(case.logprobs))
    metrics = algorithm.loss(loss_inputs(case.batch, targets, case.logprobs, entropy=entropy)).metrics
    values = metric_values(pickle.loads(pickle.dumps(merge_metrics([metrics, targets.metrics]))))
    on = targets.weights != 0
    d = (case.logprobs - case.batch.rollout_logprobs)[on]
    rho = (case.batch.old_logprobs - case.batch.rollout_logprobs)[on].exp()
    r, a = (case.logprobs - case.batch.old_logprobs)[on].exp(), targets.advantages[on]
    expected = {
        "kl/rollout_k1": -d.mean(),
        "kl/rollout_k3": (d.exp() - 1 - d).mean(),
        "entropy": entropy[on].mean(),
        "icepop/masked_low": (rho < 0.5).float().mean(),
        "icepop/masked_high": (rho > 2).float().mean(),
        "clip/low": ((r < 0.9) & (a < 0)).float().mean(),
        "clip/high": ((r > 1.1) & (a > 0)).float().mean(),
        "ratio/effective_share": d.exp().sum() ** 2 / (len(d) * d.exp().square().sum()),
        "ratio/max": d.exp().max(),
    }
    for name, value in expected.items():
        assert values[name] == pytest.approx(float(value), rel=1e-5), name
    assert all(values[name] > 0 for name in ("icepop/masked_low", "icepop/masked_high", "clip/low", "clip/high"))
    assert values["ratio/p01"] < values["ratio/p50"] < values["ratio/p99"]
    for reason in ("environment", "stale", "truncated", "no_action"):
        assert values[f"dropped/{reason}"] == 0
    assert {"advantage/mean", "advantage/std", "advantage/max_abs"} <= values.keys()


def test_masked_shares_of_dis():
    case = make_case([[[9, 9], [8]]], 4, spoil=False)
    algorithm = build("dis", {"max_staleness": 9, "epsilon_low": 0.1, "epsilon_high": 0.1})
    targets = algorithm.prepare(case.batch)
    values = metric_values(algorithm.loss(loss_inputs(case.batch, targets, case.logprobs)).metrics)
    r = (case.logprobs - case.batch.rollout_logprobs)[targets.weights != 0].exp()
    assert values["dis/masked_low"] == pytest.approx(float((r <= 0.9).float().mean()))
    assert values["dis/masked_high"] == pytest.approx(float((r >= 1.1).float().mean()))


def test_dropped_rollouts_are_counted_once_each_by_reason():
    case = make_case([[[3], [3], [0], [3], [3]]], 0, spoil=False)
    flag = torch.eye(5, dtype=torch.bool)
    batch = dataclasses.replace(
        case.batch,
        action_mask=torch.ones(12, dtype=torch.bool),
        current_version=0,
        valid=~flag[0],
        dropped=flag[0] | flag[1],
        truncated=flag[1] | flag[3],
    )
    values = metric_values(build("grpo", {}).prepare(batch).metrics)
    assert {k: v for k, v in values.items() if k.startswith("dropped/")} == {
        "dropped/environment": 1,
        "dropped/stale": 1,
        "dropped/truncated": 1,
        "dropped/no_action": 1,
        "dropped/stale_tokens": 0,
    }
