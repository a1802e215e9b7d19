"""One of two ranks that go through several layouts in one process, because importing Megatron takes seconds.

python -m tests.trainer.ranks RANK PORTS MODEL_DIR OUTPUT_DIR
"""

import sys
from pathlib import Path

import torch

from rl.trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rl.trainer.worker import TrainerWorker
from tests.trainer.common import Ratio, capture_update, make_trajectories

LAYOUTS = {
    "tensor": ParallelConfig(tensor=2),
    "sequence": ParallelConfig(tensor=2, sequence_parallel=True),
    "pipeline": ParallelConfig(pipeline=2),
    "data": ParallelConfig(),
    "context": ParallelConfig(context=2),
}
BUDGET = 100


def main(rank, ports, model_dir, output):
    trajectories = make_trajectories(temperature=0.7)
    for (name, parallel), port in zip(LAYOUTS.items(), ports, strict=True):
        config = TrainerConfig(
            parallel=parallel,
            world_size=2,
            optimizer=OptimizerConfig(lr=1e-3),
            max_tokens_per_micro_batch=BUDGET,
            timeout_s=60,
        )
        worker = TrainerWorker(config, rank, 2, "127.0.0.1", port)
        worker.load_model(model_dir)
        exported = {key: tensor.clone() for key, tensor in worker.export_weights()}
        logprobs = worker.logprobs(trajectories)
        result, gradient = capture_update(worker, trajectories, Ratio())
        few, _ = capture_update(worker, trajectories[:1], Ratio())
        if name == "tensor":
            worker.save_checkpoint(output / "checkpoint", {"from": name})
        if name in ("pipeline", "data"):  # another layout resumes from it
            worker.load_checkpoint(output / "checkpoint")
        after = [worker.update(trajectories, 0, Ratio()).loss for _ in range(2)]
        if rank == 0:
            torch.save(
                {"exported": exported, "logprobs": logprobs, "result": result, "gradient": gradient}
                | {"after": after, "few": few},
                output / f"{name}.pt",
            )
        worker.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(port) for port in sys.argv[2].split(",")], Path(sys.argv[3]), Path(sys.argv[4]))
