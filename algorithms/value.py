"""The loss of a value model.

L = Σ_t w_t · ½ max( (V_t − R_t)², (clip(V_t, V_old,t ± c) − R_t)² )          without c: ½ (V_t − R_t)²
"""

from __future__ import annotations

import torch

from algorithms.metrics import Mean
from algorithms.tokens import TokenLoss, chunked_loss
from algorithms.types import LossOutput, ValueInputs


def value_loss(inputs: ValueInputs, clip: float | None) -> LossOutput:
    values = inputs.values.detach()

    def evaluate(where: slice) -> TokenLoss:
        old, target = inputs.old_values[where], inputs.returns[where]
        error = values[where] - target
        square = error.square()
        if clip is None:
            return TokenLoss(square / 2, error)
        near = old + (values[where] - old).clamp_(-clip, clip)
        worst = torch.maximum(square, (near - target).square_())
        # Where the clipped term is the larger one, V lies outside of the clip and moving it changes nothing.
        return TokenLoss(worst / 2, torch.ge(square, worst, out=torch.empty_like(square)) * error)

    loss = chunked_loss(inputs.values, inputs.weights, evaluate)
    trained = inputs.weights != 0
    error = (values - inputs.returns)[trained]
    return LossOutput(loss, {"value/squared_error": Mean(float(error.square().sum()), float(trained.sum()))})
