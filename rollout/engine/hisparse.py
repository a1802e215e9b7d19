"""HiSparse: of a request's KV cache only a hot buffer stays on the GPU, all of it lies in pinned host memory.

For models whose attention selects its tokens (DeepSeek Sparse Attention: DeepSeek V3.2, GLM-5). The constraints are
those of SGLang 0.5.16 and 0.5.23 (``arg_groups/hisparse_hook.py``, ``mem_cache/sparsity/factory.py``,
``managers/hisparse_coordinator.py``), where they show after the weights have been loaded, or as a crash under load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from pydantic import Field

from rollout.engine.disaggregation import Role
from rollout.engine.settings import Argument, Settings

PAGE_TOKENS = 64
"""Tokens a page of the KV pool of a DSA model has on CUDA."""
KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3")
BACKENDS = {"bfloat16": ("flashmla_sparse",), "fp8_e4m3": ("flashmla_kv", "flashinfer_sparse_mla")}
"""Attention kernels that read the hot buffers, by KV dtype; SGLang's own choice first."""
KERNELS = ("dsa-prefill-backend", "dsa-decode-backend")
TO_HOST = ("mooncake", "mooncake_tcp", "nixl")
"""Ways to send KV caches that can end in host memory; mori and Ascend register it as a device's."""
EXCLUDED = {
    "enable-mixed-chunk": "a batch that mixes prefill and decode has no hot buffers",
    "disaggregation-decode-enable-radix-cache": "the decode server keeps no prefixes with HiSparse",
    "disaggregation-decode-extra-slots": "requests beyond max_running_requests would hold hot buffers, too",
    "enable-hierarchical-cache": "HiCache stands on the radix cache, which HiSparse forbids",
    "speculative-adaptive": "the swap state has a fixed size",
    "enable-kv-cache-sharding": "every rank holds all of a request's KV",
}
"""SGLang's arguments that HiSparse refuses, and why."""
ADMITTED_OUTPUT = 128
"""Output tokens that SGLang wants room for, at most, before it lets a request in; 4,096 without ``RESERVE``."""
RESERVE = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(ADMITTED_OUTPUT), "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "1"}
"""Of the environment: what SGLang keeps free for the growth of each request that runs. Growth goes to the host and
takes no buffer, so a share of 128 tokens does (by default of 4,096, for which fewer would run). But SGLang takes
requests back when fewer pages are free than the next step could need, one a request, and a server with HiSparse dies of
that: so the share does not decay."""


class HiSparseConfig(Settings):
    """Sizes of the two tiers and of the kernel between them."""

    device_buffer_size: int = Field(4096, gt=0)
    """Tokens of a request that stay on the GPU, at least the model's top-k. Larger: fewer misses and fewer requests."""
    host_to_device_ratio: int = Field(8, gt=0)
    """Tokens of the host pool over tokens of the GPU's pool. The indexer's keys are on the GPU for all of them."""
    swap_in_block_size: int = Field(512, gt=0, le=1024)
    """Threads of a block of the kernel that fetches what is missing."""
    top_k: int | None = Field(None, gt=0)
    """Tokens that a layer attends to, for models that do not say; where one does, that counts (``index_topk``)."""

    def arguments(self, top_k: int) -> dict[str, Argument]:
        sizes = {
            "top_k": top_k,
            "device_buffer_size": self.device_buffer_size,
            "host_to_device_ratio": self.host_to_device_ratio,
            "swap_in_block_size": self.swap_in_block_size,
        }
        return {"enable-hisparse": True, "hisparse-config": json.dumps(sizes)}

    @property
    def buffer_tokens(self) -> int:
        """GPU tokens that a running request holds once it is as long as its buffer: that and a page for new tokens."""
        return self.device_buffer_size + PAGE_TOKENS

    @property
    def needed_tokens(self) -> int:
        """GPU tokens that must be there for each running request. Where its next token begins a page, SGLang wants one
        free, though HiSparse takes none, and else takes requests back: that ends a decode server (its pool can't copy
        KV out, ``HiSparseDSATokenToKVPool.get_cpu_copy``)."""
        return self.buffer_tokens + PAGE_TOKENS


def problems(
    hisparse: HiSparseConfig, kv_dtype: str, max_running: int, max_total: int | None, extra: Mapping[str, Argument]
) -> Iterator[str]:
    """What in an engine's settings HiSparse can't run with, naming the settings to change.

    Args:
        extra: further arguments of SGLang's, names with dashes.
    """
    size = hisparse.device_buffer_size
    if size % PAGE_TOKENS:
        near = max(1, round(size / PAGE_TOKENS)) * PAGE_TOKENS
        yield f"hisparse.device_buffer_size={size} is not a whole number of {PAGE_TOKENS}-token pages: set it to {near}"
    if hisparse.top_k is not None and size < hisparse.top_k:
        yield _too_small(size, f"hisparse.top_k={hisparse.top_k}")
    if kv_dtype not in KV_DTYPES:
        yield f"kv_dtype={kv_dtype} does not go with hisparse: set it to bfloat16 or fp8_e4m3, or hisparse to null"
    for name, why in EXCLUDED.items():
        if extra.get(name):
            yield f"extra_args.{name} does not go with hisparse ({why}): drop the one or the other"
    if int(extra.get("dcp-size", 1)) > 1:
        yield "extra_args.dcp-size does not go with hisparse (its host pool is not split): set one of them to 1 or null"
    if int(extra.get("speculative-eagle-topk", 1)) != 1:
        yield "extra_args.speculative-eagle-topk must be 1 with hisparse (no trees of drafts): change one of the two"
    yield from _backend_problems(kv_dtype, extra)
    needed = hisparse.needed_tokens
    if max_total is not None and max_running * needed > max_total:
        yield (
            f"max_running_requests={max_running} hot buffers of {hisparse.buffer_tokens} tokens, and a free page of "
            f"{PAGE_TOKENS} for each, are {max_running * needed} tokens, more than max_total_tokens={max_total}; "
            f"SGLang dies when one finds no room: set max_running_requests to {max_total // needed} at most, or raise "
            "max_total_tokens"
        )


def transfer_problems(transfer_backend: str, kv_dtype: str, prefill_extra: Mapping[str, Argument]) -> Iterator[str]:
    """What keeps a prefill server's KV cache from arriving in a decode server's host pool.

    Args:
        prefill_extra: further arguments of the prefill servers, names with dashes.
    """
    if transfer_backend not in TO_HOST:
        yield (
            f"disaggregation.transfer_backend={transfer_backend} can't write to the host pool of a decode server with "
            f"hisparse: use one of {', '.join(TO_HOST)}, or set hisparse to null"
        )
    if kv_dtype == "fp8_e4m3":
        for name in KERNELS:
            kernel = prefill_extra.get(name)
            if kernel is not None and kernel not in BACKENDS[kv_dtype]:
                yield (
                    f"disaggregation.prefill: extra_args.{name}={kernel} stores fp8 in another layout than HiSparse's "
                    f"kernels on the decode server read: use one of {', '.join(BACKENDS[kv_dtype])}, or leave it out"
                )


def apart_arguments(role: Role, kv_dtype: str, extra: Mapping[str, Argument]) -> dict[str, Argument]:
    """What a server needs beside, where the decode servers run HiSparse.

    A decode server's requests each take a hot buffer as soon as their KV cache is there, so none may wait beyond those
    that run (SGLang lets up to twice as many; aborted while they wait, 0.5.16 never frees their buffers). What a
    prefill server stores is written into the host pool as it is, so both must store alike: left to themselves, on
    Blackwell, they would not (fp8 for auto; and fp8 without scales, trtllm's, on the prefill server).

    Args:
        extra: the server's further arguments; what they say stays.
    """
    options: dict[str, Argument] = {"kv-cache-dtype": "bfloat16"} if kv_dtype == "auto" else {}
    if role == "decode":
        return options | {"disaggregation-decode-extra-slots": 0}
    if kv_dtype == "fp8_e4m3":
        named = {name.replace("_", "-") for name in extra}
        options |= {name: BACKENDS[kv_dtype][0] for name in KERNELS if name not in named}
    return options


def model_problems(hisparse: HiSparseConfig, index_topk: int | None, model_type: str) -> Iterator[str]:
    """What the model itself rules out."""
    if index_topk is None:
        yield f"hisparse: {model_type} attends to every token (no index_topk), there is nothing to swap: set it to null"
        return
    if hisparse.top_k is not None and hisparse.top_k != index_topk:
        yield f"hisparse.top_k={hisparse.top_k}, but the model's index_topk={index_topk} counts: leave top_k out"
    if hisparse.device_buffer_size < index_topk:
        yield _too_small(hisparse.device_buffer_size, f"the model's index_topk={index_topk}")


def _too_small(size: int, needed: str) -> str:
    return f"hisparse.device_buffer_size={size} holds fewer tokens than {needed}: raise device_buffer_size"


def _backend_problems(kv_dtype: str, extra: Mapping[str, Argument]) -> Iterator[str]:
    for name in KERNELS:
        backend = extra.get(name)
        fitting = [dtype for dtype, backends in BACKENDS.items() if backend in backends]
        if backend is None or kv_dtype in fitting:
            continue
        if not fitting:
            known = ", ".join(backend for backends in BACKENDS.values() for backend in backends)
            yield f"extra_args.{name}={backend} can't read HiSparse's buffers: use one of {known}, or leave it out"
        else:
            yield (
                f"extra_args.{name}={backend} reads {fitting[0]}, and kv_dtype={kv_dtype}: set kv_dtype so, or leave "
                f"{name} out"
            )
