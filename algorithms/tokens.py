"""A policy loss from its per-token form, in cache-sized chunks.

An objective says for each token what its loss ℓ_t is and what its slope ∂ℓ_t/∂log π_θ(y_t) is; both are elementwise.
``token_loss`` makes of them Σ_t weights[t]·ℓ_t and its gradient in one pass over memory: autograd over the same formula
keeps a dozen arrays of the batch's length and takes several times as long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Shaped
from torch import Tensor

from algorithms.diagnostics import Tally
from algorithms.packed import chunks, empty_like
from algorithms.types import LossInputs, LossOutput

Marks = Callable[[], Mapping[str, Shaped[Tensor, " tokens"]]]


@dataclass(frozen=True)
class TokenLoss:
    value: Float32[Tensor, " tokens"]
    slope: Float32[Tensor, " tokens"]
    marks: Marks = dict
    """What to log, computed only when asked for: the mean over the trained tokens is."""

    def __add__(self, other: TokenLoss) -> TokenLoss:
        return TokenLoss(self.value + other.value, self.slope + other.slope, self.marks).marked(other.marks)

    def marked(self, marks: Marks) -> TokenLoss:
        return TokenLoss(self.value, self.slope, lambda: {**self.marks(), **marks()})


Objective = Callable[[LossInputs], TokenLoss]

PER_TOKEN = (
    *("logprobs", "entropy", "action_mask", "rollout_logprobs", "advantages", "weights"),
    *("old_logprobs", "ref_logprobs", "teacher_logprobs", "sequence_log_ratio"),
)


def token_loss(objective: Objective, inputs: LossInputs, *, mismatch: bool = True) -> LossOutput:
    """``mismatch`` off leaves out what compares π_θ to π_inf, for data that no engine sampled."""
    tally = Tally(mismatch) if inputs.observe else None

    def evaluate(where: slice) -> TokenLoss:
        chunk = _chunk(inputs, where)
        token = objective(chunk)
        if tally is not None:
            tally.add(chunk, token.marks())
        return token

    loss = chunked_loss(inputs.logprobs, inputs.weights, evaluate)
    return LossOutput(loss, tally.metrics() if tally else {})


def chunked_loss(
    x: Float32[Tensor, " tokens"], weights: Float32[Tensor, " tokens"], evaluate: Callable[[slice], TokenLoss]
) -> Float[Tensor, ""]:
    """Σ_t weights[t]·ℓ_t(x[t]), whose gradient in x is weights·slope. ``evaluate`` runs without autograd."""
    loss: Tensor = _ChunkedLoss.apply(x, weights, evaluate)
    return loss


def needed(name: str, x: Tensor | None) -> Tensor:
    """The optional input, or an error that names it."""
    if x is None:
        raise ValueError(f"the algorithm needs {name}, and the batch has none")
    return x


def _chunk(inputs: LossInputs, where: slice) -> LossInputs:
    parts: dict[str, Any] = {name: None if (x := getattr(inputs, name)) is None else x[where] for name in PER_TOKEN}
    return dataclasses.replace(inputs, **parts, logits=None, teacher_views=())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, evaluate: Callable[[slice], TokenLoss]) -> Float[Tensor, ""]:
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        gradient = empty_like(x)
        for where in chunks(len(x), x.device):
            token = evaluate(where)
            total += token.value.dot(weights[where])
            torch.mul(token.slope, weights[where], out=gradient[where])
        ctx.save_for_backward(gradient)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_loss: Float[Tensor, ""]) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return torch.mul(gradient, grad_loss, out=empty_like(gradient)), None, None
