"""Adam in Triton: one pass over weights, moments and gradient, which also writes the model's weights in their dtype.

    m ← m + (1 − β₁)(g − m)      v ← β₂ v + (1 − β₂) g²      w ← w (1 − lr·decay) − lr/c₁ · m / (√v/√c₂ + ε)

with g the gradient over the clip's divisor and c the bias corrections. What the host does not know (the divisor, the
corrections, whether anything is done at all) is read from the device.
"""

# ruff: noqa: ANN001, ANN202  (a kernel's arguments are typed when it is compiled)
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _adam(
    main,
    gradient,
    first,
    second,
    model,
    facts,
    count,
    lr,
    decay,
    beta1,
    beta2,
    eps,
    PUBLISHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(facts) == 0.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = place < count
        g = tl.load(gradient + place, mask=mask, other=0.0) / tl.load(facts + 1)
        m = tl.load(first + place, mask=mask, other=0.0)
        v = tl.load(second + place, mask=mask, other=0.0)
        w = tl.load(main + place, mask=mask, other=0.0)
        m += (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        w = w * (1.0 - lr * decay) - lr / tl.load(facts + 2) * (m / (tl.sqrt(v) / tl.load(facts + 3) + eps))
        tl.store(first + place, m, mask=mask)
        tl.store(second + place, v, mask=mask)
        tl.store(main + place, w, mask=mask)
        if PUBLISHES:
            tl.store(model + place, w.to(model.dtype.element_ty), mask=mask)


def facts(skipped: Tensor, divisor: Tensor | None, step: Tensor, betas: tuple[float, float]) -> Tensor:
    """What the kernel reads of the device: 1 to do nothing, the gradient's divisor, c₁ and √c₂."""
    corrections = [1.0 - beta ** step.double() for beta in betas]
    parts = [skipped, torch.ones_like(skipped) if divisor is None else divisor, corrections[0], corrections[1].sqrt()]
    return torch.stack([part.float() for part in parts])


def step_shard(
    main: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    model: Tensor | None,
    read: Tensor,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """
    Args:
        model: where the weights are also written, in its dtype.
        read: what ``facts`` gives.
    """
    count = main.numel()
    _adam[(triton.cdiv(count, BLOCK),)](
        *(main, gradient, *moments, main if model is None else model, read, count, lr, decay, *betas, eps),
        PUBLISHES=model is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
