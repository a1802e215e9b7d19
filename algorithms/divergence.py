"""Reverse KL from the policy's whole distribution to its teachers', token by token.

    full vocabulary:   KL_t = Σ_v π_θ(v) [log π_θ(v) − log π_T(v)]
    top-k:             the same over the teacher's k likeliest tokens and one bucket for all others
    several teachers:  Σ_T w_T KL_t(T) / Σ_T w_T

With p_b the policy's mass in bucket b and c_b = log p_b − log q_b, the slope in v's logit is π_θ(v)·(c_b(v) − KL_t).
Rows are worked on a few at a time, so the only array of tokens × vocabulary made here is the gradient of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from algorithms.types import LogitRows, TeacherView

CPU_ELEMENTS = 1 << 19
ACCELERATOR_ELEMENTS = 1 << 26
SMALLEST = 1e-20
"""Stands for a probability of 0 under a logarithm. The teacher's tail is known no better than fp32's 1 − Σ top-k."""


def reverse_kl(
    logits: Float[Tensor, "tokens vocab"] | LogitRows, views: Sequence[TeacherView], trained: Bool[Tensor, " tokens"]
) -> Float32[Tensor, " tokens"]:
    """KL_t at the trained tokens, 0 at the others (and where no teacher has a weight)."""
    if isinstance(logits, Tensor):
        kl: Tensor = _ReverseKL.apply(logits, views, trained)
        return kl
    rows = trained.nonzero().flatten()
    values = logits.mapped(partial(_rows_kl, views), rows)
    return values.new_zeros(len(trained)).index_copy(0, rows, values)


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, views: Sequence[TeacherView], trained: Tensor) -> Tensor:
        kl = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
        gradient = torch.zeros_like(logits)
        elements = CPU_ELEMENTS if logits.device.type == "cpu" else ACCELERATOR_ELEMENTS
        for rows in trained.nonzero().flatten().split(max(1, elements // logits.shape[1])):
            kl[rows], slope = _rows_kl(views, logits[rows].float(), rows)
            gradient[rows] = slope.to(logits.dtype)
        ctx.save_for_backward(gradient)
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_kl[:, None].to(gradient.dtype), None, None


def _rows_kl(
    views: Sequence[TeacherView], logits: Float32[Tensor, "rows vocab"], rows: Int[Tensor, " rows"]
) -> tuple[Float32[Tensor, " rows"], Float32[Tensor, "rows vocab"]]:
    logp = logits.log_softmax(1)
    p = logp.exp()
    total = torch.stack([view.weight[rows] for view in views]).sum(0).clamp(min=SMALLEST)
    kl, slope = torch.zeros_like(total), torch.zeros_like(p)
    for view in views:
        share = view.weight[rows] / total
        own = share.nonzero().flatten()  # the other rows' teachers may be large: they are not asked
        if not len(own):
            continue
        share, own_p = share[own], p[own]
        log_gap = _log_gap(logp[own], own_p, view, rows[own])
        view_kl = (own_p * log_gap).sum(1)
        kl.index_add_(0, own, share * view_kl)
        slope.index_add_(0, own, share[:, None] * own_p * (log_gap - view_kl[:, None]))
    return kl, slope


def _log_gap(
    logp: Float32[Tensor, "rows vocab"], p: Float32[Tensor, "rows vocab"], view: TeacherView, rows: Int[Tensor, " rows"]
) -> Float32[Tensor, "rows vocab"]:
    """log p_b − log q_b of the bucket that each token of the vocabulary is in."""
    log_q = view.logprobs[rows]
    if view.token_ids is None:
        return logp - log_q
    top = view.token_ids[rows].long()
    tail_p = p.scatter(1, top, 0.0).sum(1, keepdim=True).clamp(min=SMALLEST)
    tail_q = (1 - log_q.exp().sum(1, keepdim=True)).clamp(min=torch.finfo(log_q.dtype).eps)
    return (tail_p.log() - tail_q.log()).expand_as(p).scatter(1, top, logp.gather(1, top) - log_q)
