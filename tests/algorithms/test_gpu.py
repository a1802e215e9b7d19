"""The same numbers on a CUDA device as on the CPU, from what ``prepare`` made on the CPU."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from algorithms.metrics import metric_values
from algorithms.registry import build
from algorithms.types import Algorithm, LossOutput, Targets, TeacherView
from tests.algorithms.batches import Case, loss_inputs, make_case, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYOUT = [[[900, 300], [0], [5000]], [[8000], [70, 20, 1]], [[3], [4096]]]
OPTIONS = [
    ("grpo", {"kl_coefficient": 0.1}),
    ("dis", {"stale": "mask", "max_staleness": 1}),
    *[(name, {}) for name in ("gspo", "cispo", "sao", "opd", "sft")],
    ("sao", {"gamma": 0.99, "lambda_critic": 0.9, "whiten": True}),
]


T = TypeVar("T")


def moved(record: T, device: str) -> T:
    return dataclasses.replace(
        record, **{name: x.to(device) for name, x in vars(record).items() if isinstance(x, Tensor)}
    )


def on_gpu(algorithm: Algorithm, case: Case, targets: Targets) -> tuple[Tensor, Tensor, LossOutput]:
    logprobs = case.logprobs.cuda().requires_grad_()
    output = algorithm.loss(loss_inputs(moved(case.batch, "cuda"), moved(targets, "cuda"), logprobs))
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output.loss.detach(), gradient, output


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(OPTIONS)])
def test_loss_gradient_and_metrics(name, options):
    case = make_case(LAYOUT, 0)
    if name == "sft":
        case = Case(dataclasses.replace(case.batch, reward=case.batch.reward.nan_to_num(0)), case.logprobs)
    loss, gradient, output, targets = run(build(name, options), case)
    gpu_loss, gpu_gradient, gpu_output = on_gpu(build(name, options), case, targets)
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(gpu_loss.cpu(), loss, **close)
    torch.testing.assert_close(gpu_gradient.cpu(), gradient, **close)
    assert metric_values(gpu_output.metrics) == pytest.approx(metric_values(output.metrics), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("k", [None, 3])
def test_distillation_from_distributions(k):
    rng = torch.Generator().manual_seed(0)
    case = make_case([[[40]], [[50]]], 0, spoil=False)
    log_q, ids = torch.randn(90, 11, generator=rng).log_softmax(1), None
    if k is not None:
        log_q, ids = log_q.topk(k, dim=1)
    logits = torch.randn(90, 11, generator=rng)
    algorithm = build("opd", {"mode": "full_vocab" if k is None else "top_k"})
    results = []
    for device in ("cpu", "cuda"):
        leaf = logits.detach().to(device).requires_grad_()
        view = TeacherView(log_q.to(device), torch.ones(90, device=device), None if ids is None else ids.to(device))
        batch, targets = moved(case.batch, device), moved(algorithm.prepare(case.batch), device)
        inputs = loss_inputs(batch, targets, case.logprobs.to(device), logits=leaf, teacher_views=[view])
        loss = algorithm.loss(inputs).loss
        results.append((loss.detach().cpu(), torch.autograd.grad(loss, leaf)[0].cpu()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
