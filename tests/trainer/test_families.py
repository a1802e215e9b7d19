"""Every family of models computes what Hugging Face's own class of it does, and goes there and back bit for bit."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.trainer import specs
from rl.trainer.convert import WeightMismatchError
from rl.trainer.families.base import UnsupportedModelError
from rl.trainer.model import read_hf_config
from tests.trainer.common import Ratio, assert_close, capture_update, make_trajectories
from tests.trainer.models import MODELS, hf_gradient, hf_logprobs, load_hf, save_model


@pytest.fixture(params=MODELS)
def family(request, tmp_path, session_worker):
    """A directory of the family's model, which the worker has loaded."""
    save_model(request.param, tmp_path / "hf")
    session_worker.load_model(tmp_path / "hf")
    return tmp_path / "hf"


def test_family_equals_hugging_face(family, session_worker, tmp_path):
    worker, trajectories = session_worker, make_trajectories(groups=2, temperature=0.8)
    original = load_file(family / "model.safetensors")
    exported = {name: tensor.clone() for name, tensor in worker.export_weights()}
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())

    model = load_hf(family)
    expected = hf_logprobs(model, trajectories)
    for found, logprobs in zip(worker.logprobs(trajectories), expected, strict=True):
        assert np.abs(found - logprobs.detach().numpy()).max() <= 1e-5

    result, gradient = capture_update(worker, trajectories, Ratio())
    tokens = sum(int(t.action_mask.sum()) for t in trajectories)
    loss = -sum(
        t.reward * (lp - lp.detach()).exp()[torch.from_numpy(t.action_mask)].sum()
        for t, lp in zip(trajectories, expected, strict=True)
    )
    (loss / tokens).backward()
    assert result.loss == pytest.approx(loss.item() / tokens, rel=1e-5)
    reference = hf_gradient(model, tmp_path / "gradient")
    assert_close({name: gradient[name] for name in reference}, reference, relative=1e-4)


def test_layers_that_predict_further_ahead_are_kept_as_they_are(session_worker, tmp_path):
    save_model("glm4_moe", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    ahead = {"model.layers.4.eh_proj.weight": torch.randn(48, 96), "model.layers.4.enorm.weight": torch.randn(48)}
    save_file(load_file(path) | ahead, path, metadata={"format": "pt"})
    session_worker.load_model(tmp_path / "hf")
    session_worker.save_hf(tmp_path / "saved")
    saved, original = load_file(tmp_path / "saved" / "model.safetensors"), load_file(path)
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in original.items())
    published = {name for bucket in session_worker.weight_buckets(2**20) for name in bucket.shapes}
    assert published == original.keys()

    save_file(original | {"model.layers.3.enorm.weight": torch.ones(48)}, path, metadata={"format": "pt"})
    with pytest.raises(WeightMismatchError, match=r"unknown tensors \['model.layers.3.enorm.weight'\]"):
        session_worker.load_model(tmp_path / "hf")


@pytest.mark.parametrize(("installed", "provider"), [(True, "TESpecProvider"), (False, "LocalSpecProvider")])
def test_linear_layers_come_from_transformer_engine_where_it_is_installed(monkeypatch, installed, provider):
    monkeypatch.setattr(specs, "HAVE_TE", installed)
    assert type(specs.backend()).__name__ == provider


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 2, "topk_group": 1}, "n_group"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_routers_that_are_not_computed_are_refused(tmp_path, changes, message):
    save_model("glm4_moe", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedModelError, match=message):
        read_hf_config(tmp_path)
