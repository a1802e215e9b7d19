"""Sparse attention with shared indexers, and how the indexers are trained."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl.trainer import chosen_attention
from rl.trainer.chosen_attention import ChosenAttention
from rl.trainer.families.base import UnsupportedModelError
from rl.trainer.indexer import Indexer
from rl.trainer.indexer_loss import indexer_kl, summed_attention
from tests.trainer.common import Ratio, make_trajectories, make_trajectory
from tests.trainer.models import hf_logprobs, load_hf, save_model

TOP_K = 6  # of the tiny model, whose layers 0, 1 and 3 have indexers


@pytest.fixture(scope="module")
def dsa_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dsa")
    save_model("glm_moe_dsa", directory)
    return directory


@pytest.fixture
def dsa(session_worker, dsa_dir):
    config = session_worker.config
    session_worker.load_model(dsa_dir)
    yield session_worker
    session_worker.config = config


def layers(worker):
    return worker.loaded.model.decoder.layers


def test_up_to_k_positions_are_dense(dsa):
    short, long = [make_trajectory(TOP_K)], [make_trajectory(30)]
    before = dsa.logprobs(short)[0], dsa.logprobs(long)[0]
    with torch.no_grad():
        for layer in (0, 1, 3):
            layers(dsa)[layer].self_attention.indexer.wk.weight.neg_()
    after = dsa.logprobs(short)[0], dsa.logprobs(long)[0]
    assert (before[0] == after[0]).all()
    # The same positions, summed in another order.
    assert np.abs(before[1][:TOP_K] - after[1][:TOP_K]).max() <= 1e-5
    assert np.abs(before[1] - after[1]).max() > 1e-3


def test_k_beyond_the_length_equals_dense_latent_attention(dsa, dsa_dir, monkeypatch):
    trajectories = make_trajectories(groups=1)
    monkeypatch.setattr(Indexer, "select", lambda *arguments: None)
    dense = dsa.logprobs(trajectories)
    monkeypatch.undo()
    sparse = dsa.logprobs(trajectories)
    for layer in (0, 1, 3):
        indexer = layers(dsa)[layer].self_attention.indexer
        indexer.shape = dataclasses.replace(indexer.shape, top_k=64)
    model = load_hf(dsa_dir)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 64
    reference = [logprobs.detach().numpy() for logprobs in hf_logprobs(model, trajectories)]
    assert max(np.abs(a - b).max() for a, b in zip(sparse, dense, strict=True)) > 1e-3
    for found, expected, theirs in zip(dsa.logprobs(trajectories), dense, reference, strict=True):
        assert np.abs(found - expected).max() <= 1e-6
        assert np.abs(found - theirs).max() <= 1e-5


@pytest.mark.parametrize("recompute", [False, True])
def test_shared_layers_attend_to_what_the_computing_layer_chose(dsa, dsa_dir, monkeypatch, recompute):
    from rl.trainer import latent_attention

    chosen_by_layer, attend, current = [], latent_attention.attend_to_chosen, []

    def watch(query, key, bucket, chosen, value, scale):
        chosen_by_layer.append((current[-1], chosen))
        return attend(query, key, bucket, chosen, value, scale)

    dsa.config = dsa.config.model_copy(update={"recompute": recompute})
    dsa.load_model(dsa_dir)
    monkeypatch.setattr(latent_attention, "attend_to_chosen", watch)
    for number, layer in enumerate(layers(dsa)):
        layer.self_attention.register_forward_pre_hook(lambda *_, number=number: current.append(number))
    dsa.update([make_trajectory(30)], 0, Ratio())
    by_layer = {}
    for layer, chosen in chosen_by_layer:
        by_layer.setdefault(layer, []).append(chosen)
    assert len(by_layer[0]) == (3 if recompute else 2)  # old log-probs, the pass, and its recomputation
    for layer, source in {2: 1, 4: 3, 5: 3}.items():
        for shared, own in zip(by_layer[layer], by_layer[source], strict=True):
            assert torch.equal(shared, own)
    assert not torch.equal(by_layer[0][0], by_layer[1][0])


def test_rl_leaves_the_indexers_alone(dsa):
    before = {name: tensor.clone() for name, tensor in dsa.export_weights()}
    dsa.update(make_trajectories(groups=2), 0, Ratio())
    for name, tensor in dsa.export_weights():
        frozen = ".indexer." in name or name.endswith("correction_bias")
        assert torch.equal(tensor, before[name]) == frozen, name


def test_kl_and_its_gradient_are_those_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 5, generator=generator).requires_grad_()
    layer_targets = torch.rand(3, 2, 5, 5, generator=generator)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None]
    found = indexer_kl(layer_targets.sum(0), scores, mask)
    target = layer_targets.sum(0) * mask
    target = target / target.sum(-1, keepdim=True)
    for row in range(2):
        for t in range(5):
            p, q = target[row, t, : t + 1], scores[row, t, : t + 1].softmax(-1)
            assert found[row, t].item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)
    assert (found[:, 0].abs() < 1e-6).all()  # one position: nothing to choose

    (together,) = torch.autograd.grad(found.sum(), scores)
    layer_targets = layer_targets * mask
    layer_targets = layer_targets / layer_targets.sum(-1, keepdim=True)
    separate = torch.stack([indexer_kl(p, scores, mask).sum() for p in layer_targets]).mean()
    (mean,) = torch.autograd.grad(separate, scores)
    (shared,) = torch.autograd.grad(indexer_kl(layer_targets.mean(0), scores, mask).sum(), scores)
    assert torch.allclose(shared, mean, atol=1e-6)
    assert float(separate) > float(indexer_kl(layer_targets.mean(0), scores, mask).sum()) + 1e-3
    assert together.shape == scores.shape


def test_summed_attention_is_the_softmax_over_the_mask():
    query, key = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 4, 8)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1]]).bool()[None]
    found = summed_attention(query, key, mask, 0.3)
    products = (query @ key.transpose(-1, -2) * 0.3).masked_fill(~mask, -torch.inf)
    assert torch.allclose(found, products.softmax(-1).sum(1), atol=1e-6)
    assert torch.allclose(found.sum(-1), torch.full((1, 4), 3.0))


@pytest.mark.parametrize("phase", ["indexer_dense", "indexer_sparse"])
def test_training_the_indexers_lowers_their_kl_and_touches_nothing_else(dsa, dsa_dir, phase):
    dsa.config = dsa.config.model_copy(update={"trained": phase, "recompute": True})
    dsa.load_model(dsa_dir)
    before = {name: tensor.clone() for name, tensor in dsa.export_weights()}
    trajectories = make_trajectories(groups=2)
    results = [dsa.update_indexer(trajectories, 0) for _ in range(8)]
    assert results[0].metrics.keys() == {f"indexer_kl/layer_{layer}" for layer in (0, 1, 3)}
    assert results[0].tokens == sum(len(t) for t in trajectories)
    assert results[-1].loss < 0.9 * results[0].loss
    for name, tensor in dsa.export_weights():
        assert torch.equal(tensor, before[name]) == (".indexer." not in name), name


def test_indexer_gradient_does_not_depend_on_micro_batches(dsa, dsa_dir):
    dsa.config = dsa.config.model_copy(update={"trained": "indexer_dense"})
    results = []
    for budget in (16_384, 30):
        dsa.config = dsa.config.model_copy(update={"max_tokens_per_micro_batch": budget})
        dsa.load_model(dsa_dir)
        results.append(dsa.update_indexer(make_trajectories(groups=2), 0))
    assert results[0].micro_batches < results[1].micro_batches
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-5)
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)


def test_models_without_indexers_and_policies_are_refused(session_worker, model_dir, dsa):
    with pytest.raises(ValueError, match="indexer_dense or indexer_sparse"):
        dsa.update_indexer([make_trajectory(9)], 0)
    dsa.config = dsa.config.model_copy(update={"trained": "indexer_dense"})
    with pytest.raises(UnsupportedModelError, match="the model has no indexer"):
        dsa.load_model(model_dir)


@pytest.mark.parametrize("chunk_bytes", [chosen_attention.CHUNK_BYTES, 1])
def test_attention_to_the_chosen_equals_the_masked_one(monkeypatch, chunk_bytes):
    monkeypatch.setattr(chosen_attention, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    rows, heads, length, dim, value, top_k = 2, 3, 23, 10, 6, 5
    query = torch.randn(rows, heads, length, dim, generator=generator).requires_grad_()
    key = torch.randn(rows, length, dim, generator=generator).requires_grad_()
    chosen = torch.rand(rows, length, length, generator=generator).topk(top_k).indices
    chosen[..., 0] = torch.arange(length)  # itself
    chosen[..., 1:] = torch.where(chosen[..., 1:] == chosen[..., :1], (chosen[..., 1:] + 1) % length, chosen[..., 1:])
    visible = chosen <= torch.arange(length)[:, None]
    visible &= (chosen[..., None] == chosen[..., None, :]).tril(-1).sum(-1) == 0  # once each
    found = ChosenAttention.apply(query, key, chosen, visible, value, 0.4)
    mask = torch.zeros(rows, length, length, dtype=torch.int).scatter_add_(-1, chosen, visible.int()) > 0
    keys = key[:, None].expand(-1, heads, -1, -1)
    expected = F.scaled_dot_product_attention(query, keys, keys[..., :value], attn_mask=mask[:, None], scale=0.4)
    assert torch.allclose(found, expected, atol=1e-5)
    upstream = torch.randn(expected.shape, generator=generator)
    for a, b in zip(
        torch.autograd.grad(found, (query, key), upstream),
        torch.autograd.grad(expected, (query, key), upstream),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_attention_to_the_chosen_in_bfloat16_does_not_round_its_scores():
    """Two positions whose products with the query, 257 and 256, are one number in bfloat16."""
    query = torch.tensor([[[[16.0, 1.0]]]], dtype=torch.bfloat16)
    key = torch.tensor([[[16.0, 1.0], [16.0, 0.0]]], dtype=torch.bfloat16)
    chosen = torch.tensor([[[0, 1]]])
    output = ChosenAttention.apply(query, key, chosen, torch.ones_like(chosen, dtype=torch.bool), 2, 1.0)
    assert output.flatten()[1].item() == pytest.approx(1 / (1 + np.exp(-1)), abs=0.005)


def test_attention_to_the_chosen_needs_memory_for_the_chosen_alone():
    """What is kept for the backward pass grows with the length, not with its square."""
    kept = []
    for length in (64, 256):
        held = {}

        def keep(tensor, held=held):
            held[tensor.data_ptr()] = tensor.nbytes
            return tensor

        query, key = torch.randn(1, 2, length, 8).requires_grad_(), torch.randn(1, length, 8)
        chosen = torch.arange(4).expand(1, length, 4)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            ChosenAttention.apply(query, key, chosen, torch.ones_like(chosen, dtype=torch.bool), 4, 1.0)
        kept.append(sum(held.values()))
    assert kept[1] <= 4.1 * kept[0]
