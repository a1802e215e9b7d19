"""One of two ranks that go through layouts of several families in one process.

python -m tests.trainer.family_ranks RANK PORTS MODELS_DIR OUTPUT_DIR
"""

import sys
from pathlib import Path

import torch

from rl.trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rl.trainer.worker import TrainerWorker
from tests.trainer.common import Ratio, capture_update, make_trajectories

CASES = {
    "expert": ("qwen3_moe", ParallelConfig(expert=2)),
    "expert and sequence": ("glm4_moe", ParallelConfig(tensor=2, sequence_parallel=True, expert=2)),
    "expert tensor": ("glm4_moe", ParallelConfig(tensor=2, sequence_parallel=True, expert_tensor=2)),
    "expert data": ("glm4_moe", ParallelConfig()),
    "expert and context": ("qwen3_moe", ParallelConfig(context=2, expert=2)),
    "pipeline": ("glm4_moe", ParallelConfig(pipeline=2)),
}
"""Name → model and layout of two ranks."""


def main(rank, ports, models, output):
    trajectories = make_trajectories(temperature=0.7)
    for (name, (model, parallel)), port in zip(CASES.items(), ports, strict=True):
        config = TrainerConfig(
            parallel=parallel,
            world_size=2,
            optimizer=OptimizerConfig(lr=1e-3),
            max_tokens_per_micro_batch=100,
            timeout_s=60,
        )
        worker = TrainerWorker(config, rank, 2, "127.0.0.1", port)
        worker.load_model(models / model)
        exported = {key: tensor.clone() for key, tensor in worker.export_weights()}
        logprobs = worker.logprobs(trajectories)
        result, gradient = capture_update(worker, trajectories, Ratio())
        after = worker.update(trajectories, 0, Ratio()).loss
        if rank == 0:
            torch.save(
                {"exported": exported, "logprobs": logprobs, "result": result, "gradient": gradient, "after": after},
                output / f"{name}.pt",
            )
        worker.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(port) for port in sys.argv[2].split(",")], Path(sys.argv[3]), Path(sys.argv[4]))
