"""Tiles of SGLang's Triton kernel for experts, where SGLang carries no tuned ones for a model's sizes.

SGLang's rule of thumb takes small tiles for batches of at most as many tokens as there are experts, and large ones with
a short inner block beyond that. With 128 experts of 4,096 that is where a decoding step got about 7 ms longer on an
H200 (``docs/engine.md``), so a batch of decoding gets the small tiles at any size here, on all sides.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

DECODING = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
PREFILLING = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
BY_TOKENS = {1: DECODING, 512: DECODING, 4096: PREFILLING}
"""SGLang takes the entry whose number of tokens is nearest."""


def write_tiles(folder: Path, experts: int, expert_size: int, device_name: str) -> dict[str, str]:
    """Write the file that SGLang looks for; returns what a server's environment must say.

    Args:
        device_name: as PyTorch says it.
    """
    version = importlib.metadata.version("triton").replace(".", "_")
    name = f"E={experts},N={expert_size},device_name={device_name.replace(' ', '_')}.json"
    file = folder / "configs" / f"triton_{version}" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(BY_TOKENS))
    return {"SGLANG_MOE_CONFIG_DIR": str(folder)}
