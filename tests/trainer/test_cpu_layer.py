"""Backward passes by hand are those of the formulas."""

import pytest
import torch
import torch.nn.functional as F

from rl.trainer import packing
from rl.trainer.cpu_layer import Layer, Shape
from rl.trainer.cpu_norm import Norm
from rl.trainer.dense_layer import _after_attention, _before_attention
from rl.trainer.layer_passes import Weights
from rl.trainer.packing import build_layout


def test_norm():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 8, dtype=torch.double).requires_grad_(), torch.randn(8, dtype=torch.double)
    weight.requires_grad_()
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight
    assert torch.allclose(Norm.apply(x, weight, 1e-3), expected)
    assert torch.autograd.gradcheck(lambda a, b: Norm.apply(a, b, 1e-3), (x, weight))


TOKENS, HEADS, GROUPS, DIM = 9, 4, 2, 4


def layer(hidden=8, ffn=6, normed=True):
    torch.manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.double).requires_grad_()

    weights = Weights(
        norm=drawn(hidden),
        qkv=drawn((HEADS + 2 * GROUPS) * DIM, hidden),
        query_norm=drawn(DIM) if normed else None,
        key_norm=drawn(DIM) if normed else None,
        projection=drawn(hidden, HEADS * DIM),
        mlp_norm=drawn(hidden),
        first=drawn(2 * ffn, hidden),
        second=drawn(hidden, ffn),
    )
    return drawn(TOKENS, 1, hidden), weights, torch.randn(TOKENS, DIM // 2, dtype=torch.double)


def by_formula(x, weights, angles, lengths):
    cos, sin = angles.repeat(1, 2).cos(), angles.repeat(1, 2).sin()
    heads = _before_attention(x, weights, cos, sin, GROUPS, 1e-3)
    attended = [
        F.scaled_dot_product_attention(*(h.transpose(0, 1) for h in of_sample), is_causal=True, enable_gqa=True)
        for of_sample in zip(*(h.split(lengths) for h in heads), strict=True)
    ]
    joined = torch.cat([a.transpose(0, 1) for a in attended]).reshape(TOKENS, 1, -1)
    return _after_attention(x, joined, weights, 1e-3)


def near(found, expected):
    """The formulas take norms in fp32."""
    assert (found - expected).abs().sum() <= 1e-5 * expected.abs().sum()


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("lengths", [(9,), (3, 3, 3), (5, 1, 3)])
@pytest.mark.parametrize("scored", [None, (1, 2, 4, 8), ()])
def test_a_layer(normed, lengths, scored, monkeypatch):
    monkeypatch.setattr(packing, "SHORT_ROW", 1)  # samples of other lengths are attended to in other calls
    x, weights, angles = layer(normed=normed)
    edges = torch.tensor([0, *lengths]).cumsum(0)
    packed = build_layout(torch.zeros(TOKENS, dtype=torch.int32), edges, torch.ones(len(lengths))).packing
    assert len(packed.buckets) == len(set(lengths))
    read = None if scored is None else torch.tensor(scored, dtype=torch.long)
    kept = x.detach().clone(), *(None if weight is None else weight.detach().clone() for weight in weights)
    buffers = Weights(*(None if weight is None else torch.ones_like(weight) for weight in weights))

    rotation = torch.complex(angles.cos(), angles.sin())
    found = Layer.apply(x, rotation, weights, buffers, Shape(GROUPS, 1e-3, None), packed, read)
    expected = by_formula(x, weights, angles, list(lengths))
    expected = expected if read is None else expected[read]
    near(found, expected)

    upstream = torch.randn_like(expected)
    present = [(weight, buffer) for weight, buffer in zip(weights, buffers, strict=True) if weight is not None]
    wanted = torch.autograd.grad(expected, [x, *(weight for weight, _ in present)], upstream)
    near(torch.autograd.grad(found, x, upstream)[0], wanted[0])
    for (_, buffer), gradient in zip(present, wanted[1:], strict=True):
        near(buffer - 1, gradient)  # added to what was there
    for before, after in zip(kept, (x, *weights), strict=True):
        assert before is None or torch.equal(before, after)
