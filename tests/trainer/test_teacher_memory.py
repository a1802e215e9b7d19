"""A teacher's model takes no memory for weights, not even while it is built: the tiers' buffers are all there is."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl.fresh_model import FreshModel, create_model
from rl.teachers.modules import TeacherModel
from rl.trainer.model import build_chunks, read_hf_config
from tests.trainer.models import save_model


class Allocations(TorchDispatchMode):
    """Bytes of all storages that operations make, temporary ones included: never less than the peak."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {tensor.untyped_storage().data_ptr() for tensor in stored(args)}
        result = func(*args, **(kwargs or {}))
        made = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in stored(result)}
        self.total += sum(nbytes for address, nbytes in made.items() if address not in given)
        return result


def stored(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm_moe_dsa"])
@pytest.mark.parametrize("streams", [False, True])
def test_building_a_teachers_model_takes_less_than_a_layer(session_worker, tmp_path, family, streams):
    if family == "qwen3":
        create_model(tmp_path, FreshModel(layers=4, hidden_size=256, intermediate_size=512, heads=4), seed=0)
    else:
        save_model(family, tmp_path, {"hidden_size": 240})
    hf, config = read_hf_config(tmp_path), session_worker.config
    with Allocations() as usual:
        built = build_chunks(hf, config)
    with Allocations() as taken:
        model = TeacherModel(hf, config, streams)
    weights = sum(parameter.nbytes for part in built for parameter in part.parameters())
    assert model.nbytes >= weights > 2**20
    assert usual.total >= weights  # what the count is worth
    assert taken.total < weights / hf.num_hidden_layers / 2


def test_parameters_of_it_are_those_of_a_model_with_weights(session_worker, model_dir):
    """Names, shapes and Megatron's marks; and tied ones are one."""
    hf = read_hf_config(model_dir)
    (built,) = build_chunks(hf, session_worker.config)
    (bare,) = build_chunks(hf, session_worker.config, stored=False)
    theirs, ours = dict(built.named_parameters()), dict(bare.named_parameters())
    assert list(theirs) == list(ours)
    for name, parameter in ours.items():
        assert (parameter.shape, parameter.dtype) == (theirs[name].shape, theirs[name].dtype)
        assert parameter.requires_grad == theirs[name].requires_grad
        assert vars(parameter) == vars(theirs[name]), name
        assert parameter.isnan().all() or name.endswith("norm.weight")  # norms begin with ones
    for theirs, ours in zip(built.buffers(), bare.buffers(), strict=True):
        assert torch.equal(theirs, ours)
