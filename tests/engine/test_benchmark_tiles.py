"""SGLang finds the tiles that the benchmark writes, under the name that it looks for."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from benchmarks.engine import moe_tiles


def test_decoding_batches_get_small_tiles_and_prefill_sglangs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"triton": "3.6.0"}.__getitem__)
    environment = moe_tiles.write_tiles(tmp_path, 128, 4096, "NVIDIA H200")
    (file,) = Path(environment["SGLANG_MOE_CONFIG_DIR"]).rglob("*.json")
    assert file.relative_to(tmp_path) == Path("configs/triton_3_6_0/E=128,N=4096,device_name=NVIDIA_H200.json")
    tiles = {int(tokens): tile for tokens, tile in json.loads(file.read_text()).items()}

    def nearest(batch: int) -> dict[str, int]:
        return tiles[min(tiles, key=lambda tokens: abs(tokens - batch))]

    assert {nearest(batch)["BLOCK_SIZE_M"] for batch in (1, 64, 128, 256, 512)} == {16}
    assert nearest(8192)["BLOCK_SIZE_M"] == 64
