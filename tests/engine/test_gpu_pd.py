"""Prefill and decode on two servers of one GPU, which send KV caches over TCP, with a random Llama. The servers' logs
are below pytest's ``--basetemp``."""

import asyncio
import os
import signal

import numpy as np
import pytest
import torch

from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import DisaggregationConfig, RoleConfig, transfer_problem
from rollout.engine.fleet import EngineFleet
from rollout.engine.protocol import EngineLost, Generation, Sampling
from rollout.processes import ProcessRegistry, free_port
from tests.engine.conftest import until_streaming
from tests.engine.gpu_models import CONTEXT, NOISE, SETTINGS, START_S, Model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(500),
]

SHORT, LONG = Sampling(0.0, 64), Sampling(0.0, 1024)
PROMPTS = [list(range(10 + 7 * index, 74 + 40 * index)) for index in range(8)]
DYING = [[9, 8, 7], [9, 8, 6]]


def assert_agree(found: np.ndarray, expected: torch.Tensor) -> None:
    """Log-probs of one model; without the prompt's KV cache almost each would be off by more than 1. Of so many, the
    largest difference may exceed what it is of few."""
    difference = (torch.from_numpy(found) - expected).abs()
    assert float(difference.mean()) < NOISE / 2
    assert float(difference.max()) < NOISE * 2


def config() -> EngineConfig:
    half = RoleConfig(memory_fraction=0.3, max_total_tokens=32_768)
    return EngineConfig(
        device="cuda",
        dtype="bfloat16",
        context_length=CONTEXT,
        max_running_requests=16,
        disaggregation=DisaggregationConfig(
            prefill=half, decode=half, transfer_backend="mooncake_tcp", bootstrap_port=free_port(), share_gpus=True
        ),
        start_timeout_s=START_S,
        extra_args=SETTINGS,
    )


def test_two_servers_of_one_gpu_share_requests_and_one_comes_back(tmp_path):
    if (problem := transfer_problem("mooncake_tcp")) is not None:
        pytest.skip(problem)
    model = Model(tmp_path / "model", 0)

    async def run(
        fleet: EngineFleet,
    ) -> tuple[list[Generation], np.ndarray | BaseException, list[Generation | BaseException]]:
        await fleet.start(model.directory)
        try:
            told = await asyncio.gather(
                *(fleet.generate(prompt, SHORT, f"r{index}", f"s{index}") for index, prompt in enumerate(PROMPTS))
            )
            dying = [
                asyncio.create_task(fleet.generate(prompt, LONG, f"d{index}", f"d{index}"))
                for index, prompt in enumerate(DYING)
            ]
            await until_streaming(fleet.engines[1], DYING)
            os.kill(fleet.processes["decode-1"].pid, signal.SIGKILL)
            ended = await asyncio.gather(*dying, return_exceptions=True)
            again = await fleet.generate(PROMPTS[0], SHORT, "again", "s0")
            (scored,) = await asyncio.gather(fleet.score(PROMPTS[-1]), return_exceptions=True)
            return [*told, again], scored, ended
        finally:
            await fleet.stop()

    with ProcessRegistry() as registry:
        told, scored, ended = asyncio.run(run(EngineFleet(config(), registry, tmp_path, print)))
    for prompt, answer in zip([*PROMPTS, PROMPTS[0]], told, strict=True):
        assert len(answer.token_ids) == SHORT.max_new_tokens
        assert_agree(answer.logprobs, model.logprobs([*prompt, *answer.token_ids.tolist()])[len(prompt) - 1 :])
    for outcome in ended:
        assert isinstance(outcome, EngineLost)
        assert (outcome.role, outcome.partial is not None) == ("decode", True)
    assert isinstance(scored, np.ndarray), scored
    assert_agree(scored[1:], model.logprobs(PROMPTS[-1]))
