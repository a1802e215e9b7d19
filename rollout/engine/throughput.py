"""How fast a server decodes, by the number of requests it runs, with HiSparse and without: a roofline of a step.

A step generates one token for each running request. On each GPU it reads the weights it multiplies with, the index and
the KV entries that attention selects; with HiSparse what is selected but not in a request's hot buffer comes from the
host over PCIe first. The formulas, symbol by symbol, are in ``docs/engine.md``; they hold while nothing is prefilled
unless the machine says how fast it prefills.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout.engine import expert_tiles
from rollout.engine.capacity import PoolPlan, Workload, entry_bytes
from rollout.engine.config import EngineConfig
from rollout.engine.model_shape import ModelShape

BISECTIONS = 10
"""Of a locality: to a thousandth."""


@dataclass(frozen=True)
class Machine:
    """One GPU and its link to the host, as measured; the defaults are an H200's."""

    hbm_bandwidth: float = 4.0e12
    """Bytes a second that kernels read."""
    host_bandwidth: float = 55e9
    """Bytes a second from pinned host memory, each GPU's own link."""
    flops: float = 700e12
    """Of dense matrix products."""
    step_overhead_s: float = 1.5e-3
    """Of a step, whatever it computes: launches, scheduling, communication."""
    request_overhead_s: float = 0.0
    """Of a step, for each request of an attention group: sampling, bookkeeping, what the roofline does not know."""
    swap_overhead_s: float = 30e-6
    """Of HiSparse's swap-in in each layer, whatever it fetches: it looks the top-k up in the hot buffer and keeps the
    order of use. Seen on an H200 at 8 and 32 requests: a step with HiSparse less one without, less the bytes."""
    expert_tile_rows: int | None = None
    """Tokens of an expert that its kernel multiplies together, reading the expert's weights anew for the next ones;
    None: as many as SGLang takes (``expert_tiles``)."""
    prefill_tokens_per_s: float | None = None
    """None: only decoding is counted."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of one decode step."""

    weights: float
    """Reading weights or multiplying with them, what takes longer."""
    attention: float
    swap: float
    """Finding which KV entries are missing, and fetching them from the host as far as nothing hides it."""
    overhead: float

    @property
    def total(self) -> float:
        return self.weights + self.attention + self.swap + self.overhead


@dataclass(frozen=True)
class Point:
    concurrency: int
    """Requests in the server or its queue."""
    running: int
    tokens_per_s: float
    """Output tokens of the server."""
    step: StepCost


@dataclass(frozen=True)
class Comparison:
    """Two curves of one model and machine, without HiSparse and with it."""

    without: Sequence[Point]
    sparse: Sequence[Point]

    @property
    def crossover(self) -> int | None:
        """The least concurrency from which on HiSparse is never slower; None where it is slower at the end."""
        since = None
        for a, b in zip(self.without, self.sparse, strict=True):
            if b.tokens_per_s < a.tokens_per_s:
                since = None
            elif since is None:
                since = a.concurrency
        return since

    @property
    def gain(self) -> float:
        """Plateau with HiSparse over the plateau without."""
        return plateau(self.sparse) / plateau(self.without)


def plateau(curve: Sequence[Point]) -> float:
    """The most tokens a second that any concurrency gives."""
    return max(point.tokens_per_s for point in curve)


def break_even(rate: Callable[[float], float], without: float) -> float | None:
    """The least locality with which HiSparse is as fast as without; None where it is slower with any.

    Args:
        rate: tokens a second with HiSparse by locality, not falling.
        without: tokens a second.
    """
    if rate(1.0) < without:
        return None
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if rate(middle) >= without else (middle, high)
    return 0.0 if rate(0.0) >= without else high


def predict_curve(
    config: EngineConfig,
    shape: ModelShape,
    pools: PoolPlan,
    load: Workload,
    concurrencies: Sequence[int],
    machine: Machine | None = None,
    locality: float = 0.95,
) -> list[Point]:
    """Output tokens a second of one server.

    Args:
        pools: of the same config and shape; says how many run, the rest waits.
        concurrencies: of one server.
        locality: share of a layer's top-k tokens that are selected again at the next step.
    """
    machine = Machine() if machine is None else machine
    most = pools.requests(load) * config.data_parallel_attention
    points = []
    for concurrency in concurrencies:
        running = min(concurrency, most)
        step = decode_step(config, shape, running, load, machine, locality)
        rate = running / step.total
        if machine.prefill_tokens_per_s is not None and rate:
            rate = 1 / (1 / rate + load.prompt / load.output / machine.prefill_tokens_per_s)
        points.append(Point(concurrency, running, rate, step))
    return points


def calibrate(
    config: EngineConfig, shape: ModelShape, load: Workload, measured: Mapping[int, float], machine: Machine
) -> Machine:
    """The machine with the two overheads that explain what was measured without HiSparse (least squares, none below 0).

    Args:
        config: without HiSparse, as it was measured.
        measured: tokens a second of decoding alone, by the requests that ran; at least two, all of which fitted.
    """
    assert config.hisparse is None
    assert len(measured) > 1, "two numbers need two measurements"
    bare = replace(machine, step_overhead_s=0.0, request_overhead_s=0.0)
    in_group = np.array([-(-n // config.data_parallel_attention) for n in measured], dtype=float)
    unexplained = [n / rate - decode_step(config, shape, n, load, bare, 1.0).total for n, rate in measured.items()]
    slope, constant = np.polyfit(in_group, np.array(unexplained), 1)
    if slope < 0:
        slope, constant = 0.0, np.mean(unexplained)
    return replace(machine, step_overhead_s=max(0.0, float(constant)), request_overhead_s=float(slope))


def decode_step(
    config: EngineConfig, shape: ModelShape, running: int, load: Workload, machine: Machine, locality: float
) -> StepCost:
    """Seconds of a step that decodes ``running`` requests of a server, at the middle of their outputs."""
    length = load.prompt + load.output / 2
    in_group = -(-running // config.data_parallel_attention)
    weights = _weights_seconds(config, shape, running, machine)
    attention = in_group * _attention_seconds(config, shape, length, machine)
    swap = 0.0
    if config.hisparse is not None and shape.indexer is not None:
        missed = misses(shape.indexer.topk, config.hisparse.device_buffer_size, length, locality)
        transfer = in_group * shape.layers * missed * entry_bytes(config, shape) / machine.host_bandwidth
        shared = 1 - shape.indexer.layers / shape.layers
        hidden = min(shared * transfer, shared * (weights + attention))  # their indices are known a layer ahead
        swap = transfer - hidden + shape.layers * machine.swap_overhead_s
    overhead = machine.step_overhead_s + in_group * machine.request_overhead_s
    return StepCost(weights, attention, swap, overhead)


def misses(topk: int, buffer: int, length: float, locality: float) -> float:
    """Entries that a layer fetches for a request at a step: newly selected ones that its hot buffer does not hold.

    A newly selected token may be any outside of the last top-k; the buffer's other ``buffer - topk`` slots hold some
    that were selected before. Were those no likelier than the rest, a share of (buffer - topk) / (length - topk) would
    hit; what was selected lately is likelier, so this is an upper bound on the misses.
    """
    if length <= buffer or length <= topk:
        return 0.0
    return topk * (1 - locality) * (1 - (buffer - topk) / (length - topk))


def distinct_experts(routed: int, per_token: int, tokens: int) -> float:
    """Experts that a batch touches in a layer, were each token's chosen evenly."""
    return routed * (1 - (1 - per_token / routed) ** tokens)


@functools.cache
def expert_reads(routed: int, per_token: int, tokens: int, rows: int) -> float:
    """Experts that a batch reads in a layer, each as often as its tokens fill tiles of so many rows.

    Were each token's experts chosen evenly, an expert has Binomial(tokens, per_token / routed) of them. Every tile goes
    over all of its expert's weights (SGLang's ``fused_moe_kernel``).
    """
    if rows >= tokens:
        return distinct_experts(routed, per_token, tokens)
    share = per_token / routed
    if share >= 1:
        return float(routed * -(-tokens // rows))
    count = np.arange(tokens + 1)
    odds = np.log((tokens - count[:-1]) / count[1:] * share / (1 - share))
    chance = np.exp(tokens * np.log1p(-share) + np.concatenate([[0.0], np.cumsum(odds)]))
    return float(routed * (chance @ -(-count // rows)))


def _weights_seconds(config: EngineConfig, shape: ModelShape, running: int, machine: Machine) -> float:
    tp, group = config.tensor_parallel, config.tensor_parallel // config.data_parallel_attention
    touched = 1.0
    if shape.experts is not None:
        routed = shape.experts.routed
        rows = machine.expert_tile_rows or expert_tiles.rows(config, shape, running)
        touched = expert_reads(routed, shape.experts.per_token, running, rows) / routed
    attention = shape.sharded_attention_weights / group + shape.replicated_attention_weights
    read = (shape.mlp_weights(touched) / tp + attention) * shape.weight_bytes
    read += shape.vocab * shape.hidden * max(2, shape.weight_bytes) / tp
    in_group = -(-running // config.data_parallel_attention)
    products = running * (shape.active_parameters - group * attention) / tp + in_group * attention
    return max(read / machine.hbm_bandwidth, 2 * products / machine.flops)


def _attention_seconds(config: EngineConfig, shape: ModelShape, length: float, machine: Machine) -> float:
    """Of one request in all layers of one GPU: scoring the whole history, and attending to what is selected."""
    group = config.tensor_parallel // config.data_parallel_attention
    heads = shape.heads / group
    index = shape.indexer
    selected = length if index is None else min(length, index.topk)
    read = shape.layers * selected * entry_bytes(config, shape)
    flops = shape.layers * heads * selected * _flops_per_head_token(shape)
    if index is not None:
        read += length * shape.indexer_bytes()
        flops += index.layers * 2 * length * index.heads * index.head_dim
    return max(read / machine.hbm_bandwidth, flops / machine.flops)


def _flops_per_head_token(shape: ModelShape) -> int:
    if shape.latent is None:
        return 4 * shape.head_dim
    return 2 * (2 * shape.latent.rank + shape.latent.rope)


def decode_intensity(shape: ModelShape, tokens: int, number_bytes: int = 2) -> float:
    """FLOPs a byte of MLA's decode attention in MQA mode, over ``tokens`` of history: 2H(2d+r) / b(d+r) for many."""
    assert shape.latent is not None
    d, r, heads = shape.latent.rank, shape.latent.rope, shape.heads
    flops = 2 * heads * tokens * (d + r) + 2 * heads * tokens * d
    return flops / (number_bytes * heads * (d + r) + number_bytes * tokens * (d + r))
