"""KL to a frozen reference policy, as a term of the loss (off by default).

With d = log π_θ − log π_ref at the sampled token (Schulman, "Approximating KL divergence", 2020):

    k1 = d        k2 = ½ d²        k3 = e^(−d) + d − 1

k2's gradient d·∇log π is the one whose expectation is the gradient of KL(π_θ‖π_ref). Differentiating k1 gives noise
of mean 0, so k1 is logged and weighed with its own value but takes k2's gradient. k3's gradient, (1−e^(−d))·∇log π,
is that of KL(π_ref‖π_θ) (DeepSeek's GRPO, arXiv 2402.03300 Eq. 4).
"""

from __future__ import annotations

from enum import StrEnum

from jaxtyping import Float32
from torch import Tensor

from algorithms.ratios import MAX_LOG_RATIO
from algorithms.tokens import TokenLoss


class KLEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


def reference_kl(
    logprobs: Float32[Tensor, " tokens"],
    ref_logprobs: Float32[Tensor, " tokens"],
    estimator: KLEstimator,
    coefficient: float,
) -> TokenLoss:
    d = logprobs - ref_logprobs
    if estimator == KLEstimator.K3:
        inverse = (-d).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
        value, slope = inverse + d - 1, 1 - inverse
    else:
        value, slope = (d if estimator == KLEstimator.K1 else d.square() / 2), d
    return TokenLoss(coefficient * value, coefficient * slope, lambda: {"kl/reference": value})
