"""Prefill and decode on two servers of one GPU, which send KV caches over TCP, with a random Llama. The servers' logs
are below pytest's ``--basetemp``."""

import asyncio
import os
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.publish.models import SIZES, random_weights, write
from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import DisaggregationConfig, RoleConfig, transfer_problem
from rollout.engine.fleet import EngineFleet
from rollout.engine.protocol import EngineLost, Generation, Sampling
from rollout.processes import ProcessRegistry, free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(500),
]

CONTEXT = 2048
NOISE = 0.15
"""Largest |Δ log-prob| of one model on two kernels in bfloat16."""
START_S = 280.0
"""The first start compiles kernels."""
LONG = Sampling(0.0, 1024)


def scores(model_dir, ids):
    """HF's log-prob of each token given those before it."""
    hf = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).cuda().eval()
    with torch.no_grad():
        logprobs = hf(torch.tensor([ids], device="cuda")).logits[0, :-1].float().log_softmax(-1).cpu()
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_two_servers_of_one_gpu_share_requests_and_one_comes_back(tmp_path):
    if (problem := transfer_problem("mooncake_tcp")) is not None:
        pytest.skip(problem)
    size = SIZES["135m"]
    weights = random_weights(size, 0, "cuda", torch.bfloat16)
    for name, tensor in weights.items():
        if "norm" not in name:
            tensor.mul_(3)
    model_dir = write(tmp_path / "model", size, weights, CONTEXT)
    half = RoleConfig(memory_fraction=0.3, max_total_tokens=32_768)
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        context_length=CONTEXT,
        max_running_requests=16,
        disaggregation=DisaggregationConfig(
            prefill=half, decode=half, transfer_backend="mooncake_tcp", bootstrap_port=free_port(), share_gpus=True
        ),
        start_timeout_s=START_S,
        extra_args={
            "attention-backend": "triton",
            "sampling-backend": "pytorch",
            "grammar-backend": "none",
            "disable-prefill-cuda-graph": True,
            "cuda-graph-max-bs-decode": 16,
        },
    )
    prompts = [list(range(10 + 7 * index, 74 + 40 * index)) for index in range(8)]

    async def run(registry: ProcessRegistry) -> tuple[list[Generation], list[Generation | BaseException], Generation]:
        fleet = EngineFleet(config, registry, tmp_path, print)
        await fleet.start(model_dir)
        try:
            sampling = Sampling(0.0, 64)
            told = await asyncio.gather(
                *(fleet.generate(prompt, sampling, f"r{index}", f"s{index}") for index, prompt in enumerate(prompts))
            )
            dying = [asyncio.create_task(fleet.generate([9, 8, 7], LONG, f"d{index}", f"d{index}")) for index in (0, 1)]
            await asyncio.sleep(0.5)
            os.kill(fleet.processes["decode-1"].pid, signal.SIGKILL)
            ended = await asyncio.gather(*dying, return_exceptions=True)
            return told, ended, await fleet.generate(prompts[0], sampling, "again", "s0")
        finally:
            await fleet.stop()

    with ProcessRegistry() as registry:
        told, ended, again = asyncio.run(run(registry))
    for prompt, answer in zip([*prompts, prompts[0]], [*told, again], strict=True):
        assert len(answer.token_ids) == 64
        expected = scores(model_dir, [*prompt, *answer.token_ids.tolist()])[len(prompt) - 1 :]
        assert float((torch.from_numpy(answer.logprobs) - expected).abs().max()) < NOISE
    assert all(isinstance(outcome, EngineLost) for outcome in ended)
