import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.trainer import convert
from rl.trainer.convert import WeightMismatchError
from rl.trainer.families.base import UnsupportedModelError
from rl.trainer.model import read_hf_config
from tests.trainer.common import make_trajectories


@pytest.fixture
def damaged(model_dir, tmp_path):
    """A copy of the model to edit: its directory, and a function that saves changed tensors."""
    directory = tmp_path / "damaged"
    shutil.copytree(model_dir, directory)
    tensors = load_file(directory / "model.safetensors")

    def save():
        save_file(tensors, directory / "model.safetensors")
        return directory

    return tensors, save


def test_round_trip_is_bit_exact(worker, model_dir, tmp_path, monkeypatch):
    original = load_file(model_dir / "model.safetensors")
    exported = dict(worker.export_weights())
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())

    worker.save_hf(tmp_path / "one")
    saved = load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in original.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "one").chat_template is not None

    monkeypatch.setattr(convert, "SHARD_BYTES", 50_000)
    worker.save_hf(tmp_path / "many")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == original.keys()
    assert len(set(index["weight_map"].values())) > 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in original.items())
    before = worker.logprobs(make_trajectories(groups=1))
    worker.load_model(tmp_path / "many")
    assert all((a == b).all() for a, b in zip(before, worker.logprobs(make_trajectories(groups=1)), strict=True))


def test_save_does_not_overwrite(worker, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there"):
        worker.save_hf(tmp_path / "there")
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_mismatches_name_the_tensor_and_both_shapes(worker, damaged):
    tensors, save = damaged
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    with pytest.raises(WeightMismatchError, match=rf"{name} has shape \[31, 64\], the config asks for \[32, 64\]"):
        worker.load_model(save())
    del tensors[name]
    tensors["model.extra.weight"] = torch.zeros(1)
    with pytest.raises(
        WeightMismatchError, match=rf"missing tensors \['{name}'\].*unknown tensors.*model.extra.weight"
    ):
        worker.load_model(save())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_unsupported_models_are_refused_by_name(damaged, changes, message):
    _, save = damaged
    path = save() / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedModelError, match=message):
        read_hf_config(path.parent)
