"""Tiles of SGLang's Triton kernel for experts: which it takes by itself, and a directory of tuned ones for it.

For each number of experts, expert width, GPU and number format there may be a file of tuned tiles; SGLang carries some.
Without one it follows a rule of thumb (``moe_runner/triton_utils/fused_moe_triton_config.py`` of 0.5.16 and 0.5.23).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
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


def rows(config: EngineConfig, shape: ModelShape, tokens: int) -> int:
    """Rows of a tile in a step of so many tokens: of the nearest tuned one, else by the rule of thumb (few rows up to
    as many tokens as there are experts, many beyond)."""
    if config.moe_configs is not None:
        tuned = _tuned_rows(_files(config, shape)[0])
        return tuned[min(tuned, key=lambda number: abs(number - tokens))]
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
    for file in (found := _files(config, shape)):
        try:
            _tuned_rows(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"moe_configs: {file} is no file of tiles by tokens ({error!r}): tune it again, or set it to null"
    if not found:
        experts, width = local_experts(config, shape)
        others = sorted(path.name for path in config.moe_configs.glob("configs/triton_*/*.json"))
        yield (
            f"moe_configs={config.moe_configs} has no configs/triton_*/E={experts},N={width},*.json for the {experts} "
            f"experts of {width} that a GPU holds (but {', '.join(others[:3]) or 'nothing'}): tune them, or set it to "
            "null"
        )


def environment(config: EngineConfig) -> dict[str, str]:
    """For a server's process."""
    return {} if config.moe_configs is None else {VARIABLE: str(config.moe_configs.absolute())}


def _files(config: EngineConfig, shape: ModelShape) -> list[Path]:
    """Of the model's sizes, newest Triton first; SGLang may fuse shared experts with the routed ones and count them."""
    assert config.moe_configs is not None
    assert shape.experts is not None
    experts, width = local_experts(config, shape)
    counts = range(experts, experts + shape.experts.shared + 1)
    return [
        path
        for count in counts
        for path in sorted(config.moe_configs.glob(f"configs/triton_*/E={count},N={width},*.json"), reverse=True)
    ]


@functools.cache
def _tuned_rows(file: Path) -> dict[int, int]:
    rows = {int(tokens): int(tile["BLOCK_SIZE_M"]) for tokens, tile in json.loads(file.read_text()).items()}
    if not rows:
        raise ValueError("it is empty")
    return rows


def _unquantized(shape: ModelShape) -> bool:
    return shape.weight_bytes >= 2
