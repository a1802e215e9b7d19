"""What the engine's likeliest tokens say of its distribution, against the whole of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from algorithms.metrics import metric_values
from algorithms.registry import build, names
from algorithms.types import Need
from tests.algorithms.batches import make_case

LAYOUT = [[[9, 8], [9], [7]], [[9], [9]]]
VOCABULARY = 12


def case_with_top(k, seed=0):
    """A case whose tokens were sampled from distributions that are known, and the tokens' places in them."""
    case = make_case(LAYOUT, seed, spoil=False)
    rng = torch.Generator().manual_seed(seed)
    mask = case.batch.action_mask
    whole = torch.randn(len(mask), VOCABULARY, generator=rng).mul(2).log_softmax(-1)
    sampled = torch.multinomial(whole.exp(), 1, generator=rng)
    top, ids = whole.topk(k, -1)
    batch = dataclasses.replace(
        case.batch,
        rollout_logprobs=torch.where(mask, whole.gather(1, sampled)[:, 0], 0.0),
        top_ids=torch.where(mask[:, None], ids, -1).int(),
        top_logprobs=torch.where(mask[:, None], top, 0.0),
        values=torch.zeros(len(mask)),
    )
    rank = (whole > whole.gather(1, sampled)).sum(-1)
    return batch, whole[mask].double(), rank[mask]


def of(batch, k, name="grpo"):
    metrics = metric_values(build(name, {"rollout_top_k": k, "max_staleness": 9}).prepare(batch).metrics)
    return {key.removeprefix("rollout/"): value for key, value in metrics.items() if key.startswith("rollout/")}


@pytest.mark.parametrize("name", ["grpo", "sao"])
def test_figures_are_those_of_the_whole_distribution(name):
    batch, whole, rank = case_with_top(3)
    found = of(batch, 3, name)
    p = whole.exp()
    assert found["top_k_mass"] == pytest.approx(p.topk(3, -1).values.sum(-1).mean().item(), rel=1e-5)
    assert found["greedy_share"] == pytest.approx((rank == 0).double().mean().item())
    assert found["outside_share"] == pytest.approx((rank >= 3).double().mean().item())
    assert 0 < found["entropy_bound"] < -(p * whole).sum(-1).mean().item()


def test_the_bound_is_the_entropy_where_one_token_is_left_or_none():
    for k in (VOCABULARY - 1, VOCABULARY):
        batch, whole, _ = case_with_top(k)
        assert of(batch, k)["entropy_bound"] == pytest.approx(-(whole.exp() * whole).sum(-1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("name", ["cispo", "dis", "grpo", "gspo", "opd", "sao"])
def test_they_are_asked_for_only_when_wanted(name):
    asks, silent = build(name, {"rollout_top_k": 4}), build(name, {})
    assert (asks.rollout_top_k, silent.rollout_top_k) == (4, None)
    assert asks.needs - silent.needs == {Need.ROLLOUT_TOP_LOGPROBS}
    assert name in names()


def test_a_batch_without_them_or_with_another_number_is_refused():
    batch, *_ = case_with_top(3)
    with pytest.raises(ValueError, match="rollout_top_k=4, but the rollouts were recorded with 3"):
        of(batch, 4)
    with pytest.raises(ValueError, match="needs rollout_top_logprobs, and the batch has none"):
        of(dataclasses.replace(batch, top_ids=None, top_logprobs=None), 3)
    assert of(batch, 0) == {}


def test_they_change_neither_advantages_nor_weights():
    batch, *_ = case_with_top(3)
    with_them, without = (build("grpo", {"rollout_top_k": k, "max_staleness": 9}).prepare(batch) for k in (3, 0))
    torch.testing.assert_close(with_them.advantages, without.advantages, rtol=0, atol=0)
    torch.testing.assert_close(with_them.weights, without.weights, rtol=0, atol=0)


def test_supervised_fine_tuning_has_no_such_option():
    with pytest.raises(ValueError, match=r"algorithm\.rollout_top_k"):
        build("sft", {"rollout_top_k": 4})
