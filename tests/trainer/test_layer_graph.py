"""Recordings of layers: padded to a few sizes, gradients added to the buffers, never mixed up. In place of CUDA graphs
actions that are simply done again, on the same tensors; on a GPU, the graphs themselves."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rl.trainer.config import ParallelConfig, TrainerConfig
from rl.trainer.layer_graph import LayerGraphs, StaleGraphError, padded_size
from rl.trainer.layer_passes import AutogradPasses
from rl.trainer.packing import build_layout
from tests.trainer.common import Ratio, assert_close, capture_update, make_trajectories

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

    def forward(self, x, cos, sin, edges, longest, parameters=None):
        (weight,) = [self.weight] if parameters is None else parameters
        self.shapes.add((len(x), len(edges), longest))
        sample = torch.bucketize(torch.arange(len(x)), edges[1:], right=True)
        same = (sample[:, None] == sample).tril().to(x.dtype)
        assert edges.diff().max() <= longest
        assert edges[-1] == len(x)
        y = torch.tanh(x[:, 0] @ weight) * cos[:, :1] + x[:, 0] * sin[:, :1]
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
    graphs = LayerGraphs(AutogradPasses(layer), [layer.weight], record=repeated)
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
    graphs = LayerGraphs(AutogradPasses(layer), [layer.weight], record=repeated)
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
    graphs = LayerGraphs(AutogradPasses(layer), [layer.weight], record=repeated)
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


def attention_of_each_sample(query, key, value, query_edges, key_edges, longest_query, longest_key, scale):
    """What ``flash_attention`` computes, by a loop."""
    outputs = []
    for begin, end in itertools.pairwise(query_edges.tolist()):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(found[0].transpose(0, 1))
    return torch.cat(outputs)


def save_llama(directory):
    """Without norms of the queries and keys."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.15,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def forward_of_each_sample(query, key, value, edges, longest, scale):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        output = attention_of_each_sample(*leaves, edges, edges, longest, longest, scale)
    return output.detach(), (output, *leaves)


def backward_of_each_sample(gradient, query, key, value, output, kept, edges, longest, scale):
    return torch.autograd.grad(kept[0], kept[1:], gradient)


@pytest.mark.parametrize(
    "options",
    [
        {"layer_kernels": "compiled", "layers_per_graph": 1},
        {"layer_kernels": "compiled", "layers_per_graph": 3},
        {"layer_kernels": "triton"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_updates_through_recordings_are_the_same(worker, model_dir, tmp_path, monkeypatch, options, family):
    if family == "llama":
        model_dir = save_llama(tmp_path)
        worker.load_model(model_dir)
    trajectories = make_trajectories()
    expected, gradient = capture_update(worker, trajectories, Ratio())
    logprobs = worker.logprobs(trajectories)
    changes = {"cuda_graphs": True, "max_tokens_per_micro_batch": 60}
    worker.config = worker.config.model_copy(update=changes | options)
    worker.load_model(model_dir)
    monkeypatch.setattr("rl.trainer.layer_passes.flash_forward", forward_of_each_sample)
    monkeypatch.setattr("rl.trainer.layer_passes.flash_backward", backward_of_each_sample)
    monkeypatch.setattr("rl.trainer.dense_layer.flash_attention", attention_of_each_sample)
    monkeypatch.setattr("rl.trainer.forward.build_layout", functools.partial(build_layout_flash, build_layout))
    captain, *others = worker.loaded.model.decoder.layers
    captain._graphs._record = repeated
    assert all(layer._graphs is None for layer in others)
    result, found = capture_update(worker, trajectories, Ratio())
    assert result.micro_batches > 2
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert_close(found, gradient)
    for a, b in zip(worker.logprobs(trajectories), logprobs, strict=True):
        assert abs(a - b).max() < 1e-4
    assert captain._graphs.passes >= 3 * result.micro_batches
    worker.offload()
    assert not captain._graphs._recorded


def build_layout_flash(original, *arguments, **options):
    return original(*arguments, **(options | {"flash": True}))


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernels", ["triton", "compiled"])
def test_cuda_graphs_are_as_exact_as_the_layers_on_the_gpu(worker, model_dir, kernels):
    """Other addresses, tokens padded, other orders of sums: as near to fp32 as the layers themselves in bfloat16. Also
    after offloading."""
    trajectories = make_trajectories()

    def trained(dtype, graphs):
        changes = {
            "dtype": dtype,
            "cuda_graphs": graphs,
            "layer_kernels": kernels,
            "max_tokens_per_micro_batch": 100,
        }
        worker.config = worker.config.model_copy(update=changes)
        worker.load_model(model_dir)
        steps = [worker.update(trajectories, 0, Ratio()) for _ in range(2)]
        worker.offload()
        worker.onload()
        steps.append(worker.update(trajectories, 0, Ratio()))
        captain = worker.loaded.model.decoder.layers[0]
        assert bool(captain._graphs and captain._graphs._recorded) == graphs
        figures = [figure for step in steps for figure in (step.loss, step.grad_norm)]
        return figures, np.concatenate(worker.logprobs(trajectories))

    _, exact_logprobs = trained("float32", False)
    plain, plain_logprobs = trained("bfloat16", False)
    graphed, graphed_logprobs = trained("bfloat16", True)
    assert graphed == pytest.approx(plain, rel=0.02)
    rounding = np.abs(plain_logprobs - exact_logprobs)
    found = np.abs(graphed_logprobs - exact_logprobs)
    assert found.mean() < 1.3 * rounding.mean()
    assert found.max() < 2 * rounding.max()
