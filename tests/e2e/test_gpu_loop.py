"""Whole runs on GPUs: trainer and servers in turns on the same ones, and apart; weights go from the one to the other by
CUDA IPC and by NCCL. The model is the demo's, a little wider, and learns its tasks."""

import time

import pytest
import torch

from tests.e2e.conftest import start
from tests.engine.gpu_models import SETTINGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(600),
]

STEPS = 15
GRAPHS = "cuda-graph-max-bs-decode"
MODEL = (
    "model.fresh.hidden_size=128",
    "model.fresh.intermediate_size=384",
    "model.fresh.head_dim=64",
    "model.fresh.kv_heads=2",
)
ENGINE = (
    "engine=gpu",
    "engine.context_length=256",
    "engine.memory_fraction=0.3",
    "engine.start_timeout_s=280",
    *(f"+engine.extra_args.{name}={str(value).lower()}" for name, value in (SETTINGS | {GRAPHS: 64}).items()),
)
LEARNING = (
    f"steps={STEPS}",
    "sft.steps=400",
    "sft.conversations_per_step=64",
    "rollout.groups_per_step=24",
    "algorithm.group_size=8",
    "evaluation.prompts=128",
    "checkpoint.every=5",  # colocated: the trainer borrows the GPUs for it
)
ONE_MACHINE = ("cluster.address=null", "cluster.cpus=12", "cluster.object_store_bytes=268435456", "tracking=files")
GAP = 0.02
"""Mean |Δ log-prob| of a step, of engine and trainer in bfloat16: at most 0.0035 was seen."""


def run(folder, *overrides):
    begun = time.monotonic()
    run = start(folder, *ENGINE, *MODEL, *LEARNING, *overrides, *ONE_MACHINE)
    try:
        code = run.wait(450)
        assert code == 0, run.text()[-4000:]
    finally:
        run.stop()
        print(run.text()[-6000:])
    print(f"{time.monotonic() - begun:.0f} s: {run.summary()}")
    return run


def assert_learned(run, way):
    assert f"weights are published by {way}" in run.text()
    rows = [row for row in run.rows() if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    gaps = [row["logprob_gap_mean"] for row in rows if row.get("logprob_gap_mean") is not None]
    assert len(gaps) >= STEPS // 2
    assert max(gaps) < GAP, gaps
    before, after = (run.summary()[moment] for moment in ("reward_before", "reward_after"))
    gained = [after[task]["sampled"] - before[task]["sampled"] for task in before]
    assert sum(gained) / len(gained) > 0.1, (before, after)
    assert run.survivors() == []


def test_trainer_and_server_take_turns_on_one_gpu(tmp_path):
    assert_learned(run(tmp_path / "run", "cluster=colocated"), "ipc")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_ranks_and_two_servers_take_turns_on_two_gpus(tmp_path):
    two = ("cluster=colocated", "trainer.world_size=2", "engine.servers=2")
    assert_learned(run(tmp_path / "run", *two), "ipc")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_trainer_and_server_have_a_gpu_each(tmp_path):
    assert_learned(run(tmp_path / "run", "cluster=gpu", "trainer.world_size=1"), "collective")
