"""A capacity plan in words and tables."""

from __future__ import annotations

from collections.abc import Iterator

from rl.plan import Plan, PlanConfig, host_bytes
from rollout.engine.capacity import gigabytes, kv_dtype
from rollout.engine.throughput import decode_intensity, misses, plateau


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
            f"{missed:,.0f} of {shape.indexer.topk:,} entries a layer and token at locality {config.locality:g}",
        )


def curve_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of tokens a second by concurrency, of one server."""
    if plan.without is None:
        return ["concurrent", "running", "tok/s", "step ms"], [
            [f"{p.concurrency}", f"{p.running}", f"{p.tokens_per_s:,.0f}", f"{p.step.total * 1e3:.1f}"]
            for p in plan.server.curve
        ]
    rows = []
    for dense, sparse in zip(plan.without.curve, plan.server.curve, strict=True):
        left = [f"{dense.concurrency}", f"{dense.running}", f"{dense.tokens_per_s:,.0f}", f"{sparse.running}"]
        step, swap = sparse.step.total * 1e3, sparse.step.swap * 1e3
        rows.append([*left, f"{sparse.tokens_per_s:,.0f}", f"{step:.1f}", f"{swap:.1f}"])
    columns = ["concurrent", "running", "tok/s", "| HiSparse: running", "tok/s", "step ms", "swap ms"]
    return columns, rows


def verdict(config: PlanConfig, plan: Plan) -> str:
    """Whether HiSparse is worth it, in a sentence or two."""
    load, indexer, comparison = config.load, plan.shape.indexer, plan.comparison
    if indexer is None:
        return f"HiSparse: {plan.shape.model_type} attends to every token, there is nothing to swap."
    if comparison is None:
        return "HiSparse is off: engine=gpu_hisparse compares the two."
    if load.context <= indexer.topk:
        return f"HiSparse is not worth it: below {indexer.topk:,} tokens attention is dense and every entry stays hot."
    rates = f"{plateau(comparison.sparse):,.0f} tok/s at best with it, {plateau(comparison.without):,.0f} without"
    if comparison.gain <= 1 or comparison.crossover is None:
        return f"HiSparse is not worth it: {rates}."
    return (
        f"HiSparse is worth it from {comparison.crossover} concurrent requests a server: {rates} "
        f"({comparison.gain:.2f} x); below that it is slower."
    )


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
