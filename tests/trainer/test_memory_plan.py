"""The plan against what is allocated."""

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config

from rl.batch import build_batch, take_samples
from rl.trainer.config import ParallelConfig, TrainerConfig
from rl.trainer.cost import balance_length
from rl.trainer.forward import lay_out
from rl.trainer.memory_plan import ACTIVATION_TOLERANCE, MemoryPlanError, check_fits, describe, plan_memory
from rl.trainer.model import DTYPES, read_hf_config
from rl.trainer.token_logprobs import TokenLogprobs
from tests.trainer.common import make_trajectory
from tests.trainer.models import MODELS, save_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_exact(worker, model_dir, dtype):
    worker.config = worker.config.model_copy(update={"dtype": dtype})
    worker.load_model(model_dir)
    (plan,) = plan_memory(read_hf_config(model_dir), worker.config)
    buffers, shards = worker.loaded.module.buffers, worker.loaded.optimizer.shards
    assert plan.parameters == sum(buffer.param_data.nbytes for buffer in buffers)
    assert plan.gradients == sum(buffer.grad_data.nbytes for buffer in buffers)
    owned = [shard.main for shard in shards if shard.main.data_ptr() != shard.model.data_ptr()]
    moments = [shard.state[name] for shard in shards for name in ("exp_avg", "exp_avg_sq")]
    assert plan.optimizer == sum(tensor.nbytes for tensor in (*owned, *moments))


def kept_bytes(worker, tokens):
    """What one sample's forward pass keeps for its backward pass."""
    batch = build_batch([make_trajectory(tokens)], 0)
    layout = lay_out(take_samples(batch, [0]), worker.config, worker.loaded.model.attends_in_rows)
    parameters = {p.untyped_storage().data_ptr() for p in worker.loaded.model.parameters()}
    held = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        worker.loaded.module(layout.token_ids, None, None, packed_seq_params=layout.packing)
    return sum(size for _, size in held.values())


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_near(worker, model_dir, recompute):
    tokens = 512
    config = worker.config.model_copy(update={"recompute": recompute, "max_tokens_per_micro_batch": tokens})
    worker.config = config
    worker.load_model(model_dir)
    measured = kept_bytes(worker, tokens)
    (plan,) = plan_memory(read_hf_config(model_dir), config)
    if recompute:  # the plan has one layer's activations beside what is kept
        assert plan.activations > measured
        (whole,) = plan_memory(read_hf_config(model_dir), config.model_copy(update={"recompute": False}))
        measured += whole.activations / 4
    assert plan.activations == pytest.approx(measured, rel=ACTIVATION_TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_activations_of_every_family_are_near(worker, tmp_path, name):
    tokens = 256
    save_model(name, tmp_path)
    worker.config = worker.config.model_copy(update={"max_tokens_per_micro_batch": tokens})
    worker.load_model(tmp_path)
    (plan,) = plan_memory(read_hf_config(tmp_path), worker.config)
    assert plan.activations == pytest.approx(kept_bytes(worker, tokens), rel=ACTIVATION_TOLERANCE)


def peak_bytes(run):
    """The most that the CPU's allocator has given at a time while this ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the plan is of the GPU's head")
@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_is_exact(dtype, chunks):
    hidden, vocabulary, chunk = 16, 4096, 256
    hf = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=hidden,
        vocab_size=vocabulary,
    )
    config = TrainerConfig(dtype=dtype, logits_chunk_tokens=chunk, max_tokens_per_micro_batch=chunks * chunk)
    (plan,) = plan_memory(hf, config)
    states = torch.randn(chunks * chunk, hidden, dtype=DTYPES[dtype]).requires_grad_()
    weight, buffer = torch.randn(vocabulary, hidden, dtype=DTYPES[dtype]), torch.zeros(vocabulary, hidden)
    targets, ones = torch.zeros(len(states), dtype=torch.long), torch.ones(len(states))

    def step():
        logprobs, _ = TokenLogprobs.apply(states, weight, targets, ones, 0, chunk, None, buffer)
        logprobs.sum().backward()

    assert peak_bytes(step) == pytest.approx(plan.head, rel=0.03)


BIG = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    tie_word_embeddings=False,
)


def total(world_size=1, recompute=False, **parallel):
    config = TrainerConfig(
        world_size=world_size, parallel=ParallelConfig(**parallel), dtype="bfloat16", recompute=recompute
    )
    return plan_memory(BIG, config)


def test_layouts_share_the_load():
    (alone,) = total()
    (half,) = total(2, tensor=2)
    assert half.parameters == pytest.approx(alone.parameters / 2, rel=1e-3)
    (spread,) = total(2)
    assert (spread.parameters, spread.gradients) == (alone.parameters, alone.gradients)
    assert spread.optimizer == pytest.approx(alone.optimizer / 2, rel=1e-3)
    first, last = total(2, pipeline=2)
    assert first.parameters + last.parameters == pytest.approx(alone.parameters, rel=1e-3)
    assert first.activations == alone.activations == 2 * last.activations  # two micro-batches wait in the first stage
    assert (first.head, last.head) == (0, alone.head)
    assert total(recompute=True)[0].activations < alone.activations / 4


def test_layers_are_by_hand_only_where_one_rank_has_all_of_a_sample(monkeypatch):
    monkeypatch.setattr("rl.trainer.platform.device", lambda: torch.device("cpu"))
    config = TrainerConfig(world_size=2, dtype="float32", recompute=False)
    (alone,) = plan_memory(BIG, config)
    (half,) = plan_memory(BIG, config.model_copy(update={"parallel": ParallelConfig(context=2)}))
    assert half.activations > 1.2 * alone.activations / 2


def test_what_cannot_fit_is_refused():
    (plan,) = total()
    check_fits(plan, plan.total, 1, "a device")
    with pytest.raises(MemoryPlanError, match=r"2 rank\(s\) need .* GiB of a device, which has"):
        check_fits(plan, plan.total, 2, "a device")
    assert describe([plan]).count("\n") == 1


def test_a_model_that_cannot_fit_is_not_loaded(worker, model_dir, monkeypatch):
    monkeypatch.setattr("rl.trainer.platform.device_bytes", lambda: 1000)
    with pytest.raises(MemoryPlanError, match="recompute=true"):
        worker.load_model(model_dir)


def test_attention_outweighs_the_weights_at_the_balance_length():
    layer = 1024 * (16 + 8 + 8 + 16) * 128 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    weights = 8 * layer + 1024 + 151_936 * 1024
    assert balance_length(BIG) == pytest.approx(weights / (8 * 16 * 128))
