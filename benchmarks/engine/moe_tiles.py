"""Tiles of SGLang's Triton kernel for experts, where SGLang carries no tuned ones for a model's sizes.

SGLang's rule of thumb takes small tiles for batches of at most as many tokens as there are experts, and large ones with
a short inner block beyond that. With 128 experts of 4,096 that is where a decoding step got about 7 ms longer on an
H200 (``docs/engine.md``), so a batch of decoding gets the small tiles at any size here, on all sides. For servers of
one's own, into a directory for ``engine.moe_configs``:

    python -m benchmarks.engine.moe_tiles DIR --experts 128 --width 4096 --device "NVIDIA H200"
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

from rollout.engine.expert_tiles import VARIABLE

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
    return {VARIABLE: str(folder)}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.moe_tiles")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--experts", type=int, required=True, help="that a GPU holds")
    parser.add_argument("--width", type=int, required=True, help="of an expert, what of it a GPU holds")
    parser.add_argument("--device", required=True, help="as PyTorch names the GPU")
    options = parser.parse_args(arguments)
    try:
        write_tiles(options.directory, options.experts, options.width, options.device)
    except importlib.metadata.PackageNotFoundError:
        parser.error("Triton is not installed here, and its version is part of the path: run this where servers run")
    print(*sorted(options.directory.glob("configs/*/*.json")), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
