"""The learning rate as a pure function of the step.

warm-up:    lr · (step + 1) / warmup_steps                                       step < warmup_steps
after it:   lr · (m + (1 − m) · d(p)),   p = (step − warmup_steps) / (total_steps − warmup_steps)
            d(p) = 1 (constant), 1 − p (linear), (1 + cos πp) / 2 (cosine);  m = min_lr_ratio
"""

from __future__ import annotations

import math

from rl.trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Rate of the update number ``step``, counted from 0. Past ``total_steps`` it stays at the minimum.

    Raises:
        ValueError: the rate decays, but ``total_steps`` is None.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    if total_steps is None:
        raise ValueError(f"decay {config.decay!r} needs the total number of steps; set it before the first update")
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    decayed = 1 - progress if config.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decayed)
