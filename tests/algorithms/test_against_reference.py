"""Every objective on random ragged batches against loops in float64: values and gradients."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms import advantages as advantages_module
from algorithms import gae, host, packed, registry
from tests.algorithms import reference
from tests.algorithms.batches import LAYOUTS, SEEDS, make_case, run

OPTIONS = [
    ("grpo", {"group_size": 2}),
    ("grpo", {"normalize_std": False, "baseline": "leave_one_out", "beta": 1.3, "kl_coefficient": 0.1}),
    ("grpo", {"unbiased_std": False, "aggregation": "token_mean", "beta": None, "mask_truncated": False}),
    ("grpo", {"stale": "mask", "max_staleness": 1, "kl_coefficient": 0.2, "kl_estimator": "k1"}),
    ("dis", {}),
    ("dis", {"epsilon_low": 0.2, "epsilon_high": 0.3, "stale": "mask", "max_staleness": 0}),
    ("dis", {"aggregation": "sequence_mean", "max_staleness": 2, "kl_coefficient": 0.2, "kl_estimator": "k2"}),
    ("gspo", {"epsilon_low": 0.1, "epsilon_high": 0.1}),
    ("gspo", {"beta": None, "stale": "mask", "max_staleness": 1}),
    ("cispo", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
    ("cispo", {"beta": None}),
    ("sao", {}),
    ("sao", {"gamma": 0.9, "lambda_policy": 0.8, "lambda_critic": 0.7, "epsilon_low": 0.8, "stale": "mask"}),
    ("opd", {}),
    ("opd", {"correction": "clipped", "coefficient": 0.5}),
    ("opd", {"group_size": 4, "outcome_coefficient": 0.3}),
]


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """A small batch then spans several chunks, tiles and columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "CPU_CHUNK", 16)
        patch.setattr(packed, "BLOCK", 8)
        patch.setattr(gae, "ROWS", 4)
        patch.setattr(gae, "COLUMNS", 2)
        yield


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(OPTIONS)])
@settings(max_examples=25, deadline=None)
@given(layout=LAYOUTS, seed=SEEDS)
def test_loss_and_gradient(name, options, layout, seed):
    case = make_case(layout, seed)
    algorithm = registry.build(name, options)
    got, gradient, _, targets = run(algorithm, case)
    logprobs = case.logprobs.double().requires_grad_()
    expected = reference.loss(name, algorithm.config, case.batch, logprobs)
    (expected_gradient,) = torch.autograd.grad(expected + 0 * logprobs.sum(), logprobs)
    torch.testing.assert_close(got.double(), expected.detach(), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2e-5, atol=2e-6)
    assert (targets.weights[~case.batch.action_mask] == 0).all()


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, seed=SEEDS, gamma=st.floats(0.5, 1), lam=st.floats(0, 1) | st.none(), critic=st.floats(0, 1))
def test_sao_advantages_and_returns(layout, seed, gamma, lam, critic):
    case = make_case(layout, seed)
    algorithm = registry.build("sao", {"gamma": gamma, "lambda_policy": lam, "lambda_critic": critic})
    targets = algorithm.prepare(case.batch)
    advantage, returns = reference.sao_advantages(case.batch, algorithm.config)
    for t, expected in advantage.items():
        assert float(targets.advantages[t]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert float(targets.returns[t]) == pytest.approx(returns[t], rel=1e-5, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, seed=SEEDS)
def test_sample_sums(layout, seed):
    batch = make_case(layout, seed).batch
    spans = list(itertools.pairwise(batch.cu_seqlens.tolist()))
    expected = [float(batch.values[a:b].double().sum()) for a, b in spans]
    got = packed.sample_sums(batch.values, batch.cu_seqlens)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    counts = host.sample_counts(batch.action_mask.numpy(), batch.cu_seqlens.numpy())
    assert counts.tolist() == [float(batch.action_mask[a:b].sum()) for a, b in spans]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    share=st.sampled_from([0.1, 0.6, 1.0]),
    gamma=st.floats(0.5, 1),
    seed=SEEDS,
)
def test_gae_over_several_tiles(lengths, share, gamma, seed):
    rng = torch.Generator().manual_seed(seed)
    edges = torch.tensor([0, *lengths]).cumsum(0)
    values, mask = torch.randn(int(edges[-1]), generator=rng), torch.rand(int(edges[-1]), generator=rng) < share
    reward, lam = torch.randn(2, len(lengths), generator=rng, dtype=torch.float64)
    lam.sigmoid_()
    got = gae.skip_observation_gae(values, mask, edges, reward, gamma, lam)
    expected = torch.zeros_like(values)
    for s in range(len(lengths)):
        tokens = [t for t in range(int(edges[s]), int(edges[s + 1])) if mask[t]]
        rewards = [0.0] * (len(tokens) - 1) + [float(reward[s])] * bool(tokens)
        expected[tokens] = torch.tensor(reference.gae(values[tokens].tolist(), rewards, gamma, float(lam[s])))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_overlong_penalty():
    length = np.array([0.0, 80, 90, 100, 130])
    assert advantages_module.overlong_penalty(length, max_length=100, buffer=20).tolist() == [0, 0, -0.5, -1, -1]
