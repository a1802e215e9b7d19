"""What each of several ranks does, one layout after another (``launched.run_ranks``).

The ranks of a world of two end by killing themselves in the middle of a save.
"""

import os
import signal
import time

import torch

from rl.trainer import checkpoint
from rl.trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rl.trainer.worker import TrainerWorker
from tests.trainer.common import Ratio, capture_update, make_trajectories

LAYOUTS = {
    2: {
        "tensor": ParallelConfig(tensor=2),
        "sequence": ParallelConfig(tensor=2, sequence_parallel=True),
        "pipeline": ParallelConfig(pipeline=2),
        "interleaved": ParallelConfig(pipeline=2, virtual_pipeline=2),
        "data": ParallelConfig(),
        "context": ParallelConfig(context=2),
    },
    4: {
        "tensor and pipeline": ParallelConfig(tensor=2, pipeline=2),
        "sequence and data": ParallelConfig(tensor=2, sequence_parallel=True),
        "pipeline and context": ParallelConfig(pipeline=2, context=2),
    },
}
SAVING, RESUMING = (
    ("tensor", "tensor and pipeline"),
    ("pipeline", "interleaved", "data", "sequence and data", "pipeline and context"),
)
BUDGET = 100
SCHEDULE, STEPS = OptimizerConfig(lr=1e-3, warmup_steps=2, decay="cosine"), 6


def make_worker(rank, world, port, parallel):
    config = TrainerConfig(
        parallel=parallel,
        world_size=world,
        optimizer=OptimizerConfig(lr=1e-3),
        max_tokens_per_micro_batch=BUDGET,
        timeout_s=60,
    )
    return TrainerWorker(config, rank, world, "127.0.0.1", port)


def go_through(name, worker, model_dir, output):
    trajectories = make_trajectories(temperature=0.7)
    worker.load_model(model_dir)
    exported = {key: tensor.clone() for key, tensor in worker.export_weights()}
    logprobs = worker.logprobs(trajectories)
    result, gradient = capture_update(worker, trajectories, Ratio())
    few, _ = capture_update(worker, trajectories[:1], Ratio())
    if name in SAVING:
        worker.save_checkpoint(output / "checkpoint", {"from": name})
    if name in RESUMING:  # from another layout's
        worker.load_checkpoint(output / "checkpoint")
    after = [worker.update(trajectories, 0, Ratio()).grad_norm for _ in range(2)]
    return {"exported": exported, "logprobs": logprobs, "result": result, "gradient": gradient} | {
        "after": after,
        "few": few,
    }


def die_while_saving(worker, model_dir, output):
    """Half of a run, saved; then a save that a kill -9 ends."""
    worker.load_model(model_dir)
    worker.set_optimizer(SCHEDULE, STEPS)
    trajectories = make_trajectories(temperature=0.7)
    for _ in range(STEPS // 2):
        worker.update(trajectories, 0, Ratio())
    worker.save_checkpoint(output / "half", {"next": 3}, background=True)
    worker.update(trajectories, 0, Ratio())  # the save goes on meanwhile, with the state as it was
    worker.wait_for_checkpoint()
    checkpoint._hash_file = lambda path: time.sleep(60)  # the files are written, and there is no manifest yet
    worker.save_checkpoint(output / "torn", {"next": 4}, background=True)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def main(rank, world, ports, model_dir, output):
    for (name, parallel), port in zip(LAYOUTS[world].items(), ports, strict=False):
        worker = make_worker(rank, world, port, parallel)
        found = go_through(name, worker, model_dir, output)
        if rank == 0:
            torch.save(found, output / f"{name}.pt")
        worker.close()
    if world == 2:
        die_while_saving(make_worker(rank, world, ports[-1], ParallelConfig(tensor=2)), model_dir, output)
