"""The kernels of a decoding step that the capacity planner counts, each timed alone, from a CUDA graph as in decoding.

HiSparse's swap-in, by requests and misses: what a call costs whatever it fetches, and how fast it fetches. The experts'
first product, by tokens and tiles: whether every further tile of an expert reads its weights anew, and what SGLang's
tiles for large batches cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor

from benchmarks.engine.checkpoint import ModelSizes
from benchmarks.engine.moe_tiles import DECODING, PREFILLING
from benchmarks.engine.pools import PAGE
from benchmarks.trainer.measure import median_seconds

REQUESTS, MISSES = (8, 32, 128, 256), (0, 107, 434, 1056)
TOKENS = (64, 96, 128, 192, 256, 384, 512)
POSITIONS = 16_384
HOST_ROWS = 2**18
BLOCK_SIZE = 960
"""SGLang's default ``swap_in_block_size``."""
ROUNDS = 5


def kernels(sizes: ModelSizes, row_bytes: int) -> dict[str, Any]:
    """Seconds of each, and what the planner takes of them."""
    calls = [
        {"requests": n, "misses": m, "seconds": swap_in(n, m, sizes.top_k, row_bytes)} for n in REQUESTS for m in MISSES
    ]
    return {"swap_in": calls, **fetching(calls, row_bytes), "experts": experts(sizes)}


def fetching(calls: Sequence[Mapping[str, Any]], row_bytes: int) -> dict[str, float]:
    """What a call costs without misses, and bytes a second of the others beyond that; at the most requests."""
    most = max(call["requests"] for call in calls)
    seconds = {call["misses"]: call["seconds"] for call in calls if call["requests"] == most}
    missed = max(seconds)
    speed = most * missed * row_bytes / (seconds[missed] - seconds[0])
    return {"swap_in_bytes_per_s": speed, "swap_overhead_s": seconds[0]}


def alternating(requests: int, positions: int, top_k: int, misses: int) -> list[Int32[Tensor, "requests top_k"]]:
    """Two selections of positions a request, of which ``misses`` are in one alone."""
    chosen = torch.stack([torch.randperm(positions)[: top_k + misses] for _ in range(requests)]).int()
    return [chosen[:, :top_k].contiguous(), chosen[:, misses:].contiguous()]


def swap_in(requests: int, misses: int, top_k: int, row_bytes: int) -> float:
    """Seconds of a call for one layer, the hot buffers as large as the top-k."""
    from sglang.jit_kernel.hisparse import load_cache_to_device_buffer_mla

    slots, device = top_k + PAGE, "cuda"
    host = torch.empty(HOST_ROWS, row_bytes // 2, dtype=torch.bfloat16, pin_memory=True)
    found = torch.empty(requests, top_k, dtype=torch.int32, device=device)
    state = {
        "device_buffer_tokens": torch.full((requests, slots), -1, dtype=torch.int32, device=device),
        "host_cache_locs": torch.randint(HOST_ROWS, (requests, POSITIONS + 1), device=device),
        "device_buffer_locs": torch.arange(requests * slots, dtype=torch.int32, device=device).view(requests, slots),
        "host_cache": host,
        "device_buffer": torch.empty(requests * slots, row_bytes // 2, dtype=torch.bfloat16, device=device),
        "top_k_device_locs": found,
        "req_pool_indices": torch.arange(requests, device=device),
        "seq_lens": torch.full((requests,), POSITIONS + 1, device=device),
        "lru_slots": torch.arange(top_k, dtype=torch.int16, device=device).repeat(requests, 1),
        "num_real_reqs": torch.tensor([requests], dtype=torch.int32, device=device),
    }

    def call(chosen: Tensor) -> Callable[[], object]:
        return lambda: load_cache_to_device_buffer_mla(
            top_k_tokens=chosen,
            item_size_bytes=row_bytes,
            num_top_k=top_k,
            hot_buffer_size=top_k,
            block_size=BLOCK_SIZE,
            **state,
        )

    return _seconds([call(chosen.to(device)) for chosen in alternating(requests, POSITIONS, top_k, misses)])


def experts(sizes: ModelSizes) -> list[dict[str, Any]]:
    """The first product of one layer's experts, each token's chosen evenly; bytes are of the weights, each tile's."""
    import triton.language as tl
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    count, per_token = sizes.experts, sizes.experts_per_token
    weights = torch.empty(count, 2 * sizes.expert_size, sizes.hidden, dtype=torch.bfloat16, device="cuda").normal_()
    each = 2 * 2 * sizes.expert_size * sizes.hidden
    points = []
    for tokens in TOKENS:
        hidden = torch.randn(tokens, sizes.hidden, dtype=torch.bfloat16, device="cuda")
        chosen = torch.rand(tokens, count, device="cuda").topk(per_token).indices.int()
        shares = torch.ones(tokens, per_token, device="cuda")
        out = torch.empty(tokens * per_token, 2 * sizes.expert_size, dtype=torch.bfloat16, device="cuda")
        for tile in (DECODING, PREFILLING):
            order, of_tiles, padded = moe_align_block_size(chosen, tile["BLOCK_SIZE_M"], count)

            def product(
                tile: dict[str, int] = tile,
                placed: tuple[Tensor, Tensor, Tensor] = (order, of_tiles, padded),
                given: tuple[Tensor, Tensor, Tensor, Tensor] = (hidden, out, shares, chosen),
            ) -> None:
                x, y, share, ids = given
                scales, quantized = (None, None, None), (False, False, False, False, False)
                invoke_fused_moe_kernel(
                    x, weights, None, y, *scales, share, ids, *placed, False, per_token, tile, tl.bfloat16, *quantized,
                    filter_expert=False,
                )  # fmt: skip

            seconds = _seconds([product])
            tiles = int(padded.item()) // tile["BLOCK_SIZE_M"]
            rates = {"seconds": seconds, "tiles": tiles, "bytes_per_s": tiles * each / seconds}
            points.append({"tokens": tokens, "tile_rows": tile["BLOCK_SIZE_M"]} | rates)
    return points


def _seconds(actions: Sequence[Callable[[], object]]) -> float:
    """Of one of them, run in turn."""
    for action in actions:
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for action in actions:
                action()
    return median_seconds(graph.replay, 5) / (ROUNDS * len(actions))
