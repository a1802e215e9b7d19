"""Backward passes by hand are those of the formulas."""

import pytest
import torch

from rl.trainer.by_hand import Norm
from rl.trainer.by_hand_layer import AfterAttention, BeforeAttention
from rl.trainer.dense_layer import _after_attention, _before_attention
from rl.trainer.layer_passes import Weights


def test_norm():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 8, dtype=torch.double).requires_grad_(), torch.randn(8, dtype=torch.double)
    weight.requires_grad_()
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight
    assert torch.allclose(Norm.apply(x, weight, 1e-3), expected)
    assert torch.autograd.gradcheck(lambda a, b: Norm.apply(a, b, 1e-3), (x, weight))


def layer(hidden=8, heads=4, groups=2, dim=4, ffn=6, tokens=5, normed=True):
    torch.manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.double).requires_grad_()

    weights = Weights(
        norm=drawn(hidden),
        qkv=drawn((heads + 2 * groups) * dim, hidden),
        query_norm=drawn(dim) if normed else None,
        key_norm=drawn(dim) if normed else None,
        projection=drawn(hidden, heads * dim),
        mlp_norm=drawn(hidden),
        first=drawn(2 * ffn, hidden),
        second=drawn(hidden, ffn),
    )
    angles = torch.randn(tokens, dim // 2, dtype=torch.double).repeat(1, 2)
    return drawn(tokens, 1, hidden), weights, drawn(tokens, 1, heads * dim), angles.cos(), angles.sin(), groups


def near(found, expected):
    """The formulas take norms in fp32."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def compare(found, expected, inputs, buffers=()):
    """Outputs and gradients; those of parameters with a buffer are there, beside the ones that it had."""
    upstream = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, inputs, upstream)
    have = torch.autograd.grad(found, inputs, upstream, allow_unused=True)
    kept = {id(parameter): buffer for parameter, buffer in buffers}
    for x, a, b in zip(inputs, have, wanted, strict=True):
        near(kept[id(x)] - 1 if id(x) in kept else a, b)
        assert (a is None) == (id(x) in kept)
    for a, b in zip(found, expected, strict=True):
        near(a, b)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("buffered", [True, False])
def test_the_halves_of_a_layer(normed, buffered):
    x, weights, attended, cos, sin, groups = layer(normed=normed)
    parameters = [weight for weight in weights if weight is not None]
    buffers = [(p, torch.ones_like(p)) for p in parameters] if buffered else []
    of = {id(p): buffer for p, buffer in buffers}

    def apply(function, first, names, *rest):
        used = [getattr(weights, name) for name in names]
        return function.apply(*first, *used, *rest, tuple(of.get(id(p)) for p in used)), used

    names = ("norm", "qkv", "query_norm", "key_norm")
    found, used = apply(BeforeAttention, (x,), names, cos, sin, groups, 1e-3)
    # With double precision the layer's own functions are those of autograd.
    expected = _before_attention(x, weights, cos, sin, groups, 1e-3)
    inputs = [x, *(p for p in used if p is not None)]
    compare(found, expected, inputs, [b for b in buffers if any(b[0] is p for p in used)])

    names = ("projection", "mlp_norm", "first", "second")
    found, used = apply(AfterAttention, (x, attended), names, 1e-3)
    expected = _after_attention(x, attended, weights, 1e-3)
    compare([found], [expected], [x, attended, *used], [b for b in buffers if any(b[0] is p for p in used)])
