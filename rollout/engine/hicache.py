"""HiCache: prefixes that the GPU's radix cache evicts go to host memory, and from there to a storage backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rollout.engine.settings import Argument, Settings


class HiCacheConfig(Settings):
    """Sizes and policies of the tiers below the GPU."""

    ratio: float | None = Field(None, gt=1)
    """Tokens of the host pool over tokens of the GPU's pool; give this or ``size_gb``."""
    size_gb: int | None = Field(None, gt=0)
    """Gigabytes of each rank's host pool."""
    write_policy: Literal["write_back", "write_through", "write_through_selective"] = "write_through"
    """When a prefix is copied to the host: as it is evicted, at once, or when it has been hit."""
    io_backend: Literal["direct", "kernel"] = "kernel"
    mem_layout: Literal["layer_first", "page_first", "page_first_direct"] = "page_first"
    storage_backend: Literal["file", "mooncake", "hf3fs", "nixl", "aibrix"] | None = None
    """Where prefixes go that host memory evicts; null: nowhere."""
    prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """When a request stops waiting for the storage backend."""

    def arguments(self) -> dict[str, Argument]:
        options: dict[str, Argument] = {
            "enable-hierarchical-cache": True,
            "hicache-write-policy": self.write_policy,
            "hicache-io-backend": self.io_backend,
            "hicache-mem-layout": self.mem_layout,
        }
        if self.ratio is not None:
            options["hicache-ratio"] = self.ratio
        if self.size_gb is not None:
            options["hicache-size"] = self.size_gb
        if self.storage_backend is not None:
            options["hicache-storage-backend"] = self.storage_backend
            options["hicache-storage-prefetch-policy"] = self.prefetch_policy
        return options


def problems(hicache: HiCacheConfig) -> Iterator[str]:
    """Settings that exclude each other; SGLang would change one of them with a warning."""
    if (hicache.ratio is None) == (hicache.size_gb is None):
        yield "hicache: give one of hicache.ratio and hicache.size_gb"
    layout, io = hicache.mem_layout, hicache.io_backend
    if layout == "page_first_direct" and io == "kernel":
        yield "hicache.mem_layout=page_first_direct needs hicache.io_backend=direct: change the one or the other"
    if layout == "page_first" and io == "direct":
        yield "hicache.io_backend=direct needs hicache.mem_layout=page_first_direct or layer_first: change either"
    if hicache.storage_backend == "mooncake" and layout == "layer_first":
        yield "hicache.storage_backend=mooncake stores whole pages: set hicache.mem_layout to page_first"
