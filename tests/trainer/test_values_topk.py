"""Values and top-k log-probs against Hugging Face's hidden states and logits."""

import dataclasses

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from rl.batch import build_batch
from tests.trainer.common import assert_close, make_trajectories


def scored_batch(trajectories):
    batch = build_batch(trajectories, 0)
    return dataclasses.replace(batch, scored=torch.ones_like(batch.scored))


@pytest.fixture
def trajectories():
    return make_trajectories(groups=2, temperature=0.7)


def build_value_module(worker, model_dir, train_attention=True):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from rl.trainer import convert
    from rl.trainer.model import read_hf_config
    from rl.trainer.value import build_value_model

    hf = read_hf_config(model_dir)
    model = build_value_model(hf, worker.config, train_attention)
    convert.load_hf(model, hf, model_dir)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


@pytest.fixture
def value_module(worker, model_dir):
    return build_value_module(worker, model_dir)


def test_a_value_model_starts_from_a_policy_with_zeros(value_module, worker, trajectories, model_dir):
    from rl.trainer import convert
    from rl.trainer.forward import batch_values

    batch = scored_batch(trajectories)
    values = batch_values([value_module], batch, [[0, 1], [2, 3, 4, 5]], worker.config)
    assert values.shape == batch.token_ids.shape
    assert not values.any()
    exported = {name for name, _ in convert.export_weights([value_module.module], worker.loaded.hf)}
    assert "value_head.weight" in exported
    assert "lm_head.weight" not in exported


def test_values_and_their_gradient_equal_hugging_face(value_module, worker, trajectories, model_dir):
    from rl.trainer.forward import batch_values, run_value_passes

    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        value_module.module.value_head.weight.copy_(head)
    trunk, head = AutoModel.from_pretrained(model_dir, dtype=torch.float32), head.requires_grad_()
    expected = []
    for trajectory in trajectories:
        hidden = trunk(torch.from_numpy(trajectory.token_ids).long()[None]).last_hidden_state[0]
        expected.append(torch.cat([torch.zeros(1), hidden[:-1] @ head[0]]))
    batch, micro_batches = scored_batch(trajectories), [[0, 3], [1, 2, 4, 5], []]
    values = batch_values([value_module], batch, micro_batches, worker.config)
    # Relative to the largest value, which is about 12.
    assert (values - torch.cat(expected)).abs().max() <= 1e-5 * max(1.0, float(values.abs().max()))

    value_module.zero_grad_buffer()
    run_value_passes([value_module], batch, micro_batches, worker.config, lambda _, v: (v**2).sum(), backward=True)
    torch.cat(expected).square().sum().backward()
    for found, grad in (
        (value_module.module.value_head.weight.main_grad, head.grad),
        (
            value_module.module.decoder.layers[0].mlp.linear_fc2.weight.main_grad,
            trunk.layers[0].mlp.down_proj.weight.grad,
        ),
    ):
        assert (found.cpu() - grad).abs().max() <= 1e-4 * grad.abs().max()


def test_a_frozen_attention_changes_no_other_gradient(worker, trajectories, model_dir):
    """Whose layers are computed in another way: of one by hand all parameters are trained."""
    from rl.trainer.forward import run_value_passes

    batch, gradients = scored_batch(trajectories), []
    for train_attention in (True, False):
        module = build_value_module(worker, model_dir, train_attention)
        with torch.no_grad():
            module.module.value_head.weight.copy_(torch.linspace(-1, 1, 64)[None])
        module.zero_grad_buffer()
        run_value_passes([module], batch, [[0, 3], [1, 2, 4, 5], []], worker.config, lambda _, v: (v**2).sum(), True)
        trained = [(name, p) for name, p in module.module.named_parameters() if p.requires_grad]
        gradients.append({name: p.main_grad.clone() for name, p in trained})
    whole, part = gradients
    assert 0 < len(part) < len(whole)
    assert_close(part, {name: whole[name] for name in part}, relative=1e-4)


def test_a_saved_value_model_keeps_its_head(value_module, worker, model_dir, tmp_path):
    from rl.trainer import convert
    from rl.trainer.value import build_value_model

    with torch.no_grad():
        value_module.module.value_head.weight.normal_()
    weights = convert.export_weights([value_module.module], worker.loaded.hf)
    convert.save_hf(weights, model_dir, tmp_path / "value", "float32")
    again = build_value_model(worker.loaded.hf, worker.config, train_attention=False)
    convert.load_hf(again, worker.loaded.hf, tmp_path / "value")
    assert torch.equal(again.value_head.weight, value_module.module.value_head.weight)
    frozen = {name for name, parameter in again.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in again.named_parameters() if ".self_attention." in name}


def test_topk_equals_hugging_face(worker, trajectories, model_dir):
    from rl.trainer.forward import batch_topk

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    logprobs, ids = batch_topk(worker.loaded.modules, scored_batch(trajectories), [list(range(6))], worker.config, 5)
    start = 0
    for trajectory in trajectories:
        token_ids = torch.from_numpy(trajectory.token_ids).long()
        with torch.no_grad():
            distribution = (model(token_ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        best = distribution.topk(5)
        part = slice(start + 1, start + len(trajectory))
        assert (logprobs[part] - best.values).abs().max() <= 1e-5
        assert (distribution.gather(1, ids[part].long()) - best.values).abs().max() <= 1e-5
        assert not logprobs[start].any()
        start += len(trajectory)
    with pytest.raises(ValueError, match="top-k of 0"):
        batch_topk(worker.loaded.modules, scored_batch(trajectories), [[0]], worker.config, 0)
