"""Speed of publishing: ``python -m benchmarks.publish [--json FILE] [--device cpu|cuda] [--size tiny|135m|1b|8b ...]``.

For each size a server of a random model is started, and weights that change in the trainer's memory are published to it
by every way: bytes of the model over the seconds from the first call of the load to the last answer (the engine idle),
against a plain copy of the same tensors on the same device in the same run; where the milliseconds go; then again while
requests run, for the seconds in which the engine does not generate. ``ipc_bits`` and ``collective_bits`` compare what
the server then holds bit by bit with what it loads the ordinary way. Patches are measured at 1, 10 and 100 % of the
values changed. Each row is written when it is there; a way that fails leaves its error, and the next one runs.

With two GPUs the trainer has the second, the server the first, and what goes from one to the other is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.publish.bench import Bench
from benchmarks.publish.models import SIZES, Size, Weights, random_weights, turn, write, write_config
from benchmarks.publish.report import Report
from benchmarks.publish.rows import Rows, bars
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.processes import ProcessRegistry

CONTEXT = 4096
WITHOUT_FILES = frozenset({"8b"})
"""Too large for shared memory twice: the server makes weights of its own, and is not asked to generate."""
IDLE_TOKENS = 16_384
"""KV cache of a server that is not asked to generate."""


def engine_config(options: argparse.Namespace, files: bool) -> EngineConfig:
    common = {
        "device": options.device,
        "context_length": CONTEXT,
        "max_running_requests": options.requests,
        "start_timeout_s": options.start_s,
        "control_timeout_s": 120.0,
    }
    if options.device == "cpu":
        return EngineConfig.model_validate(common | {"max_total_tokens": options.requests * CONTEXT})
    extra = {
        "attention-backend": "triton",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "disable-prefill-cuda-graph": True,
    }
    settings = {"dtype": "bfloat16", "memory_fraction": 0.4, "extra_args": extra}
    if files:
        extra["cuda-graph-max-bs-decode"] = options.requests
    else:
        extra |= {"disable-decode-cuda-graph": True, "load-format": "dummy"}
        settings["max_total_tokens"] = IDLE_TOKENS
    return EngineConfig.model_validate(common | settings)


def directories(parent: Path, size: Size, weights: Weights) -> list[Path]:
    """The weights, and the same turned round."""
    made = []
    for index in range(2):
        made.append(write(parent / f"{index}", size, weights, CONTEXT))
        turn(weights)
    return made


async def measure_size(name: str, options: argparse.Namespace, report: Report, memory: Path, disk: Path) -> None:
    size, files, prefix = SIZES[name], name not in WITHOUT_FILES, f"{name}."
    apart = options.device == "cuda" and torch.cuda.device_count() > 1
    device = "cuda:1" if apart else options.device
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    weights = random_weights(size, 0, device, dtype)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    report.put(f"{prefix}model", {"parameters": size.parameters, "nbytes": nbytes, "dtype": str(dtype)})
    in_memory = directories(memory / name, size, weights) if files else []
    on_disk = directories(disk / name, size, weights) if files and "disk" not in options.without else []
    served = in_memory[0] if files else write_config(memory / name, size, dtype, CONTEXT)
    with ProcessRegistry() as registry:
        logs = options.logs / name
        logs.mkdir(parents=True, exist_ok=True)
        fleet = EngineFleet(engine_config(options, files), registry, logs, on_progress=print)
        begin = time.monotonic()
        try:
            await fleet.start(served)
            engine = fleet.engines[0]
            able = await engine.abilities()
            report.put(f"{prefix}server", {"sglang": able.version, "start_seconds": round(time.monotonic() - begin, 1)})
            bench = Bench(engine, size, device, weights, in_memory, on_disk, memory / name, registry, options.requests)
            rows = Rows(bench, apart, CONTEXT)
            await rows.measure(report, prefix, options.only, options.without)
            report.put(f"{prefix}bars", bars(report.rows, prefix))
            await rows.close()
        finally:
            await fleet.stop()


async def measure(options: argparse.Namespace) -> None:
    report = Report(options.json, time.monotonic() + options.seconds)
    with (
        tempfile.TemporaryDirectory(dir=options.memory) as memory,
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
    ):
        for name in options.size:

            async def one(name: str = name) -> dict[str, str]:
                await measure_size(name, options, report, Path(memory), Path(disk))
                return {}

            await report.run(f"{name}.all", one)
            if options.device == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=sorted(SIZES), nargs="+", help="default: 1b on cuda, tiny on the CPU")
    parser.add_argument("--requests", type=int, default=64, help="in flight where the pause is measured")
    parser.add_argument("--only", nargs="+", default=[], help="rows; default: all")
    parser.add_argument("--without", nargs="+", default=[], help="rows that are left out")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which no further row is begun")
    parser.add_argument("--start-s", type=float, default=300.0, help="for the server to start")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "benchmark-publish")
    options = parser.parse_args()
    options.size = options.size or (["1b"] if options.device == "cuda" else ["tiny"])
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
