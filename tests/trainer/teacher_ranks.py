"""One of two ranks that go through layouts with teachers, in one process.

python -m tests.trainer.teacher_ranks RANK PORTS MODELS_DIR OUTPUT_DIR
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from algorithms import opd
from rl.teachers.sources import resolve
from rl.teachers.teaching import TeacherSetup, Teaching
from rl.trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rl.trainer.worker import TrainerWorker
from tests.trainer.common import capture_update, make_trajectories

LAYOUTS = {
    "tensor": ParallelConfig(tensor=2),
    "sequence": ParallelConfig(tensor=2, sequence_parallel=True),
    "pipeline": ParallelConfig(pipeline=2),
    "data": ParallelConfig(),
    "context": ParallelConfig(context=2),
}
MODES = {"sampled": {}, "full_vocab": {}, "top_k": {"top_k": 5}}
TEACHERS = ("ann", "bob")


def go_through(worker, models, store):
    """For each mode an update's result and gradient, from the student's first weights."""
    sources = [resolve(name, models / name) for name in TEACHERS]
    size = max(source.parameters for source in sources) * 4 * 3 // 2
    trajectories = make_trajectories(temperature=0.7)
    shares = [{TEACHERS[t.group_id % 2]: 1.0} if t.group_id < 3 else {"ann": 1.0, "bob": 2.0} for t in trajectories]
    teaching, found = Teaching(shares, ahead={"bob": 3}), {}
    for mode, options in MODES.items():
        worker.load_model(models / "student")
        worker.load_teachers(TeacherSetup(sources, str(store), hbm_bytes=size, pinned_bytes=8 * size))
        algorithm = opd.build(opd.Config(mode=mode, bound_low=0.0, bound_high=1e9, **options))
        found[mode] = capture_taught(worker, trajectories, algorithm, teaching)
    return found


def measure_fp8(worker, models, store):
    """The metrics of two updates with a teacher in fp8; the first finds out what that does."""
    worker.load_model(models / "student")
    source = replace(resolve("ann", models / "ann"), codec="fp8")
    worker.load_teachers(TeacherSetup([source], str(store), hbm_bytes=2**24, pinned_bytes=2**24))
    trajectories = make_trajectories(temperature=0.7)
    algorithm, teaching = opd.build(opd.Config()), Teaching([{"ann": 1.0}] * len(trajectories))
    return [worker.update(trajectories, 0, algorithm, (), teaching).metrics for _ in range(2)]


def capture_taught(worker, trajectories, algorithm, teaching):
    """``capture_update`` with teachers."""
    update = worker.update
    worker.update = lambda t, version, a, dropped: update(t, version, a, dropped, teaching)
    try:
        return capture_update(worker, trajectories, algorithm)
    finally:
        del worker.update


def main(rank, ports, models, output):
    for (name, parallel), port in zip(LAYOUTS.items(), ports, strict=True):
        config = TrainerConfig(
            parallel=parallel,
            world_size=2,
            optimizer=OptimizerConfig(lr=1e-3),
            max_tokens_per_micro_batch=100,
            timeout_s=60,
        )
        worker = TrainerWorker(config, rank, 2, "127.0.0.1", port)
        found = go_through(worker, models, output / "store")
        found["fp8"] = measure_fp8(worker, models, output / "fp8")
        if rank == 0:
            torch.save(found, output / f"{name}.pt")
        worker.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(port) for port in sys.argv[2].split(",")], Path(sys.argv[3]), Path(sys.argv[4]))
