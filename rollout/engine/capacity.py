"""How many requests fit: the sizes of a server's KV pools as SGLang computes them, from config and model alone.

SGLang takes ``memory_fraction`` of what a GPU has free, subtracts the weights, and divides by the bytes a token costs
(``model_executor/pool_configurator.py``, ``mem_cache/kv_cache_configurator.py``, ``mem_cache/pool_host``). The formulas
are in ``docs/engine.md``. How fast it then is: ``throughput``.

All counts are of one attention group (``data_parallel_attention`` of them make a server), all bytes of one GPU, unless
they say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import Role
from rollout.engine.hisparse import ADMITTED_OUTPUT as HISPARSE_ADMITTED_OUTPUT
from rollout.engine.hisparse import PAGE_TOKENS, HiSparseConfig
from rollout.engine.model_shape import ModelShape

Version = Literal["0.5.16", "0.5.23"]
INDEX_BYTES = 4
"""Of an int32."""
ADMITTED_OUTPUT = 4096
"""Output tokens that SGLang wants room for, at most, before it lets a request in. With HiSparse servers are started
with fewer (``hisparse.RESERVE``)."""
NEW_TOKEN_TENTHS = 7
"""Of these, SGLang keeps so many tenths free for each request that runs; with HiSparse that does not decay."""


class CapacityError(ValueError):
    """The engine can't serve the model on such a machine; names the settings to change."""


@dataclass(frozen=True)
class Workload:
    """Requests of one length, all as long as they get: what is admitted then never has to be taken back."""

    prompt: int
    output: int

    @property
    def context(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class PoolPlan:
    """What a server of an engine allocates."""

    weight_bytes: int
    budget_bytes: int
    """For the KV pool, after the weights."""
    page: int
    """Tokens that are allocated together."""
    token_bytes: int
    """That SGLang counts for a token of the pool."""
    gpu_token_bytes: float
    """That a token of the pool takes in truth: 0.5.16 leaves out what HiSparse's larger index costs."""
    tokens: int
    """Of the pool on the GPU (``max_total_num_tokens``)."""
    logical_tokens: int
    """That requests may hold: with HiSparse those of the host pool."""
    hot_tokens: int | None
    """GPU tokens that a running request holds with HiSparse; None without."""
    host_bytes: int
    """Pinned memory of this GPU's process."""
    slot_bytes: int
    """GPU memory for tables of one request slot, outside of the budget."""
    prefills: bool
    """Whether prompts are computed here, not sent by a prefill server."""
    slots: int
    """Requests that an attention group runs at most (``max_running_requests``)."""

    @property
    def gpu_bytes(self) -> int:
        """Pool and tables."""
        return round(self.tokens * self.gpu_token_bytes) + self.slots * self.slot_bytes

    def entering_tokens(self, load: Workload) -> int:
        """GPU tokens that SGLang wants room for to let a request in.

        With HiSparse a decode server gets a prompt's KV into its host pool.
        """
        if not self.prefills:
            return 0 if self.hot_tokens is None else self.hot_tokens + PAGE_TOKENS
        admitted = ADMITTED_OUTPUT if self.hot_tokens is None else HISPARSE_ADMITTED_OUTPUT
        return _pages(load.prompt + min(load.output, admitted), self.page)

    def free_tokens(self, load: Workload) -> int:
        """GPU tokens that are kept free, with HiSparse, for each request that runs: a page, or what SGLang reserves
        where it lets prompts in."""
        reserved = -(-NEW_TOKEN_TENTHS * min(load.output, HISPARSE_ADMITTED_OUTPUT) // 10)
        return max(PAGE_TOKENS, reserved) if self.prefills else PAGE_TOKENS

    def requests(self, load: Workload) -> int:
        """Requests that run together in an attention group without one being taken back.

        With HiSparse a request holds its whole prompt on the GPU while that is computed, then its hot buffer; SGLang
        lets it in when prompt and some output have room beside the others and what is kept free for those.
        """
        whole = _pages(load.context, self.page)
        fit = self.logical_tokens // whole
        if self.hot_tokens is not None:
            hot = min(self.hot_tokens, whole)
            entering = max(self.entering_tokens(load), hot)
            others = (self.tokens - entering) // (hot + self.free_tokens(load))
            fit = min(fit, 0 if entering > self.tokens else 1 + others)
        return min(fit, self.slots)


def predict_pools(
    config: EngineConfig,
    shape: ModelShape,
    gpu_bytes_free: int,
    weight_bytes: int | None = None,
    version: Version = "0.5.23",
    role: Role = "both",
) -> PoolPlan:
    """The pools of one server (of a role: ``config.for_role(...)``).

    Args:
        gpu_bytes_free: of each GPU, before the weights are loaded.
        weight_bytes: of each GPU, where measured; else computed.
        version: of SGLang; 0.5.16 counts bytes differently.
        role: a decode server gets prompts computed.

    Raises:
        CapacityError: the weights leave no room, or ``memory_fraction`` and ``max_total_tokens`` are both unset.
    """
    weights = weights_per_gpu(shape, config) if weight_bytes is None else weight_bytes
    token_bytes = counted_token_bytes(config, shape, version)
    page = page_tokens(config, shape)
    if config.memory_fraction is None:
        if config.max_total_tokens is None:
            raise CapacityError(
                "engine.memory_fraction and engine.max_total_tokens: set one, so that the pool has a size"
            )
        budget = gpu_bytes_free - weights
    else:
        budget = round(gpu_bytes_free * config.memory_fraction) - weights
    tokens = max(0, budget) // token_bytes
    if config.max_total_tokens is not None:
        tokens = min(tokens, config.max_total_tokens)
    tokens = tokens // page * page
    if tokens == 0:
        fraction = "all" if config.memory_fraction is None else f"engine.memory_fraction={config.memory_fraction}"
        raise CapacityError(
            f"{gigabytes(weights)} of weights leave no room for KV in {fraction} of {gigabytes(gpu_bytes_free)} a GPU: "
            "raise engine.memory_fraction or engine.tensor_parallel"
        )
    sparse = config.hisparse
    entry = entry_bytes(config, shape)
    ratio = 1 if sparse is None else sparse.host_to_device_ratio
    return PoolPlan(
        weight_bytes=weights,
        budget_bytes=budget,
        page=page,
        token_bytes=token_bytes,
        gpu_token_bytes=_allocated_token_bytes(config, shape, version),
        tokens=tokens,
        logical_tokens=tokens * ratio,
        hot_tokens=None if sparse is None else sparse.buffer_tokens,
        host_bytes=_host_bytes(config, tokens, entry * shape.layers),
        slot_bytes=_slot_bytes(config, shape, sparse),
        prefills=role != "decode",
        slots=min(max(1, config.max_running_requests // config.data_parallel_attention), tokens // 2),
    )


def weights_per_gpu(shape: ModelShape, config: EngineConfig) -> int:
    """Bytes of weights: experts and MLPs are split over all GPUs of a server, attention over those of its group."""
    tp, dp = config.tensor_parallel, config.data_parallel_attention
    group = tp // dp
    products = shape.mlp_weights(1) / tp + shape.sharded_attention_weights / group + shape.replicated_attention_weights
    embeddings = shape.vocab * shape.hidden * (1 / group if shape.tied_embeddings else 1 / group + 1 / tp)
    return round(products * shape.weight_bytes + embeddings * max(2, shape.weight_bytes))


def kv_dtype(config: EngineConfig) -> str:
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "bfloat16" if config.dtype == "auto" else config.dtype


def entry_bytes(config: EngineConfig, shape: ModelShape) -> int:
    """KV of one token in one layer on one GPU."""
    return shape.entry_bytes(kv_dtype(config), config.tensor_parallel // config.data_parallel_attention)


def counted_token_bytes(config: EngineConfig, shape: ModelShape, version: Version = "0.5.23") -> int:
    """What SGLang divides its budget by.

    0.5.16 leaves out the scales of fp8 latents, HiSparse's larger index, and that layers share indices.
    """
    if version == "0.5.16" and shape.latent is not None:
        latent = shape.latent.rank + shape.latent.rope
        size = 1 if kv_dtype(config).startswith("fp8") else 2
        return latent * size * shape.layers + shape.indexer_bytes(shared_layers_stored=True)
    return round(_allocated_token_bytes(config, shape, version))


def page_tokens(config: EngineConfig, shape: ModelShape) -> int:
    """SGLang's page size: that of the sparse kernels, or what is asked for, or 1."""
    asked = config.extra_args.get("page-size", config.extra_args.get("page_size"))
    if asked is not None:
        return int(asked)
    return PAGE_TOKENS if shape.indexer is not None and config.device == "cuda" else 1


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def _allocated_token_bytes(config: EngineConfig, shape: ModelShape, version: Version) -> float:
    """GPU bytes that a token of the pool takes.

    With HiSparse the index has keys for every token of the host pool, and in all layers.
    """
    keys = shape.indexer_bytes(shared_layers_stored=config.hisparse is not None or version == "0.5.16")
    ratio = 1 if config.hisparse is None else config.hisparse.host_to_device_ratio
    return entry_bytes(config, shape) * shape.layers + keys * ratio


def _host_bytes(config: EngineConfig, tokens: int, token_bytes: int) -> int:
    if config.hisparse is not None:
        return (tokens * config.hisparse.host_to_device_ratio + PAGE_TOKENS) * token_bytes
    if config.hicache is None:
        return 0
    if config.hicache.size_gb is not None:
        return config.hicache.size_gb * 10**9
    assert config.hicache.ratio is not None
    return round(tokens * config.hicache.ratio) * token_bytes


def _slot_bytes(config: EngineConfig, shape: ModelShape, sparse: HiSparseConfig | None) -> int:
    """A request's row of token positions; with HiSparse also what lies in its hot buffer in each layer, and where."""
    positions = INDEX_BYTES * config.context_length
    if sparse is None:
        return positions
    per_layer = (
        2 * INDEX_BYTES * sparse.buffer_tokens + 2 * sparse.device_buffer_size
    )  # tokens, places; LRU order (int16)
    tables = 2 * INDEX_BYTES * (sparse.buffer_tokens + config.context_length + PAGE_TOKENS)  # of int64
    chosen = 2 * INDEX_BYTES * (shape.index_topk or 0)
    return positions + shape.layers * per_layer + tables + chosen


def _pages(tokens: int, page: int) -> int:
    return -(-tokens // page) * page
