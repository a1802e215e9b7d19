"""HiSparse against the radix cache and HiCache at equal GPU bytes: ``python -m benchmarks.engine --json FILE``.

Sections: ``probe`` (bandwidths), ``steady`` (decoding of long outputs at growing concurrency and four top-k localities,
``benchmarks.engine.steady``), ``agentic`` (multi-turn sessions, ``benchmarks.engine.agentic``); when asked for,
``kernels`` (those that the planner counts, alone). The servers that fit share the GPU, and only one is used at a time.
Every point is a line of the file as soon as it is there; a section that fails leaves its error there, and the next one
runs. On a CPU only the machinery can be tried.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import cpu_model, observe, prediction, report
from benchmarks.engine.agentic import AgenticPlan, agentic
from benchmarks.engine.checkpoint import ROTARY, CheckpointMaker, ModelSizes
from benchmarks.engine.moe_tiles import DECODING, write_tiles
from benchmarks.engine.options import Memory, parse, schedule, together
from benchmarks.engine.pools import HiSparsePool, KvBytes, hisparse_pool, plain_tokens
from benchmarks.engine.reference_indexer import ReferenceIndexer
from benchmarks.engine.servers import Server, ServerSpec, Side, cpu_spec, cuda_spec, start
from benchmarks.engine.steady import SteadyPlan, steady
from benchmarks.engine.streams import Client, Stream
from rollout.processes import ProcessRegistry

CACHES = (
    ".cache/flashinfer", ".cache/tvm-ffi", ".cache/sglang", ".cache/deep_gemm", ".triton/cache", ".deep_gemm",
)  # fmt: skip
MOST_REQUESTS_CONTEXT = 12_288
"""Tokens beyond the prompt that a single request may grow by: those that came first run longest."""


BESIDES_BYTES = 5 * 10**9
"""Attention's and the embeddings' weights, activations and CUDA graphs of a server."""

PLAIN_GROWTH = 2048
"""Tokens that a request may grow by, for the point of the most requests that surely fit without HiSparse."""


class Benchmark:
    """The run: what was asked, where results go, and the time that is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.lines: list[dict[str, Any]] = []
        self.sizes = ModelSizes(layers=options.layers, experts=options.experts, expert_size=options.expert_size)
        self.kv = KvBytes.of(self.sizes.latent, ROTARY, self.sizes.index_dim)
        self.localities: dict[float, Path] = {}
        self.model = options.work / "model"

    @property
    def cuda(self) -> bool:
        return bool(self.options.device == "cuda")

    @property
    def vocabulary(self) -> int:
        return self.sizes.vocabulary if self.cuda else cpu_model.VOCABULARY

    @property
    def pool(self) -> HiSparsePool:
        options = self.options
        requests, tokens = options.concurrency[-1], options.prompt + options.growth
        context = options.prompt + MOST_REQUESTS_CONTEXT
        return hisparse_pool(requests, tokens, options.buffer, context, self.sizes.layers, self.kv)

    @property
    def plain_tokens(self) -> int:
        return plain_tokens(self.pool.gpu_bytes, self.sizes.layers, self.kv)

    @property
    def groups(self) -> list[list[Side]]:
        """Of sides whose servers run at once."""
        options = self.options
        sections = {"steady", "agentic"} & set(options.sections)
        sides = [side for side in options.sides if sections and (side != "hicache" or "agentic" in sections)]
        if not self.cuda:
            return [sides]
        server = Memory(self.sizes.weight_bytes + self.pool.gpu_bytes + BESIDES_BYTES, self.pool.host_bytes)
        return together(sides, server, Memory.here())

    def emit(self, line: dict[str, Any]) -> None:
        line = report.with_cost(line, self.options.price) | {"at_s": round(time.monotonic() - self.begin, 1)}
        self.lines.append(line)
        with self.options.json.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def attempt(self, name: str, action: Callable[[], object]) -> bool:
        """Run a section; its failure is a line, too."""
        elapsed = time.monotonic() - self.begin
        if elapsed > self.options.budget:
            self.emit({"section": name, "skipped": f"{elapsed:.0f} s have passed"})
            return False
        try:
            action()
        except Exception:  # noqa: BLE001  (it is written down, and the other sections run)
            self.emit({"section": name, "error": traceback.format_exc()[-3000:]})
            return False
        return True

    def run(self) -> None:
        options = self.options
        self.attempt("checkpoint", self._write_model)
        if "probe" in options.sections:
            self.attempt("probe", self._probe)
        if "kernels" in options.sections:
            self.attempt("kernels", self._kernels)
        for sides in self.groups:
            self.attempt(f"servers: {', '.join(sides)}", lambda of=sides: self._stage(of))
        if self.cuda and report.gain(self.lines) is not None:
            self.attempt("prediction", self._predict)

    def _predict(self) -> None:
        for line in prediction.compare(self.lines):
            self.emit(line)

    def _write_model(self) -> None:
        options, begin = self.options, time.monotonic()
        if not self.cuda:
            cpu_model.write(self.model)
            return
        rows = None if options.default_tiles else DECODING["BLOCK_SIZE_M"]
        setting = {
            "pool": dataclasses.asdict(self.pool),
            "plain_tokens": self.plain_tokens,
            "expert_tile_rows": rows,
        }
        self.emit({"section": "setting", "model": self.sizes.hf_config()} | setting)
        maker = CheckpointMaker(self.sizes, "cuda")
        written = maker.write(self.model)
        positions = options.prompt + options.growth // 2
        indexer, check = (
            ReferenceIndexer(self.model, self.sizes.layers, ROTARY, self.sizes.top_k, positions, 16, "cuda", seed)
            for seed in (0, 1)
        )
        for locality in options.localities:
            self.localities[locality] = options.work / f"locality-{locality}"
            noise = maker.write_locality(self.localities[locality], locality, indexer)
            computed = check.locality(maker.head_weights(noise))
            self.emit({"section": "checkpoint", "locality_asked": locality, "noise": noise, "computed": computed})
        seconds = time.monotonic() - begin
        self.emit(
            {"section": "checkpoint", "bytes": written, "seconds": seconds, "expert_bytes": self.sizes.weight_bytes}
        )

    def _probe(self) -> None:
        from benchmarks.engine.probe import probe  # wants CUDA

        self.emit({"section": "probe"} | probe(self.kv))

    def _kernels(self) -> None:
        from benchmarks.engine.kernels import kernels

        self.emit({"section": "kernels"} | kernels(self.sizes, self.kv.latent))

    def _spec(self, side: Side) -> ServerSpec:
        options = self.options
        if not self.cuda:
            return cpu_spec(self.model, 2048, options.concurrency[-1], 16_384, threads=2)
        fit = self.plain_tokens // options.prompt + 8
        most = options.concurrency[-1] if side == "hisparse" else fit
        graphs = [*range(8, min(most, 64) + 1, 8), *range(96, most + 32, 32)]
        spec = cuda_spec(side, self.model, self.pool, self.plain_tokens, graphs)
        if options.default_tiles:
            return spec
        return dataclasses.replace(spec, environment={**spec.environment, **self._tiles()})

    def _tiles(self) -> dict[str, str]:
        import torch

        options = self.options
        return write_tiles(options.work / "moe", options.experts, options.expert_size, torch.cuda.get_device_name())

    def _stage(self, sides: Sequence[Side]) -> None:
        import torch

        if self.cuda:
            torch.cuda.empty_cache()
        with ProcessRegistry() as registry:
            begin = time.monotonic()
            specs = [self._spec(side) for side in sides]
            servers, failed = start(registry, specs, self.options.work, self.options.start_timeout)
            self.emit({"section": "start", "sides": list(servers), "seconds": time.monotonic() - begin})
            for side, error in failed.items():
                self.emit({"section": f"start, {side}", "error": error[-3000:]})
            ready = [
                server
                for server in servers.values()
                if self.attempt(f"warm-up, {server.side}", lambda s=server: self._warm_up(s))
            ]
            self._pack_caches()
            for section in ("steady", "agentic"):
                for server in ready:
                    if section in self.options.sections and (section, server.side) != ("steady", "hicache"):
                        self.attempt(
                            f"{section}, {server.side}", lambda s=server, w=section: asyncio.run(self._measure(s, w))
                        )
            self._pack_caches()

    def _warm_up(self, server: Server) -> None:
        """First requests compile what the server's start did not; the weights are those of the sweep."""
        seconds = 0.0
        if self.cuda:
            seconds = server.load_weights(self.model, False)
            seconds += server.load_weights(self.localities[self.options.localities[0]], False)

        async def requests() -> list[Stream]:
            async with Client(server.url) as client:
                streams = [Stream(time.monotonic()) for _ in range(2)]
                prompt = [2 + index % (self.vocabulary - 2) for index in range(self.options.prompt)]
                await asyncio.gather(
                    *(client.generate(s, prompt[i:], 32, not self.cuda) for i, s in enumerate(streams))
                )
                return streams

        streams = asyncio.run(requests())
        failed = [stream.error or "no tokens" for stream in streams if stream.error or not stream.events]
        if failed:
            raise RuntimeError(f"first requests failed: {failed}")
        pools = observe.pools(server.folder)
        self.emit({"section": "pools", "side": server.side, "weights_s": seconds, "pools": pools})

    async def _measure(self, server: Server, section: str) -> None:
        options = self.options
        if section == "steady":
            sweep, concurrency = options.localities[0], options.concurrency
            if self.cuda and server.side == "plain":
                fit = self.plain_tokens // (options.prompt + PLAIN_GROWTH) // 8 * 8
                concurrency = sorted({count for count in concurrency if count < fit} | {fit, 2 * fit})
            further = {key: path for key, path in self.localities.items() if key != sweep}
            plan = SteadyPlan(
                prompt_tokens=options.prompt,
                concurrency=concurrency,
                locality=sweep,
                then=further if server.side == "hisparse" else {},
                vocabulary=self.vocabulary,
                window_s=options.window,
                max_new_tokens=MOST_REQUESTS_CONTEXT - 64 if self.cuda else 1900,
                ignore_eos=not self.cuda,
            )
            await steady(server, plan, self.emit)
            if further and server.side == "hisparse":
                await asyncio.to_thread(server.load_weights, self.localities[sweep], False)
        else:
            sized = AgenticPlan(options.agentic_concurrency, self.vocabulary, window_s=options.agentic_window)
            if not self.cuda:
                sized = AgenticPlan(
                    options.agentic_concurrency, self.vocabulary, 32, 16, 8, 4, 0.1, 1.0, options.agentic_window, True
                )
            await agentic(server, sized, self.emit)

    def _pack_caches(self) -> None:
        """Small; so that the next machine need not compile the kernels again."""
        if self.options.jit_cache is None:
            return
        there = [name for name in CACHES if (Path.home() / name).exists()]
        if there:
            command = ["tar", "-cJf", str(self.options.jit_cache), "-C", str(Path.home()), *there]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            size = self.options.jit_cache.stat().st_size
            self.emit(
                {"section": "kernel caches", "bytes": size, "exit_code": done.returncode, "said": done.stderr[-300:]}
            )


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    benchmark = Benchmark(options)
    if options.plan:
        groups = benchmark.groups
        plain = benchmark.plain_tokens // (options.prompt + 1024)
        print(report.describe(benchmark.pool, benchmark.plain_tokens, benchmark.sizes))
        for cold in (True, False):
            steps = schedule(options, groups, plain, cold)
            print(f"{'cold' if cold else 'warm'} kernel caches: {sum(s for _, s in steps):.0f} s")
            print("\n".join(f"  {seconds:5.0f} s  {what}" for what, seconds in steps))
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    benchmark.run()
    print(report.summary(benchmark.lines))
    return int(any("error" in line for line in benchmark.lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
