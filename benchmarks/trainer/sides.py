"""The same update by three trainers: ours, Hugging Face with torch's AdamW, and trl's GRPO trainer.

All make one optimizer step on the same batch of the same random model: forward, loss, backward, clip by the global norm
of 1, Adam. Ours keeps fp32 main weights and moments. The other two step bfloat16 weights on CUDA, which is faster and
less exact; both pad the samples to the longest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from algorithms import registry
from algorithms.types import Algorithm
from benchmarks.trainer.shapes import Shape, Variant, prompt, trajectories
from rl.batch import build_batch
from rl.trainer.config import OptimizerConfig, TrainerConfig
from rl.trainer.worker import TrainerWorker

LR = 1e-5
Step = Callable[[], dict[str, float]]
"""One update; its loss and gradient norm."""


def objective() -> Algorithm:
    """REINFORCE with double-sided importance sampling: it needs nothing but the batch."""
    return registry.build("dis", {"normalize_std": True})


@functools.cache
def _port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def make_worker(device: str, threads: int) -> TrainerWorker:
    config = TrainerConfig(
        optimizer=OptimizerConfig(lr=LR, betas=(0.9, 0.999)),
        dtype="bfloat16" if device == "cuda" else "float32",
        threads_per_rank=threads,
    )
    return TrainerWorker(config, 0, 1, "127.0.0.1", _port())


def ours(worker: TrainerWorker, shape: Shape, directory: Path, variant: Variant) -> Step:
    worker.config = worker.config.model_copy(update=dataclasses.asdict(variant))
    worker.load_model(directory)
    batch, algorithm = trajectories(shape), objective()

    def step() -> dict[str, float]:
        result = worker.update(batch, 0, algorithm)
        return {"loss": result.loss, "grad_norm": result.grad_norm}

    return step


def _padded(shape: Shape, device: str) -> dict[str, Tensor]:
    """The batch as rows: prompts padded on the left, completions on the right, as trl wants it."""
    made = trajectories(shape)
    targets = objective().prepare(build_batch(made, 0).rollout)
    starts = [sum(shape.lengths[:index]) for index in range(len(made))]
    prompts = [prompt(len(t)) for t in made]
    width, rest = max(prompts), max(len(t) - p for t, p in zip(made, prompts, strict=True))
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "old_per_token_logps")
    shapes = (width, width, rest, rest, rest)
    padded = {
        name: torch.zeros(len(made), columns, dtype=torch.float32 if name.startswith("old") else torch.long)
        for name, columns in zip(names, shapes, strict=True)
    }
    for row, (t, p) in enumerate(zip(made, prompts, strict=True)):
        ids, answer = torch.from_numpy(t.token_ids).long(), len(t) - p
        padded["prompt_ids"][row, width - p :] = ids[:p]
        padded["prompt_mask"][row, width - p :] = 1
        padded["completion_ids"][row, :answer] = ids[p:]
        padded["completion_mask"][row, :answer] = 1
        padded["old_per_token_logps"][row, :answer] = torch.from_numpy(t.rollout_logprobs)[p:]
    padded["advantages"] = torch.stack([targets.advantages[start] for start in starts])
    padded["num_items_in_batch"] = padded["completion_mask"].sum()
    return {name: tensor.to(device) for name, tensor in padded.items()}


def _load(directory: Path, device: str) -> nn.Module:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).train()


def _stepper(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.0, fused=True)

    def step() -> dict[str, float]:
        value = loss()
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return {"loss": float(value.detach()), "grad_norm": float(norm)}

    return step


def hugging_face(shape: Shape, directory: Path, device: str) -> Step:
    """The model's own logits, ``log_softmax`` in fp32, and the same objective."""
    model, rows = _load(directory, device), _padded(shape, device)
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    attended = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
    # Rows without padding need no mask, and then run the attention kernel that is fastest.
    mask = None if bool(attended.all()) else attended
    keep, weight = rows["completion_ids"].size(1), rows["completion_mask"].float()
    weight = weight / weight.sum()

    def loss() -> Tensor:
        logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=keep + 1).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(2, rows["completion_ids"][..., None]).squeeze(-1)
        ratio = (logprobs.detach() - rows["old_per_token_logps"]).exp()
        ratio = ratio.where((ratio > 0.7) & (ratio < 6.0), 0.0)
        return -(weight * ratio * rows["advantages"][:, None] * logprobs).sum()

    return _stepper(model, loss)


def trl(shape: Shape, directory: Path, device: str, checkpointing: bool) -> Step:
    """``GRPOTrainer``'s own loss with its fused head, on a stand-in for the trainer (which would want a data set).

    Args:
        checkpointing: recompute the layers' activations, which is trl's default.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    model, rows = _load(directory, device), _padded(shape, device)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    autocast = functools.partial(torch.autocast, "cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            num_processes=1,
            is_main_process=False,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            autocast=autocast,
        ),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=model,
        current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        loss_type="dapo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.28,
        beta=0.0,
        use_vllm=False,
    )
    scores = functools.partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
    trainer._get_per_token_logps_and_entropies = scores
    inputs: dict[str, Any] = dict(rows)
    return _stepper(model, lambda: GRPOTrainer._compute_loss(trainer, model, inputs))
