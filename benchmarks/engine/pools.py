"""KV pools of equal GPU bytes, and the arguments that give them to SGLang.

With HiSparse a running request holds on the GPU its device buffer (``buffer`` tokens and one page for the newest) and
the indexer's keys of its whole history; the history itself lies in host memory. While a prompt is prefilled, all of its
KV is on the GPU, so a few prompts' room comes on top. SGLang is given the buffers' pool (``--max-total-tokens``) and
how many times as many tokens the host holds (``host_to_device_ratio``, an integer). The side without HiSparse gets as
many tokens as fit in the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PAGE = 64
BF16 = 2
INDEXER_SCALE_BYTES = 4
HEADROOM_PROMPTS = 3
"""Prompts in prefill, or on their way to the host."""


@dataclass(frozen=True)
class KvBytes:
    """Of one token in one layer."""

    latent: int
    """Latent and rotary part, which attention reads."""
    indexer: int

    @classmethod
    def of(cls, latent_dim: int, rotary: int, index_dim: int) -> KvBytes:
        return cls((latent_dim + rotary) * BF16, index_dim + INDEXER_SCALE_BYTES)


@dataclass(frozen=True)
class HiSparsePool:
    """What HiSparse takes."""

    device_tokens: int
    ratio: int
    buffer: int
    requests: int
    context: int
    """The longest sequence that the server admits."""
    layers: int
    kv: KvBytes

    @property
    def host_tokens(self) -> int:
        return self.device_tokens * self.ratio

    @property
    def host_bytes(self) -> int:
        return self.host_tokens * self.kv.latent * self.layers

    @property
    def gpu_bytes(self) -> int:
        """Buffers, indexer keys, and the tables that HiSparse adds (slots' tokens, places and order by layer and
        request; where each token lies on the host; which buffer slot each token has)."""
        rows = self.requests + 1
        slots = self.buffer + PAGE
        tables = self.layers * rows * (slots * (4 + 4) + self.buffer * 2) + rows * (slots + self.context + PAGE) * 8
        keys = self.host_tokens * self.kv.indexer * self.layers
        return self.device_tokens * self.kv.latent * self.layers + keys + tables + self.host_tokens * 8


def hisparse_pool(requests: int, tokens: int, buffer: int, context: int, layers: int, kv: KvBytes) -> HiSparsePool:
    """The pool of fewest GPU bytes for so many requests of ``tokens`` each."""
    least = requests * (buffer + PAGE) + HEADROOM_PROMPTS * tokens
    total = requests * (tokens + PAGE)
    options = []
    for ratio in {max(1, total // least), math.ceil(total / least)}:
        device = math.ceil(max(least, total / ratio) / PAGE) * PAGE
        options.append(HiSparsePool(device, ratio, buffer, requests, context, layers, kv))
    return min(options, key=lambda pool: pool.gpu_bytes)


def plain_tokens(gpu_bytes: int, layers: int, kv: KvBytes) -> int:
    """Tokens whose KV and indexer keys fill so many bytes."""
    return gpu_bytes // ((kv.latent + kv.indexer) * layers) // PAGE * PAGE
