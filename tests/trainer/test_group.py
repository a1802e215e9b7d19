"""Two ranks as Ray actors."""

import asyncio
import os
import time

import psutil
import pytest
import ray

from rl.trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rl.trainer.group import TrainerGroup, TrainerGroupError
from rl.trainer.result import NonFiniteUpdateError
from tests.trainer.common import Ratio, make_trajectories


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


def _title(process):
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it ended meanwhile, or is a zombie
        return ""


def rank_processes():
    return sorted(
        (p for p in psutil.Process().children(recursive=True) if "RankActor" in _title(p)),
        key=lambda p: p.pid,
    )


def test_no_room_is_an_error(cluster):
    config = TrainerConfig(cpus_per_rank=3, start_timeout_s=1)
    with pytest.raises(TrainerGroupError, match=r"no room for 1 trainer ranks of \{'CPU': 3.0\}"):
        asyncio.run(TrainerGroup.start(config))


def test_life_of_a_group(cluster, model_dir, tmp_path):
    asyncio.run(_life(model_dir, tmp_path))
    deadline = time.monotonic() + 10
    while rank_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert rank_processes() == []


async def _life(model_dir, tmp_path):
    trajectories = make_trajectories()
    group = await TrainerGroup.start(TrainerConfig(world_size=2, parallel=ParallelConfig(tensor=2)))
    try:
        await group.load_model(model_dir)
        await group.set_optimizer(OptimizerConfig(lr=1e-3), 10)
        result = await group.update(trajectories, 0, Ratio())
        assert (result.step, result.samples) == (1, len(trajectories))
        assert [len(x) for x in await group.logprobs(trajectories)] == [len(t) for t in trajectories]
        buckets = await group.weight_buckets(100_000)
        assert len(buckets) > 1

        await group.save_checkpoint(tmp_path / "checkpoint", {"a": [1]})
        for process in rank_processes():  # the save left no process behind
            assert process.children() == []
        assert await group.load_checkpoint(tmp_path / "checkpoint") == {"a": [1]}
        await group.save_hf(tmp_path / "hf")

        # What every rank raises comes through, and the group goes on.
        with pytest.raises(NonFiniteUpdateError, match="update 2"):
            await group.update([t.replace(reward=float("inf")) for t in trajectories], 0, Ratio())
        with pytest.raises(FileExistsError, match="hf exists"):
            await group.save_hf(tmp_path / "hf")
        assert (await group.update(trajectories, 0, Ratio())).step == 2

        await _death(group, trajectories)
    finally:
        await group.close()
        await group.close()


async def _death(group, trajectories):
    running = asyncio.ensure_future(group.update(trajectories * 1, 0, Ratio()))
    os.kill(rank_processes()[0].pid, 9)
    with pytest.raises(TrainerGroupError, match=r"rank \d died during update"):
        await running
    with pytest.raises(TrainerGroupError, match=r"cannot be used, rank \d died during update"):
        await group.update(trajectories, 0, Ratio())
