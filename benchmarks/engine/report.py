"""Tables of a run, from its JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engine.checkpoint import ModelSizes
from benchmarks.engine.pools import HiSparsePool

BAR = 3.0
"""HiSparse's throughput at the highest concurrency over the best without it, at a locality of 95 %."""
GIB = 2**30


def with_cost(line: dict[str, Any], price_per_hour: float) -> dict[str, Any]:
    """US dollars a million output tokens, and a million of prompt and output together, for a line with a throughput."""
    rate = line.get("tokens_per_s")
    if not rate:
        return line
    total = rate + line.get("prompt_tokens_per_s", 0.0)
    per_second = price_per_hour / 3600
    return line | {"usd_per_million_output": 1e6 * per_second / rate, "usd_per_million_total": 1e6 * per_second / total}


def describe(pool: HiSparsePool, plain: int, sizes: ModelSizes) -> str:
    return "\n".join(
        [
            f"experts {sizes.weight_bytes / 1e9:.1f} GB, {sizes.layers} layers",
            f"with HiSparse: {pool.device_tokens:,} tokens of buffers × {pool.ratio} = {pool.host_tokens:,} in "
            f"{pool.host_bytes / 1e9:.1f} GB of host memory; {pool.gpu_bytes / GIB:.2f} GiB on the GPU",
            f"without, in as many bytes: {plain:,} tokens",
        ]
    )


def gain(lines: Sequence[dict[str, Any]]) -> float | None:
    """HiSparse at the sweep's highest concurrency over the best without it; None where either is missing."""
    points = [line for line in lines if line.get("section") == "steady" and line.get("tokens_per_s")]
    plain = [line["tokens_per_s"] for line in points if line["side"] == "plain"]
    sparse = [line for line in points if line["side"] == "hisparse"]
    if not plain or not sparse:
        return None
    sweep = [line for line in sparse if line["locality_asked"] == sparse[0]["locality_asked"]]
    return float(sweep[-1]["tokens_per_s"] / max(plain))


def summary(lines: Sequence[dict[str, Any]]) -> str:
    found = ["| section | side | concurrent | running | locality | hits | tok/s | p90 ITL ms | p90 TTFT s | $/M out |"]
    found.append("|---" * 10 + "|")
    for line in lines:
        if not line.get("tokens_per_s"):
            continue
        seen = line.get("observed") or {}
        hits = seen.get("hit_share", line.get("cached_share") or None)
        cells = [
            line["section"],
            line["side"],
            line["concurrency"],
            line.get("running", ""),
            _number(seen.get("locality", line.get("locality_asked"))),
            _number(hits),
            f"{line['tokens_per_s']:,.0f}",
            _number(line["itl_p90_ms"]),
            _number(line["ttft_p90_s"]),
            _number(line["usd_per_million_output"]),
        ]
        found.append("| " + " | ".join(map(str, cells)) + " |")
    ratio = gain(lines)
    if ratio is not None:
        found.append(f"HiSparse at the highest concurrency over the best without: {ratio:.2f}× (bar {BAR})")
    found += [f"{line['section']}: {line['error'].splitlines()[-1]}" for line in lines if "error" in line]
    return "\n".join(found)


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_number(item)}" for key, item in value.items())
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
