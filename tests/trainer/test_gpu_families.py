"""Families on CUDA: fp32 gives what Hugging Face gives there, bf16 trains."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version

from rl.trainer.chosen_attention import ChosenAttention
from tests.trainer.common import Ratio, make_trajectories
from tests.trainer.models import MODELS, hf_logprobs, load_hf, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("uncompiled"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def worker(session_worker):
    config = session_worker.config
    yield session_worker
    session_worker.config = config


@pytest.mark.parametrize("name", [name for name in MODELS if name != "glm_moe_dsa_pairs"])
def test_families_on_cuda(worker, tmp_path, name):
    # Before 5.19 Hugging Face's indexer rotated the two halves of a head instead of pairs: where it has nothing to
    # choose, that makes no difference.
    changes = {} if Version(transformers.__version__) >= Version("5.19") else {"index_topk": 64}
    save_model(name, tmp_path, changes if name == "glm_moe_dsa" else {})
    worker.load_model(tmp_path)
    trajectories = make_trajectories(groups=2)
    expected = hf_logprobs(load_hf(tmp_path), trajectories)
    for found, logprobs in zip(worker.logprobs(trajectories), expected, strict=True):
        assert np.abs(found - logprobs.detach().numpy()).max() <= 1e-4

    worker.config = worker.config.model_copy(update={"dtype": "bfloat16"})
    worker.load_model(tmp_path)
    before = dict(worker.export_weights())
    results = [worker.update(trajectories, 0, Ratio()) for _ in range(3)]
    assert all(np.isfinite(result.loss) and result.grad_norm > 0 for result in results)
    kept = [name for name, tensor in before.items() if name.endswith("correction_bias")]
    assert all(before[name].dtype == torch.float32 for name in kept)


def test_indexers_learn_on_cuda_in_bfloat16(worker, tmp_path):
    save_model("glm_moe_dsa", tmp_path)
    worker.config = worker.config.model_copy(update={"dtype": "bfloat16", "trained": "indexer_sparse"})
    worker.load_model(tmp_path)
    results = [worker.update_indexer(make_trajectories(groups=2), 0) for _ in range(8)]
    assert results[-1].loss < results[0].loss


def test_flash_attention_in_bfloat16_is_near_fp32(worker, model_dir):
    trajectories = make_trajectories(groups=2)
    worker.load_model(model_dir)
    expected = np.concatenate(worker.logprobs(trajectories))
    worker.config = worker.config.model_copy(update={"dtype": "bfloat16"})
    worker.load_model(model_dir)
    found = np.concatenate(worker.logprobs(trajectories))
    assert 0 < np.abs(found - expected).mean() < 0.02


def test_attention_to_the_chosen_on_cuda_in_bfloat16():
    """Against the masked form in fp32, at sizes of which some queries at a time are computed."""
    torch.manual_seed(0)
    heads, length, dim, value, top_k = 16, 1024, 96, 64, 128
    query = torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    key = torch.randn(1, length, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    allowed = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    chosen = torch.rand(1, length, length, device="cuda").masked_fill_(~allowed, -1.0).topk(top_k).indices
    visible = chosen <= torch.arange(length, device="cuda")[:, None]
    found = ChosenAttention.apply(query, key, chosen, visible, value, 0.1)
    mask = torch.zeros(1, length, length, dtype=torch.bool, device="cuda").scatter_(-1, chosen, True) & allowed
    keys = key.float()[:, None].expand(-1, heads, -1, -1)
    expected = F.scaled_dot_product_attention(
        query.float(), keys, keys[..., :value], attn_mask=mask[:, None], scale=0.1
    )
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, (query, key), upstream.to(found.dtype))
    references = torch.autograd.grad(expected, (query, key), upstream)
    for a, b in zip((found, *gradients), (expected, *references), strict=True):
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
