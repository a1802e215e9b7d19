"""Backward passes by hand are those of the formulas."""

import torch

from rl.trainer.by_hand import Norm, Rotation


def test_norm():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 8, dtype=torch.double).requires_grad_(), torch.randn(8, dtype=torch.double)
    weight.requires_grad_()
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight
    assert torch.allclose(Norm.apply(x, weight, 1e-3), expected)
    assert torch.autograd.gradcheck(lambda a, b: Norm.apply(a, b, 1e-3), (x, weight))


def test_rotation():
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8, dtype=torch.double).requires_grad_()
    angles = torch.randn(5, 4, dtype=torch.double).repeat(1, 2)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    expected = x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    assert torch.allclose(Rotation.apply(x, cos, sin), expected)
    assert torch.autograd.gradcheck(lambda a: Rotation.apply(a, cos, sin), (x,))
