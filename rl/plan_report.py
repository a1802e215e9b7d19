"""A capacity plan in words and tables."""

from __future__ import annotations

from collections.abc import Iterator

from rl.plan import Plan, PlanConfig, host_bytes
from rollout.engine import expert_tiles
from rollout.engine.capacity import entry_bytes, gigabytes, kv_dtype
from rollout.engine.throughput import Comparison, Point, decode_intensity, misses, plateau


def facts(config: PlanConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """The plan's figures, each with what it is of."""
    shape, server, load = plan.shape, plan.server, config.load
    settings, pools = server.settings, server.pools
    size = gigabytes(shape.parameters * shape.weight_bytes)
    parameters, active = shape.parameters / 1e9, shape.active_parameters / 1e9
    yield "model", f"{shape.model_type}: {parameters:,.1f} B parameters, {active:,.1f} B active, {size}"
    yield "weights", f"{gigabytes(pools.weight_bytes)} a GPU"
    entry = pools.token_bytes if plan.without is None else plan.without.pools.token_bytes
    yield "KV a token", f"{entry:,} B a GPU ({kv_dtype(settings)}, {shape.layers} layers{_kinds(plan)})"
    yield (
        "GPU pool",
        (
            f"{pools.tokens:,} tokens = {gigabytes(pools.tokens * pools.gpu_token_bytes)} a GPU; "
            f"{gigabytes(pools.slots * pools.slot_bytes)} of tables for {pools.slots} requests"
        ),
    )
    beyond = pools.tokens * pools.gpu_token_bytes - pools.budget_bytes
    if beyond > 0:
        yield (
            "over budget",
            f"{gigabytes(beyond)} more than this SGLang counts: lower engine.memory_fraction by as much",
        )
    needed = host_bytes(config, plan)
    if needed:
        yield "host pool", f"{pools.logical_tokens:,} tokens a group; {gigabytes(needed)} of pinned memory in all"
    yield (
        "requests",
        (
            f"{server.requests(load):,} a server at {load.prompt:,} + {load.output:,} tokens"
            + ("" if plan.without is None else f"; without HiSparse {plan.without.requests(load):,}")
        ),
    )
    if plan.prefill is not None:
        yield (
            "prefill server",
            (
                f"{plan.prefill.pools.tokens:,} tokens a group"
                + (", with prefix cache" if plan.prefill.settings.prefix_cache else "")
            ),
        )
    if shape.latent is not None:
        yield "MLA", _mla(plan)
    if settings.hisparse is not None and shape.indexer is not None:
        length = load.prompt + load.output / 2
        missed = misses(shape.indexer.topk, settings.hisparse.device_buffer_size, length, config.locality)
        yield (
            "swap",
            f"{missed:,.0f} of {shape.indexer.topk:,} entries a layer and token at locality {config.locality:g}, "
            f"{missed * shape.layers * entry_bytes(settings, shape) / 1e6:,.1f} MB a token",
        )


def notes(plan: Plan) -> Iterator[str]:
    """What the curve does not show."""
    shape, settings = plan.shape, plan.server.settings
    curves = [plan.curve] if plan.worth is None else [plan.worth.asked.without, plan.worth.asked.sparse]
    running = max(point.running for curve in curves for point in curve)
    if expert_tiles.outgrown(settings, shape, running):
        count, width = expert_tiles.local_experts(settings, shape)
        yield (
            f"Note: beyond {count} requests a step has more tokens than a GPU has experts. Where SGLang has no tuned "
            f"tiles (E={count},N={width},device_name=...json), it then takes some that made a step of 256 tokens over "
            "128 experts half as long again on an H200. The curve is without that; engine.moe_configs gives it others."
        )


def curve_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of tokens a second by concurrency, of one server."""
    if plan.worth is None:
        return ["concurrent", "running", "tok/s", "step ms"], [
            [f"{p.concurrency}", f"{p.running}", f"{p.tokens_per_s:,.0f}", f"{p.step.total * 1e3:.1f}"]
            for p in plan.curve
        ]
    rows = []
    for dense, sparse in zip(plan.worth.asked.without, plan.worth.asked.sparse, strict=True):
        left = [f"{dense.concurrency}", f"{dense.running}", f"{dense.tokens_per_s:,.0f}", f"{sparse.running}"]
        step, swap = sparse.step.total * 1e3, sparse.step.swap * 1e3
        rows.append([*left, f"{sparse.tokens_per_s:,.0f}", f"{step:.1f}", f"{swap:.1f}", _times(dense, sparse)])
    columns = ["concurrent", "running", "tok/s", "| HiSparse: running", "tok/s", "step ms", "swap ms", "gain"]
    return columns, rows


def verdict(config: PlanConfig, plan: Plan) -> Iterator[str]:
    """Whether to turn HiSparse on, a sentence a line."""
    load, indexer, worth = config.load, plan.shape.indexer, plan.worth
    if indexer is None:
        yield f"HiSparse: leave it off. {plan.shape.model_type} attends to every token, there is nothing to swap."
        return
    if worth is None:
        yield "HiSparse: not compared, as engine.hisparse is null. engine=gpu_hisparse compares the two."
        return
    if load.context <= indexer.topk:
        yield f"HiSparse: leave it off. Up to {indexer.topk:,} tokens attention is dense and every entry stays hot."
        return
    if plateau(worth.every.without) == 0:
        yield f"HiSparse: turn it on. Without it not one request of {load.context:,} tokens fits."
        return
    where = f"At {load.context:,} tokens a request and locality {config.locality:g}"
    rates = f"{plateau(worth.every.sparse):,.0f} tok/s at best with it, {plateau(worth.every.without):,.0f} without"
    since = worth.every.crossover
    if since is None:
        yield f"HiSparse: leave it off. {where} it loses with any number of requests: {rates}."
    else:
        yield f"HiSparse: {_advice(worth.asked, since)} {where}: {rates} ({worth.every.gain:.2f} x)."
    if worth.break_even is None:
        yield "No locality would change that."
    elif worth.break_even == 0:
        yield "With all running that fit it wins at any locality."
    else:
        yield f"With all running that fit it wins from a locality of {worth.break_even:.2f} on: measure your model's."
    yield "This is decoding alone: HiSparse keeps no prefixes, so with many turns compare it with engine=hicache."


def _advice(asked: Comparison, since: int) -> str:
    """By the concurrencies asked for, of which some or all may lie below the least that is worth it."""
    pairs = list(zip(asked.without, asked.sparse, strict=True))
    below = [f"{_times(*pair)} at {pair[0].concurrency}" for pair in pairs if pair[0].concurrency < since]
    losing = " to ".join(dict.fromkeys([below[0], below[-1]])) if below else ""
    if len(below) == len(pairs):
        return f"leave it off for what was asked ({losing}); it is worth it from {since} requests a server on."
    if not below:
        return f"turn it on. It is worth it from {since} requests a server on."
    return f"turn it on if a server runs at least {since} requests; with fewer it loses ({losing})."


def _times(dense: Point, sparse: Point) -> str:
    return f"{sparse.tokens_per_s / dense.tokens_per_s:.2f} x" if dense.tokens_per_s else ""


def _kinds(plan: Plan) -> str:
    shape = plan.shape
    if shape.latent is None:
        return f", {shape.kv_heads} KV heads of {shape.head_dim}"
    text = f", latent {shape.latent.rank} + rope {shape.latent.rope}"
    if shape.indexer is None:
        return text
    text += f", indexer {shape.indexer.key_bytes} B in {shape.indexer.layers}"
    sparse = plan.server.settings.hisparse
    if sparse is None:
        return text
    return text + f"; with HiSparse {plan.server.pools.token_bytes:,} B for {sparse.host_to_device_ratio} of them"


def _mla(plan: Plan) -> str:
    intensity = decode_intensity(plan.shape, 10**6)
    text = f"decode in MQA mode, {intensity:.1f} FLOP/B in bf16"
    if plan.shape.indexer is None:
        return text
    topk = plan.shape.indexer.topk
    return f"up to {topk:,} tokens prefill attends densely (MHA mode), above to {topk:,} of them; {text}"
