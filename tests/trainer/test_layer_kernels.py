"""The formulas beside a layer's matrix products against autograd, and the Triton kernels against the formulas: on a
GPU, or, where Triton is installed, in its interpreter (``TRITON_INTERPRET=1``)."""

import os

import pytest
import torch

from rl.trainer import layer_kernels as formulas
from rl.trainer.dense_layer import _before_attention, rms_norm
from rl.trainer.layer_passes import Weights

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOKENS, GROUPS, QUERIES, EPS = 37, 2, 3, 1e-6


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(dim):
    half = random(TOKENS, dim // 2, seed=9)
    whole = torch.cat([half, half], 1)
    return whole.cos(), whole.sin()


def assert_near(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None
            continue
        difference = (a.detach().float().cpu() - b.detach().float()).abs().max()
        assert difference <= tolerance * max(1.0, float(b.detach().abs().max()))


def test_norms_and_gate_have_the_gradients_of_autograd():
    x, delta, weight = (random(TOKENS, 24, seed=s).requires_grad_() for s in range(3))
    weight = random(24, seed=3).requires_grad_()
    upstream, residual = random(TOKENS, 24, seed=4), random(TOKENS, 24, seed=5)
    total, normed, inverse = formulas.add_norm(x.detach(), delta.detach(), weight.detach(), EPS)
    summed = x + delta
    reference = rms_norm(summed, weight, EPS)
    assert_near((total, normed), (summed, reference), 1e-5)
    grad_x, grad_weight = torch.autograd.grad((reference, summed), (x, weight), (upstream, residual))
    found = formulas.norm_backward(upstream, total, inverse, weight.detach(), residual)
    assert_near(found, (grad_x, reference, grad_weight), 1e-5)
    assert torch.equal(formulas.add_norm(x.detach(), None, weight.detach(), EPS)[0], x)

    mixed = random(TOKENS, 48, seed=6).requires_grad_()
    gate, up = mixed.chunk(2, 1)
    active = torch.nn.functional.silu(gate) * up
    (slopes,) = torch.autograd.grad(active, mixed, upstream)
    assert_near([formulas.swiglu(mixed.detach())], [active], 1e-5)
    assert_near(formulas.swiglu_backward(mixed.detach(), upstream), (slopes, active), 1e-5)


@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_have_the_gradients_of_autograd(normed):
    dim = 16
    mixed = random(TOKENS, GROUPS * (QUERIES + 2) * dim).requires_grad_()
    scales = [random(dim, seed=s).requires_grad_() for s in (1, 2)] if normed else [None, None]
    cos, sin = angles(dim)
    # The layer's own function, whose norm and product change nothing here.
    hidden = mixed.size(1)
    unit = Weights(torch.ones(hidden), torch.eye(hidden), *scales, *[torch.empty(0)] * 4)
    root = mixed.square().mean(1, keepdim=True).sqrt()
    reference = _before_attention((mixed / root)[:, None], unit, cos, sin, GROUPS, 0.0)
    plain = [None if scale is None else scale.detach() for scale in scales]
    scaled = (mixed / root).detach()
    assert_near(formulas.split_rotate(scaled, cos, sin, *plain, GROUPS, 0.0), reference, 1e-5)
    leaf = scaled.clone().requires_grad_()
    outputs = _before_attention_of(leaf, scales, cos, sin)
    upstream = tuple(random(*output.shape, seed=s) for s, output in enumerate(outputs, 20))
    wanted = [leaf, *(scale for scale in scales if scale is not None)]
    expected = torch.autograd.grad(outputs, wanted, upstream)
    found = formulas.split_rotate_backward(upstream, scaled, cos, sin, *plain, EPS)
    assert_near(found, (*expected, *[None] * (3 - len(expected))), 1e-5)


def _before_attention_of(mixed, scales, cos, sin):
    slots = mixed.view(TOKENS, GROUPS, -1, cos.size(1))
    query, key, value = slots[:, :, :-2].flatten(1, 2), slots[:, :, -2], slots[:, :, -1]
    if scales[0] is not None:
        query, key = rms_norm(query, scales[0], EPS), rms_norm(key, scales[1], EPS)
    half = cos.size(1) // 2

    def turned(x):
        return x * cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, None]

    return turned(query), turned(key), value


@pytest.mark.gpu
@pytest.mark.timeout(60)
@pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a CUDA device, or Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "dim", "normed"), [(576, 64, False), (256, 128, True), (40, 24, True)])
def test_kernels_are_the_formulas(dtype, hidden, dim, normed):
    from rl.trainer import layer_triton as kernels

    def put(x):
        return x.cuda() if GPU and x is not None else x

    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    x, delta, upstream, residual = (random(TOKENS, hidden, seed=s, dtype=dtype) for s in range(4))
    weight = random(hidden, seed=5, dtype=dtype)
    for second in (delta, None):
        expected = formulas.add_norm(x, second, weight, EPS)
        assert_near(kernels.add_norm(put(x), put(second), put(weight), EPS), expected, tolerance)
    arguments = (upstream, x, expected[2], weight, residual)
    found = kernels.norm_backward(*map(put, arguments))
    assert_near(found, formulas.norm_backward(*arguments), tolerance)

    mixed, gradient = random(TOKENS, 2 * 1100, seed=6, dtype=dtype), random(TOKENS, 1100, seed=7, dtype=dtype)
    assert_near([kernels.swiglu(put(mixed))], [formulas.swiglu(mixed)], tolerance)
    found = kernels.swiglu_backward(put(mixed), put(gradient))
    assert_near(found, formulas.swiglu_backward(mixed, gradient), tolerance)

    mixed = random(TOKENS, GROUPS * (QUERIES + 2) * dim, seed=8, dtype=dtype)
    cos, sin = (angle.to(dtype) for angle in angles(dim))
    scales = [random(dim, seed=s, dtype=dtype) for s in (10, 11)] if normed else [None, None]
    expected = formulas.split_rotate(mixed, cos, sin, *scales, GROUPS, EPS)
    found = kernels.split_rotate(*map(put, (mixed, cos, sin, *scales)), GROUPS, EPS)
    assert_near(found, expected, tolerance)
    gradients = tuple(random(*part.shape, seed=s, dtype=dtype) for s, part in enumerate(expected, 30))
    arguments = (mixed, cos, sin, *scales)
    found = kernels.split_rotate_backward(tuple(map(put, gradients)), *map(put, arguments), EPS)
    assert_near(found, formulas.split_rotate_backward(gradients, *arguments, EPS), tolerance)


@pytest.mark.gpu
@pytest.mark.timeout(60)
@pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a CUDA device, or Triton's interpreter")
@pytest.mark.parametrize("divisor", [None, 2.5])
def test_adam_is_pytorchs(divisor):
    from rl.trainer.adam_triton import facts, step_shard

    device = "cuda" if GPU else "cpu"
    betas, count = (0.9, 0.95), 5000
    ours = [random(count, seed=s).to(device) for s in range(2)] + [torch.zeros(count, device=device) for _ in range(2)]
    theirs = [x.clone() for x in ours]
    model, step = torch.zeros(count, dtype=torch.bfloat16, device=device), torch.zeros((), device=device)
    scale = None if divisor is None else torch.tensor(divisor, device=device)
    for update, skipped in enumerate([0.0, 0.0, 1.0, 0.0]):
        skip = torch.tensor(skipped, device=device)
        for held in (ours[1], theirs[1]):  # PyTorch leaves the gradient divided
            held.copy_(random(count, seed=10 + update))
        before = [x.clone() for x in ours]
        step += 1.0 - skip
        step_shard(ours[0], ours[1], (ours[2], ours[3]), model, facts(skip, scale, step, betas), 0.1, 0.01, betas, 1e-8)
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01, "eps": 1e-8}
        torch._fused_adamw_(
            *([x] for x in theirs), [], [step], **options, amsgrad=False, maximize=False,
            grad_scale=scale, found_inf=skip,
        )  # fmt: skip
        for place in (0, 2, 3):
            torch.testing.assert_close(ours[place], theirs[place], rtol=1e-5, atol=1e-6)
            assert torch.equal(ours[place], before[place]) == bool(skipped)
        # The interpreter cuts bfloat16 off in place of rounding.
        torch.testing.assert_close(model, ours[0].to(model.dtype), rtol=0.0 if GPU else 0.01, atol=0.0 if GPU else 1e-3)
