"""trl as an independent oracle: same batch, same loss and gradient, where the objectives coincide.

They do for groups of one size whose every rollout trains, given our advantages (trl adds 1e-4 to the deviation, which
is not an option of its loss), and:

    ours                                      trl (1.16)
    grpo  sequence_mean                       loss_type="grpo"
    grpo  token_mean                          loss_type="bnpo" (of one batch), "dapo"
    grpo  beta=β                              vllm_importance_sampling_mode="token_mask", clip_min=1/β, clip_max=β
    grpo  kl_coefficient, kl_estimator=k3     beta
    gspo  beta=null                           loss_type="grpo", importance_sampling_level="sequence" (with a β trl gives
                                              every token the sequence's mean pop(ρ), we give each its own)
    cispo epsilon_low=1, epsilon_high=ε       loss_type="cispo", epsilon_high=1+ε (trl's is absolute)
"""

from __future__ import annotations

import pytest
import torch

from algorithms.registry import build
from tests.algorithms.batches import make_case, run
from tests.algorithms.trl_oracle import trl_loss

LAYOUT = [[[9], [7], [5]], [[8], [9], [6]], [[9], [3], [9]]]
COMMON = {"group_size": 3, "max_staleness": 9, "mask_truncated": False}
CASES = [
    ("grpo", {}, {"loss_type": "grpo"}),
    ("grpo", {"beta": None}, {"loss_type": "grpo", "icepop_beta": None}),
    ("grpo", {"beta": 1.5, "epsilon_low": 0.1}, {"loss_type": "grpo", "icepop_beta": 1.5, "epsilon_low": 0.1}),
    ("grpo", {"kl_coefficient": 0.1}, {"loss_type": "grpo", "kl_coefficient": 0.1}),
    ("grpo", {"aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    ("grpo", {"aggregation": "token_mean"}, {"loss_type": "dapo"}),
    (
        "gspo",
        {"beta": None, "epsilon_low": 0.05, "epsilon_high": 0.05},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "icepop_beta": None,
            "epsilon_low": 0.05,
            "epsilon_high": 0.05,
        },
    ),
    ("cispo", {"epsilon_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
]


@pytest.mark.parametrize(("name", "options", "trl_options"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_same_loss_and_gradient(name, options, trl_options, seed):
    case = make_case(LAYOUT, seed, spoil=False)
    loss, gradient, _, targets = run(build(name, {**COMMON, **options}), case)
    logprobs = case.logprobs.clone().requires_grad_()
    advantages = targets.advantages[case.batch.cu_seqlens[:-1]]
    expected = trl_loss(case.batch, logprobs, advantages, **trl_options)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    assert loss.abs() > 1e-3
