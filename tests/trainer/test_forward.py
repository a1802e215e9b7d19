import weakref

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rl.trainer import token_logprobs
from tests.trainer.common import Ratio, assert_close, capture_update, make_trajectories, make_trajectory


def reference(model_dir, trajectories, weigh=None):
    """Log-probs and entropies by Hugging Face's model, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    logprobs, entropies = [], []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids).long()
        distribution = (model(ids[None]).logits[0, :-1] / trajectory.temperature).log_softmax(-1)
        chosen = distribution.gather(1, ids[1:, None]).squeeze(1)
        logprobs.append(torch.cat([torch.zeros(1), chosen]))
        entropies.append(torch.cat([torch.zeros(1), -(distribution.exp() * distribution).sum(-1)]))
    return model, logprobs, entropies


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropies_equal_hugging_face(worker, model_dir, temperature):
    from rl.batch import build_batch
    from rl.trainer.forward import batch_logprobs

    trajectories = make_trajectories(temperature=temperature)
    _, logprobs, entropies = reference(model_dir, trajectories)
    for found, expected in zip(worker.logprobs(trajectories), logprobs, strict=True):
        assert found.dtype == np.float32
        assert np.abs(found - expected.detach().numpy()).max() <= 1e-5
    batch = build_batch(trajectories, 0)
    _, entropy = batch_logprobs(worker.loaded.modules, batch, [list(range(len(trajectories)))], worker.config)
    mask = batch.rollout.action_mask
    assert (entropy - torch.cat(entropies))[mask].abs().max() <= 1e-5
    assert not entropy[~mask].any()  # only what an algorithm can ask for is computed


def test_gradient_equals_hugging_face(worker, model_dir):
    trajectories = make_trajectories(temperature=0.8)
    result, gradient = capture_update(worker, trajectories, Ratio())
    model, logprobs, _ = reference(model_dir, trajectories)
    tokens = sum(int(t.action_mask.sum()) for t in trajectories)
    loss = -sum(
        t.reward * (lp - lp.detach()).exp()[torch.from_numpy(t.action_mask)].sum()
        for t, lp in zip(trajectories, logprobs, strict=True)
    )
    (loss / tokens).backward()
    assert result.loss == pytest.approx(loss.item() / tokens, rel=1e-5)
    assert_close(gradient, {name: p.grad for name, p in model.named_parameters()}, relative=1e-4)


def test_recompute_and_chunks_change_nothing(worker, model_dir):
    trajectories = make_trajectories()
    expected, gradient = capture_update(worker, trajectories, Ratio())
    worker.config = worker.config.model_copy(update={"recompute": True, "logits_chunk_tokens": 7})
    worker.load_model(model_dir)
    result, chunked = capture_update(worker, trajectories, Ratio())
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert_close(chunked, gradient)


def test_the_head_lets_a_chunks_logits_go_before_the_next(monkeypatch):
    seen = []

    def product(a, b):
        assert not any(logits() is not None for logits in seen)
        logits = (a @ b).float()
        seen.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(token_logprobs, "product", product)
    with torch.no_grad():
        rest = torch.zeros(6, dtype=torch.long), torch.ones(6), 0, 2, None
        token_logprobs.TokenLogprobs.apply(torch.randn(6, 4), torch.randn(5, 4), *rest)
    assert len(seen) == 3


@pytest.mark.parametrize("rope", [None, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}])
def test_llama_equals_hugging_face(worker, tmp_path, rope):
    extra = {}
    if rope:
        rope = rope | {"high_freq_factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}
        extra = {"rope_parameters": rope}
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.2,
        max_position_embeddings=256,
        **extra,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    worker.load_model(tmp_path)
    trajectories = make_trajectories(groups=2)
    _, logprobs, _ = reference(tmp_path, trajectories)
    for found, expected in zip(worker.logprobs(trajectories), logprobs, strict=True):
        assert np.abs(found - expected.detach().numpy()).max() <= 1e-5


def test_bfloat16_trains_with_fp32_main_weights(worker, model_dir):
    worker.config = worker.config.model_copy(update={"dtype": "bfloat16"})
    worker.load_model(model_dir)
    trajectories = [make_trajectory(20)]
    _, logprobs, _ = reference(model_dir, trajectories)
    assert np.abs(worker.logprobs(trajectories)[0] - logprobs[0].detach().numpy()).max() < 0.1
    losses = [worker.update(trajectories, 0, Ratio()) for _ in range(3)]
    assert {p.dtype for p in worker.loaded.model.parameters()} == {torch.bfloat16}
    assert all(np.isfinite(x.loss) and x.grad_norm > 0 for x in losses)
    # Steps of 1e-3 vanish in bf16 weights; the main weights keep them.
    assert {p.main_param.dtype for p in worker.loaded.model.parameters()} == {torch.float32}
    before, after = logprobs[0].sum(), worker.logprobs(trajectories)[0].sum()
    assert after > before
