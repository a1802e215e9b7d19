"""One product over all experts equals Megatron's loop over them, forward and backward."""

import pytest
import torch

from tests.trainer.models import save_model


@pytest.fixture
def experts(session_worker, tmp_path):
    save_model("qwen3_moe", tmp_path)
    config = session_worker.config
    session_worker.load_model(tmp_path)
    yield session_worker.loaded.model.decoder.layers[0].mlp.experts
    session_worker.config = config


def run(function, experts, x, counts, probs):
    """Output, and gradients of the input, the probabilities and the weights."""
    x, probs = (t.clone().requires_grad_() for t in (x, probs))
    output = function(x, counts, probs)
    parameters = list(experts.parameters())
    upstream = torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output).to(output.dtype)
    return [output, *torch.autograd.grad(output, (x, probs, *parameters), upstream)]


def assert_equal(found, expected, names, tolerance):
    """Tensors in turn, relative to each one's largest value; all that differ are named, with both of their sizes."""
    sizes = [
        (float((a - b).detach().abs().max()), float(b.detach().abs().max()), name)
        for a, b, name in zip(found, expected, names, strict=True)
    ]
    assert not [size for size in sizes if not size[0] <= tolerance * size[1]]


def names_of(experts):
    return ["output", "input", "probabilities", *(name for name, _ in experts.named_parameters())]


def loop(experts, x, counts, probs):
    output, _ = super(type(experts), experts).forward(x, torch.tensor(counts), probs)
    return output


def inputs(experts, counts):
    generator = torch.Generator().manual_seed(0)
    weight = experts.local_experts[0].linear_fc1.weight
    x = torch.randn(sum(counts), weight.size(1), generator=generator)
    probs = torch.rand(sum(counts), generator=generator)
    return x.to(weight), probs.to(weight.device)


@pytest.mark.parametrize("counts", [[3, 9, 1, 20], [0, 7, 0, 2], [0, 0, 0, 5]])
def test_groups_equal_the_loop(experts, counts):
    x, probs = inputs(experts, counts)
    expected = run(lambda *a: loop(experts, *a), experts, x, counts, probs)
    found = run(experts.grouped, experts, x, counts, probs)
    assert_equal(found, expected, names_of(experts), 1e-5)


@pytest.mark.gpu
@pytest.mark.timeout(240)  # the first test of a process waits for its imports, too
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("counts", [[3, 9, 1, 20], [0, 70, 0, 2]])
def test_groups_equal_the_loop_on_the_gpu_in_bfloat16(session_worker, tmp_path, counts):
    save_model("qwen3_moe", tmp_path)
    config = session_worker.config
    session_worker.config = config.model_copy(update={"dtype": "bfloat16"})
    try:
        session_worker.load_model(tmp_path)
        experts = session_worker.loaded.model.decoder.layers[0].mlp.experts
        x, probs = inputs(experts, counts)
        assert experts._can_group(x)
        expected = run(lambda *a: loop(experts, *a), experts, x, counts, probs)
        found = run(experts.grouped, experts, x, counts, probs)
        assert_equal(found, expected, names_of(experts), 0.03)
    finally:
        session_worker.config = config
