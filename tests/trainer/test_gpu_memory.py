"""On a GPU: the memory plan against the allocator, and what offloading frees and brings back."""

import gc

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl.trainer.memory_plan import plan_memory
from rl.trainer.model import read_hf_config
from tests.trainer.common import Ratio, make_trajectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = 4096
TRAJECTORIES = [make_trajectory(1024, 0, sample, reward=float(sample)) for sample in range(4)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Large enough that weights and activations outweigh what is not in the plan."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def worker(session_worker, model_dir):
    config = session_worker.config
    changes = {"dtype": "bfloat16", "max_tokens_per_micro_batch": TOKENS}
    session_worker.config = config.model_copy(update=changes)
    session_worker._loaded = None  # or the last test's model would count
    gc.collect()
    torch.cuda.empty_cache()
    yield session_worker
    session_worker.config = config


def test_the_plan_is_what_the_device_gives(worker, model_dir):
    before = torch.cuda.memory_allocated()
    worker.load_model(model_dir)
    (plan,) = plan_memory(read_hf_config(model_dir), worker.config)
    state = plan.parameters + plan.gradients + plan.optimizer
    assert torch.cuda.memory_allocated() - before == pytest.approx(state, rel=0.02)
    worker.update(TRAJECTORIES, 0, Ratio())  # compiles
    torch.cuda.reset_peak_memory_stats()
    worker.update(TRAJECTORIES, 0, Ratio())
    peak = torch.cuda.max_memory_allocated() - before
    assert state < peak < 1.1 * plan.total


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("graphs", [False, True])
def test_offloading_frees_the_device_and_changes_nothing(worker, model_dir, graphs):
    worker.config = worker.config.model_copy(
        update={"cuda_graphs": graphs, "layer_kernels": "triton" if graphs else "compiled"}
    )
    losses = []
    before = torch.cuda.memory_reserved()
    for away in (False, True):
        worker.load_model(model_dir)
        worker.update(TRAJECTORIES, 0, Ratio())
        if away:
            held = torch.cuda.memory_allocated()
            gained = worker.offload()
            assert held - torch.cuda.memory_allocated() >= gained > 0
            assert torch.cuda.memory_reserved() - before < 0.2 * gained  # the recordings' memory is gone, too
            worker.onload()
        results = [worker.update(TRAJECTORIES, 0, Ratio()) for _ in range(2)]
        losses.append([(result.loss, result.grad_norm) for result in results])
    # Attention adds its gradients up in any order.
    for first, second in zip(*losses, strict=True):
        assert second == pytest.approx(first, rel=0.02)
