"""What the capacity planner says about a measured run, point by point: ``python -m benchmarks.engine.prediction FILE``.

FILE has the JSON lines of a run (``python -m benchmarks.engine --json FILE``), also of one that ended early. The
planner is given the model's config, the bandwidths that the run's probe measured, the tiles of the experts' kernel that
the servers were given, the localities that the observer saw, and two costs of a step that no config tells: one of a
step and one of a request, taken from the side *without* HiSparse at its two lowest concurrencies. Everything else is
predicted: that side's plateau, all of HiSparse's points, and the concurrency from which on HiSparse is faster.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.pools import HiSparsePool, KvBytes
from rollout.engine.capacity import Workload, predict_pools
from rollout.engine.config import EngineConfig
from rollout.engine.hisparse import HiSparseConfig
from rollout.engine.model_shape import ModelShape, model_shape
from rollout.engine.throughput import Comparison, Machine, Point, decode_step, predict_curve

GPU_BYTES = 141 * 10**9
Points = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What both sides of a run were started with."""

    shape: ModelShape
    pool: HiSparsePool
    plain_tokens: int
    tile_rows: int | None
    """Of the experts' kernel in decoding; None: SGLang's own."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Setting:
        """From the run's ``setting`` line."""
        pool = HiSparsePool(**line["pool"] | {"kv": KvBytes(**line["pool"]["kv"])})
        return cls(model_shape(line["model"]), pool, line["plain_tokens"], line.get("expert_tile_rows"))

    def config(self, side: str) -> EngineConfig:
        sparse = side == "hisparse"
        return EngineConfig(
            device="cuda",
            dtype="bfloat16",
            context_length=self.pool.context,
            max_running_requests=self.pool.requests,
            max_total_tokens=self.pool.device_tokens if sparse else self.plain_tokens,
            prefix_cache=not sparse,
            hisparse=HiSparseConfig(device_buffer_size=self.pool.buffer, host_to_device_ratio=self.pool.ratio)
            if sparse
            else None,
        )

    def curve(
        self, side: str, context: float, concurrencies: Sequence[int], machine: Machine, locality: float
    ) -> list[Point]:
        config = self.config(side)
        pools = predict_pools(config, self.shape, GPU_BYTES, version="0.5.16")
        load = Workload(int(context) - 1, 2)  # as long as the requests were on average
        return predict_curve(config, self.shape, pools, load, concurrencies, machine, locality)


def machine_of(setting: Setting, probe: Mapping[str, Any], plain: Points) -> Machine:
    """As measured; ``plain``'s first two points give what a step and a request cost beyond the roofline.

    HiSparse's swap-in moves its scattered rows at nearly the speed of a large copy (seen: 53.0 of 55.1 GB/s, from the
    steps at four localities), twice as fast as another kernel of SGLang's for such rows (``host_gather_bytes_per_s``).
    Where the run has timed the swap-in itself (section ``kernels``), that counts.
    """
    bare = Machine(
        hbm_bandwidth=probe["gpu_read_bytes_per_s"],
        host_bandwidth=probe.get("swap_in_bytes_per_s", probe["host_copy_bytes_per_s"]),
        swap_overhead_s=probe.get("swap_overhead_s", Machine.swap_overhead_s),
        step_overhead_s=0.0,
        request_overhead_s=0.0,
        expert_tile_rows=setting.tile_rows,
    )
    beyond = []
    for point in plain[:2]:
        load = Workload(int(point["context"]) - 1, 2)
        step = decode_step(setting.config("plain"), setting.shape, point["running"], load, bare, 1.0)
        beyond.append((point["running"], point["step_ms"] / 1e3 - step.total))
    (few, first), (more, second) = beyond
    request = max(0.0, (second - first) / (more - few))
    return dataclasses.replace(bare, request_overhead_s=request, step_overhead_s=max(0.0, first - few * request))


def compare(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each point, then one for the crossover and one for the machine.

    Raises:
        ValueError: the run lacks a part that is needed; says which.
    """
    points = [line for line in lines if line.get("section") == "steady" and line.get("tokens_per_s")]
    plain, sparse = ([p for p in points if p["side"] == side] for side in ("plain", "hisparse"))
    settings = [Setting.of(line) for line in lines if line.get("section") == "setting"]
    whole = [line for line in lines if "error" not in line and "skipped" not in line]
    probes, timed = ([line for line in whole if line["section"] == name] for name in ("probe", "kernels"))
    if not (settings and probes and len(plain) >= 2 and sparse):
        raise ValueError("the run needs a setting, a probe, two points without HiSparse and one with it")
    setting = settings[-1]
    machine = machine_of(setting, {**probes[-1], **(timed[-1] if timed else {})}, plain)
    found = []
    for point in points:
        locality = seen_locality(point)
        (predicted,) = setting.curve(point["side"], point["context"], [point["concurrency"]], machine, locality)
        found.append(
            {
                "section": "prediction",
                "side": point["side"],
                "concurrency": point["concurrency"],
                "running": point["running"],
                "locality": locality,
                "measured": point["tokens_per_s"],
                "predicted": predicted.tokens_per_s,
                "error": predicted.tokens_per_s / point["tokens_per_s"] - 1,
                "running_predicted": predicted.running,
                "step_ms": {k: round(1e3 * v, 3) for k, v in dataclasses.asdict(predicted.step).items()},
            }
        )
    sweep = [point for point in sparse if point["locality_asked"] == sparse[0]["locality_asked"]]
    found.append({"section": "crossover", "measured": measured_crossover(plain, sweep)})
    grid = list(range(1, sweep[-1]["concurrency"] + 1))
    context = float(np.mean([point["context"] for point in sweep]))
    curves = [setting.curve(side, context, grid, machine, seen_locality(sweep[-1])) for side in ("plain", "hisparse")]
    found[-1] |= {"predicted": Comparison(*curves).crossover}
    found.append({"section": "machine", **dataclasses.asdict(machine)})
    return found


def seen_locality(point: Mapping[str, Any]) -> float:
    """As observed in the server, else as asked for."""
    return float((point.get("observed") or {}).get("locality", point["locality_asked"]))


def measured_crossover(plain: Points, sparse: Points) -> float | None:
    """Concurrency from which on HiSparse was never slower; None where it was slower at the end.

    Between points a curve is a line over the logarithm; it is flat past the most requests that run, as more only wait.
    """
    grid = np.geomspace(1, sparse[-1]["concurrency"], 2000)
    curves = []
    for points in (plain, sparse):
        at, rates = zip(
            *sorted({min(point["concurrency"], point["running"]): point["tokens_per_s"] for point in points}.items()),
            strict=True,
        )
        curves.append(np.interp(np.log(grid), np.log(at), rates))
    first = max(plain[0]["concurrency"], sparse[0]["concurrency"])
    slower = grid[(curves[1] < curves[0]) & (grid >= first)]
    if not len(slower):
        return float(first)
    return None if slower[-1] == grid[-1] else float(slower[-1])


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Of what ``compare`` found."""
    rows = ["| | concurrent | locality | measured tok/s | planned | error |", "|---" * 6 + "|"]
    for line in found:
        if line["section"] == "prediction":
            locality = f"{line['locality']:.1%}" if line["side"] == "hisparse" else ""
            rates = f"{line['measured']:,.0f} | {line['predicted']:,.0f} | {line['error']:+.1%}"
            rows.append(f"| {line['side']} | {line['concurrency']} | {locality} | {rates} |")
        elif line["section"] == "crossover":
            measured = "none" if line["measured"] is None else f"{line['measured']:.1f}"
            rows.append(f"\nHiSparse is faster from: measured {measured}, planned {line['predicted']}")
        else:
            rows.append(f"machine: {dict(line)}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(compare([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()])))
