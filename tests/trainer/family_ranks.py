"""What each of two ranks does, one layout of a family after another (``launched.run_ranks``)."""

import torch

from rl.trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rl.trainer.worker import TrainerWorker
from tests.trainer.common import Ratio, capture_update, make_trajectories, with_routed_experts

CASES = {
    "expert": ("qwen3_moe", ParallelConfig(expert=2)),
    "expert and sequence": ("glm4_moe", ParallelConfig(tensor=2, sequence_parallel=True, expert=2)),
    "expert tensor": ("glm4_moe", ParallelConfig(tensor=2, sequence_parallel=True, expert_tensor=2)),
    "expert data": ("glm4_moe", ParallelConfig()),
    "expert and context": ("qwen3_moe", ParallelConfig(context=2, expert=2)),
    "pipeline": ("glm4_moe", ParallelConfig(pipeline=2)),
    "interleaved": ("glm4_moe", ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "interleaved, softmax": ("qwen3_moe", ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "latent, expert and sequence": ("glm_moe_dsa", ParallelConfig(tensor=2, sequence_parallel=True, expert=2)),
    "latent and context": ("glm_moe_dsa", ParallelConfig(context=2)),
    "latent and pipeline": ("glm_moe_dsa", ParallelConfig(pipeline=2)),
    "latent and interleaved": ("glm_moe_dsa_pairs", ParallelConfig(pipeline=2, virtual_pipeline=2)),
}
"""Name → model and layout of two ranks."""
LAYERS = {"qwen3_moe": 4, "glm4_moe": 4, "glm_moe_dsa": 6, "glm_moe_dsa_pairs": 8}
TOP_K = 5


def train_indexer(worker, model_dir, trajectories):
    """Two updates of the indexers in their sparse phase, and what they have become."""
    worker.config = worker.config.model_copy(update={"trained": "indexer_sparse"})
    worker.load_model(model_dir)
    results = [worker.update_indexer(trajectories, 0) for _ in range(2)]
    return results, {key: tensor.clone() for key, tensor in worker.export_weights() if ".indexer." in key}


def main(rank, world, ports, models, output):
    trajectories, saved = make_trajectories(temperature=0.7), set()
    for (name, (model, parallel)), port in zip(CASES.items(), ports, strict=True):
        config = TrainerConfig(
            parallel=parallel,
            world_size=world,
            optimizer=OptimizerConfig(lr=1e-3),
            max_tokens_per_micro_batch=100,
            timeout_s=60,
        )
        worker = TrainerWorker(config, rank, world, "127.0.0.1", port)
        worker.load_model(models / model)
        exported = {key: tensor.clone() for key, tensor in worker.export_weights()}
        logprobs = worker.logprobs(trajectories)
        replayed = worker.logprobs(with_routed_experts(trajectories, layers=LAYERS[model], experts=4, top_k=2))
        topk = worker.topk_logprobs(trajectories, TOP_K)
        result, gradient = capture_update(worker, trajectories, Ratio())
        checkpoint = output / f"{model} checkpoint"
        if model not in saved:
            worker.save_checkpoint(checkpoint, {})
            saved.add(model)
        else:  # another layout resumes from it
            worker.load_model(models / model)
            worker.load_checkpoint(checkpoint)
        after = worker.update(trajectories, 0, Ratio()).grad_norm  # the loss is the same at any weights
        indexer = train_indexer(worker, models / model, trajectories) if model == "glm_moe_dsa" else None
        if rank == 0:
            torch.save(
                {"exported": exported, "logprobs": logprobs, "result": result, "gradient": gradient, "after": after}
                | {"indexer": indexer, "replayed": replayed, "topk": topk},
                output / f"{name}.pt",
            )
        worker.close()
