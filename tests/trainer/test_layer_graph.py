"""Recordings of layers: padded to a few sizes, gradients added to the buffers, never mixed up. In place of CUDA graphs
actions that are simply done again, on the same tensors; on a GPU, the graphs themselves."""

import pytest
import torch
from torch import nn

from rl.trainer.config import ParallelConfig, TrainerConfig
from rl.trainer.layer_graph import LayerGraphs, StaleGraphError, padded_size

HIDDEN = 8


def repeated(action):
    """A recording of an action does nothing before it is replayed."""
    return action


class Sums(nn.Module):
    """A layer that knows the samples: a token sees those before it in its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.weight.main_grad = torch.zeros(HIDDEN, HIDDEN)
        self.shapes = set()

    def forward(self, x, cos, sin, edges, longest):
        self.shapes.add((len(x), len(edges), longest))
        sample = torch.bucketize(torch.arange(len(x)), edges[1:], right=True)
        same = (sample[:, None] == sample).tril().to(x.dtype)
        assert edges.diff().max() <= longest
        assert edges[-1] == len(x)
        y = torch.tanh(x[:, 0] @ self.weight) * cos[:, :1] + x[:, 0] * sin[:, :1]
        return (same @ y)[:, None]


def inputs(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    x = torch.randn(tokens, 1, HIDDEN, generator=generator)
    cos, sin = torch.randn(2, tokens, 4, generator=generator)
    return x, cos, sin, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def test_sizes_are_few_and_near():
    sizes = {padded_size(tokens) for tokens in range(1, 16_385)}
    assert len(sizes) <= 40
    assert all(
        tokens <= padded_size(tokens) <= max(256, tokens * 1.126 + 1, tokens + 256) for tokens in range(1, 16_385)
    )


def test_recordings_equal_the_layers_themselves():
    layer = Sums()
    graphs = LayerGraphs(layer, [layer.weight], record=repeated)
    expected = torch.zeros_like(layer.weight)
    # Sizes in turn, also a smaller one after a larger one of the same recording.
    for seed, lengths in enumerate([(200, 50), (90, 100, 3), (256,), (300, 90, 20), (1,), (200, 50)]):
        x, cos, sin, edges = inputs(lengths, seed)
        upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        plain, graphed = x.clone().requires_grad_(), x.clone().requires_grad_()
        reference = layer(plain, cos, sin, edges, 512)
        grad_x, grad_weight = torch.autograd.grad(reference, (plain, layer.weight), upstream)
        expected += grad_weight
        found = graphs(graphed, cos, sin, edges, 512)
        found.backward(upstream)
        assert torch.allclose(found, reference, atol=1e-5)
        assert torch.allclose(graphed.grad, grad_x, atol=1e-5)
        assert layer.weight.grad is None
        with torch.no_grad():
            assert torch.allclose(graphs(x, cos, sin, edges, 512), reference, atol=1e-5)
    assert torch.allclose(layer.weight.main_grad, expected, rtol=1e-4, atol=1e-4)
    assert len(graphs._recorded) == 4  # two sizes, with and without gradient


def test_inputs_without_gradient_train_the_layers_all_the_same():
    layer = Sums()
    graphs = LayerGraphs(layer, [layer.weight], record=repeated)
    x, cos, sin, edges = inputs((30,), 0)
    graphs(x, cos, sin, edges, 128).sum().backward()
    assert layer.weight.main_grad.abs().sum() > 0
    graphs.release()
    layer.weight.requires_grad_(False)
    before = layer.weight.main_grad.clone()
    graphs(x.requires_grad_(), cos, sin, edges, 128).sum().backward()
    assert torch.equal(layer.weight.main_grad, before)


@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_backward_pass_that_comes_too_late_is_refused(with_gradient):
    layer = Sums()
    graphs = LayerGraphs(layer, [layer.weight], record=repeated)
    x, cos, sin, edges = inputs((30,), 0)
    first = graphs(x.requires_grad_(), cos, sin, edges, 128)
    with torch.set_grad_enabled(with_gradient):
        graphs(x, cos, sin, edges, 128)
    with pytest.raises(StaleGraphError):
        first.sum().backward()


@pytest.mark.parametrize(
    "options",
    [{"recompute": True}, {"parallel": ParallelConfig(pipeline=2), "world_size": 2}],
)
def test_layouts_that_graphs_cannot_hold_are_refused(options):
    with pytest.raises(ValueError, match="cuda_graphs needs"):
        TrainerConfig(cuda_graphs=True, **options)
