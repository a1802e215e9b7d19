"""The same numbers on a CUDA device as on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from algorithms.metrics import metric_values
from algorithms.registry import build
from algorithms.types import TeacherView
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


def on_gpu(case: Case) -> Case:
    moved = {name: x.cuda() for name, x in vars(case.batch).items() if isinstance(x, Tensor)}
    return Case(dataclasses.replace(case.batch, **moved), case.logprobs.cuda())


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(OPTIONS)])
def test_loss_gradient_and_metrics(name, options):
    case = make_case(LAYOUT, 0)
    if name == "sft":
        case = Case(dataclasses.replace(case.batch, reward=case.batch.reward.nan_to_num(0)), case.logprobs)
    loss, gradient, output, targets = run(build(name, options), case)
    gpu_loss, gpu_gradient, gpu_output, gpu_targets = run(build(name, options), on_gpu(case))
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(gpu_loss.cpu(), loss, **close)
    torch.testing.assert_close(gpu_gradient.cpu(), gradient, **close)
    torch.testing.assert_close(gpu_targets.advantages.cpu(), targets.advantages, rtol=1e-4, atol=1e-5)
    for cpu, gpu in ((output.metrics, gpu_output.metrics), (targets.metrics, gpu_targets.metrics)):
        assert metric_values(gpu) == pytest.approx(metric_values(cpu), rel=1e-3, abs=1e-4)


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
        here = case if device == "cpu" else on_gpu(case)
        leaf = logits.detach().to(device).requires_grad_()
        view = TeacherView(log_q.to(device), torch.ones(90, device=device), None if ids is None else ids.to(device))
        targets = algorithm.prepare(here.batch)
        inputs = loss_inputs(here.batch, targets, here.logprobs, logits=leaf, teacher_views=[view])
        loss = algorithm.loss(inputs).loss
        results.append((loss.detach().cpu(), torch.autograd.grad(loss, leaf)[0].cpu()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
