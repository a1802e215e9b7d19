"""Bandwidths that the capacity planner wants, measured on the idle GPU in this process."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.engine.pools import KvBytes
from benchmarks.trainer.measure import median_seconds

ROWS = 2**18
SAMPLE = 2**16


def probe(kv: KvBytes) -> dict[str, Any]:
    """Bytes a second: scattered KV rows from pinned host memory by a kernel, as HiSparse loads them; a contiguous copy
    from host memory; and a read of GPU memory."""
    return {
        "host_gather_bytes_per_s": _gather(kv.latent),
        "host_copy_bytes_per_s": _copy(),
        "gpu_read_bytes_per_s": _read(),
    }


def _gather(row: int) -> float:
    from sgl_kernel.kvcacheio import transfer_kv_per_layer_mla

    host = torch.empty(ROWS, row // 2, dtype=torch.bfloat16, pin_memory=True)
    device = torch.empty(SAMPLE, row // 2, dtype=torch.bfloat16, device="cuda")
    places = torch.randperm(ROWS, device="cuda")[:SAMPLE]
    slots = torch.arange(SAMPLE, device="cuda")

    def load() -> None:
        transfer_kv_per_layer_mla(src=host, dst=device, src_indices=places, dst_indices=slots, item_size=row)

    return SAMPLE * row / median_seconds(load, 5)


def _copy() -> float:
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    return host.nbytes / median_seconds(lambda: device.copy_(host), 3)


def _read() -> float:
    values = torch.ones(2**31, dtype=torch.bfloat16, device="cuda")
    return values.nbytes / median_seconds(lambda: values.sum(dtype=torch.float32), 5)
