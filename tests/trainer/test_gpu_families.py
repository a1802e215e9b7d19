"""Families on CUDA: fp32 gives what Hugging Face gives there, bf16 trains."""

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

from tests.trainer.common import Ratio, make_trajectories
from tests.trainer.models import MODELS, hf_logprobs, load_hf, save_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def worker(session_worker):
    config = session_worker.config
    yield session_worker
    session_worker.config = config


@pytest.mark.parametrize("name", MODELS)
def test_families_on_cuda(worker, tmp_path, name):
    save_model(name, tmp_path)
    worker.load_model(tmp_path)
    trajectories = make_trajectories(groups=2)
    # Before, its indexer rotated the two halves of a head instead of pairs.
    if name != "glm_moe_dsa" or Version(transformers.__version__) >= Version("5.19"):
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
