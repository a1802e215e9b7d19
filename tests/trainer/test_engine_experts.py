"""The experts that a real server says it chose, through the token record, against those that Megatron's router chooses
with the same weights, and the log-probs when it is told to follow them."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rl.trainer import moe
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.protocol import Sampling
from rollout.processes import ProcessRegistry
from rollout.session import RolloutKey, Segment, SessionRecord
from rollout.trajectory import StopReason
from tests.trainer.models import save_model

CHANGES = {
    "cpu": {},
    "cuda": {  # kernels of a GPU do not take smaller heads
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_attention_heads": 4,
        "head_dim": 64,
        "num_experts": 16,
        "num_local_experts": 16,  # what transformers 5.19 calls them in a file
        "num_experts_per_tok": 4,
    },
}
SESSIONS = 8
REPLIES = (20, 12)
"""Tokens of each turn; the first comes in two halves, as of a request that was aborted and resumed by its prefix."""


def engine_config(device):
    common = {"context_length": 256, "routed_experts": True, "max_running_requests": 16}
    if device == "cpu":
        return EngineConfig(**common, max_total_tokens=4096, start_timeout_s=280)
    extra = {  # what needs the fewest kernels; SGLang compiles those at its first start
        "attention-backend": "triton",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "disable-prefill-cuda-graph": True,
        "cuda-graph-max-bs-decode": 8,
    }
    return EngineConfig(
        **common, device="cuda", dtype="bfloat16", memory_fraction=0.3, start_timeout_s=400, extra_args=extra
    )


async def conversation(fleet, seed):
    """Two turns, recorded as the gateway does."""
    rng = np.random.default_rng(seed)
    segment = Segment()

    async def ask(context, generations, tokens):
        sampled = [token for g in generations for token in g.token_ids.tolist()]
        rows = segment.expert_rows + sum(len(g.routed_experts) for g in generations)
        ids = [*segment.token_ids, *context, *sampled]
        sampling = Sampling(1.0, tokens, routed_experts_from=rows)
        return await fleet.generate(ids, sampling, f"{seed}.{len(ids)}", session=str(seed))

    for turn, tokens in enumerate(REPLIES):
        context = rng.integers(6, 100, 15).tolist()
        parts = (tokens // 2, tokens - tokens // 2) if turn == 0 else (tokens,)
        generations = []
        for part in parts:
            generations.append(await ask(context, generations, part))
        segment.append_context(context)
        segment.append_reply(generations, {"role": "assistant", "content": ""})
    record = SessionRecord(RolloutKey("test", 0, str(seed), seed, 0), 1.0)
    record.segments.append(segment)
    (trajectory,) = record.trajectories(1.0, StopReason.STOP, {})
    return trajectory


@pytest.fixture
def trajectories(request, tmp_path):
    device = request.getfixturevalue("device")
    save_model("qwen3_moe", tmp_path / "model", CHANGES[device])
    shape = AutoConfig.from_pretrained(tmp_path / "model")

    async def play(registry):
        fleet = EngineFleet(
            engine_config(device),
            registry,
            tmp_path,
            print,
            experts_shape=(shape.num_hidden_layers, shape.num_experts_per_tok),
        )
        await fleet.start(tmp_path / "model")
        try:
            return await asyncio.gather(*(conversation(fleet, seed) for seed in range(SESSIONS)))
        finally:
            await fleet.stop()

    with ProcessRegistry() as registry:
        return asyncio.run(play(registry))


@pytest.fixture
def worker(session_worker):
    config = session_worker.config
    yield session_worker
    session_worker.config = config


def agreement(worker, trajectories, monkeypatch):
    """Log-probs when the record is followed, and the share of tokens and layers for which Megatron's own router chooses
    the recorded experts."""
    same = []
    follow = moe._Replay.get_replay_topk

    def watched(self, scores, topk, num_groups, group_topk, choose):
        _, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded = (self.experts >= 0).all(-1)
        equal = (own.sort(-1).values == self.experts.sort(-1).values).all(-1)
        same.append(equal[recorded].cpu())
        return follow(self, scores, topk, num_groups, group_topk, choose)

    monkeypatch.setattr(moe._Replay, "get_replay_topk", watched)
    found = worker.logprobs(trajectories)
    monkeypatch.undo()
    return found, torch.cat(same)


def check(worker, model_dir, trajectories, monkeypatch, share, gap):
    shape = AutoConfig.from_pretrained(model_dir)
    rows = (shape.num_hidden_layers, shape.num_experts_per_tok)
    assert shape.num_experts > shape.num_experts_per_tok  # else there is nothing to choose
    assert all(t.routed_experts.shape == (len(t), *rows) for t in trajectories)
    assert all((t.routed_experts[:-1] >= 0).all() and (t.routed_experts[-1] == -1).all() for t in trajectories)
    worker.load_model(model_dir)
    followed, same = agreement(worker, trajectories, monkeypatch)
    assert len(same) == shape.num_hidden_layers * sum(len(t) - 1 for t in trajectories)
    own = worker.logprobs([t.replace(routed_experts=None) for t in trajectories])
    sampled = [t.action_mask for t in trajectories]
    engine = np.concatenate([t.rollout_logprobs[mask] for t, mask in zip(trajectories, sampled, strict=True)])
    gaps = {
        name: np.abs(np.concatenate([x[mask] for x, mask in zip(found, sampled, strict=True)]) - engine)
        for name, found in (("followed", followed), ("own", own))
    }
    for name, of in gaps.items():
        print(f"log-prob gap, experts {name}: mean {of.mean():.2e}, largest {of.max():.2e}")
    print(f"Megatron's router chooses the engine's experts for {same.float().mean():.2%} of {len(same)} rows")
    assert same.float().mean() >= share
    assert gaps["followed"].mean() <= gap


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the trainer of this process is on the GPU")
def test_a_real_servers_experts_are_those_that_megatron_chooses(worker, trajectories, tmp_path, device, monkeypatch):
    check(worker, tmp_path / "model", trajectories, monkeypatch, share=0.995, gap=1e-4)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_experts_in_bfloat16_on_one_gpu(worker, trajectories, tmp_path, device, monkeypatch):
    worker.config = worker.config.model_copy(update={"dtype": "bfloat16"})
    check(worker, tmp_path / "model", trajectories, monkeypatch, share=0.8, gap=0.1)
