"""Tiles of SGLang's Triton kernel for experts: which it takes by itself, and a directory of tuned ones for it.

For each number of experts, expert width, GPU and number format there may be a file of tuned tiles; SGLang carries some.
Without one it follows a rule of thumb (``moe_runner/triton_utils/fused_moe_triton_config.py`` of 0.5.16 and 0.5.23).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollout.engine.model_shape import ModelShape

if TYPE_CHECKING:
    from rollout.engine.config import EngineConfig

FEW_ROWS, MANY_ROWS = 16, 64
VARIABLE = "SGLANG_MOE_CONFIG_DIR"
"""With it SGLang reads all tiles from that directory and none of its own."""


def local_experts(config: EngineConfig, shape: ModelShape) -> tuple[int, int]:
    """Experts that a GPU holds and their width there: E and N of a file's name."""
    assert shape.experts is not None
    if config.expert_parallel > 1:
        return shape.experts.routed // config.expert_parallel, shape.experts.width
    return shape.experts.routed, shape.experts.width // config.tensor_parallel


def default_rows(config: EngineConfig, shape: ModelShape, tokens: int) -> int:
    """Rows of a tile by the rule of thumb: few up to as many tokens as there are experts, and many beyond."""
    return FEW_ROWS if _unquantized(shape) and tokens <= local_experts(config, shape)[0] else MANY_ROWS


def outgrown(config: EngineConfig, shape: ModelShape, tokens: int) -> bool:
    """Whether a step has more tokens than the rule of thumb's small tiles serve, and no tuned ones are given."""
    if shape.experts is None or config.moe_configs is not None or not _unquantized(shape):
        return False
    return tokens > local_experts(config, shape)[0]


def problems(config: EngineConfig, shape: ModelShape) -> Iterator[str]:
    """What is wrong with ``moe_configs`` for a model, where it is set."""
    if config.moe_configs is None:
        return
    if shape.experts is None:
        yield f"moe_configs={config.moe_configs}, but {shape.model_type} has no experts: set it to null"
        return
    experts, width = local_experts(config, shape)
    # SGLang may fuse shared experts with the routed ones and then counts them, too.
    names = [f"E={count},N={width}," for count in range(experts, experts + shape.experts.shared + 1)]
    files = sorted(path.name for path in config.moe_configs.glob("configs/triton_*/*.json"))
    if not any(file.startswith(name) for name in names for file in files):
        yield (
            f"moe_configs={config.moe_configs} has no configs/triton_*/{names[0]}*.json for the {experts} experts of "
            f"{width} that a GPU holds (but {', '.join(files[:3]) or 'nothing'}): tune them, or set it to null"
        )


def environment(config: EngineConfig) -> dict[str, str]:
    """For a server's process."""
    return {} if config.moe_configs is None else {VARIABLE: str(config.moe_configs.absolute())}


def _unquantized(shape: ModelShape) -> bool:
    return shape.weight_bytes >= 2
