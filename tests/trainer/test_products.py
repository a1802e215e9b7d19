"""What bfloat16 weights say of tokens is not rounded to bfloat16 on the way."""

import dataclasses

import pytest
import torch

from rl.batch import build_batch
from rl.trainer.products import add_product, product
from rl.trainer.token_logprobs import TokenLogprobs
from tests.trainer.common import make_trajectories

TOKENS, HIDDEN, VOCABULARY = 64, 128, 512


@pytest.fixture
def head():
    """Hidden states and a head with logits up to about 12, which bfloat16 has in steps of 1/16."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) * 3 / HIDDEN**0.5).bfloat16()
    exact = hidden.double() @ weight.double().T
    assert (exact - exact.bfloat16()).abs().max() > 1e-2
    return hidden, weight, exact


def test_products(head):
    hidden, weight, exact = head
    assert (product(hidden, weight.T) - exact).abs().max() <= 1e-4
    total = torch.ones(TOKENS, VOCABULARY)
    add_product(total, hidden, weight.T)
    assert (total - 1 - exact).abs().max() <= 1e-4


def test_logprobs_and_whole_distributions(worker, head):
    from rl.trainer.distributions import head_logits

    hidden, weight, exact = head
    targets, ones = torch.arange(TOKENS), torch.ones(TOKENS)
    logprobs, entropy = TokenLogprobs.apply(hidden, weight, targets, ones, 0, 24, None)
    expected = exact.log_softmax(1)
    assert (logprobs - expected.gather(1, targets[:, None])[:, 0]).abs().max() <= 1e-4
    assert (entropy + (expected.exp() * expected).sum(1)).abs().max() <= 1e-4
    assert (head_logits(hidden, weight, ones, VOCABULARY) - exact).abs().max() <= 1e-4


def test_the_likeliest_tokens_have_the_logprobs_that_are_trained(worker, model_dir):
    from rl.trainer.forward import batch_logprobs, batch_topk

    worker.config = worker.config.model_copy(update={"dtype": "bfloat16"})
    worker.load_model(model_dir)
    with torch.no_grad():
        worker.loaded.model.output_weight().mul_(30)  # or no logit is large enough to be rounded by much
    batch = build_batch(make_trajectories(groups=2), 0)
    batch = dataclasses.replace(batch, scored=torch.ones_like(batch.scored))
    micro_batches = [list(range(batch.rollout.samples))]
    logprobs, _ = batch_logprobs(worker.loaded.modules, batch, micro_batches, worker.config)
    values, ids = batch_topk(worker.loaded.modules, batch, micro_batches, worker.config, worker.loaded.model.tokens)
    chosen = (ids == batch.token_ids[:, None]) & (logprobs != 0)[:, None]
    assert (values * chosen).sum(1).sub(logprobs).abs().max() <= 1e-4
