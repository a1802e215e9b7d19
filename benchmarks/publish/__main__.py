"""Speed of publishing: ``python -m benchmarks.publish [--json FILE] [--device cpu|cuda] [--size tiny|135m|1b]``.

A server of a random model is started, and versions of other random weights are published to it by every way: bytes of
the model over the seconds from the first call of the load to the last answer (the engine idle), against a plain copy of
the same tensors on the same device in the same run; then again while requests run, for the seconds in which the engine
does not generate. Patches are measured at 1, 10 and 100 % of the values changed. Each row is written when it is there;
a way that fails leaves its error, and the next one runs.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch

from benchmarks.publish.models import SIZES, Size, Weights, changed, random_weights, write
from rl.weights.collective import Broadcasts, CollectiveTransport
from rl.weights.delta_transport import DeltaTransport, Held
from rl.weights.ipc import IpcTransport
from rl.weights.local import LocalSender
from rl.weights.publisher import Published, publish
from rl.weights.serialize import make_buckets
from rl.weights.transports import DiskTransport, TensorTransport, Transport
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.protocol import Sampling
from rollout.engine.sglang import SGLangEngine
from rollout.processes import ManagedProcess, ProcessRegistry, free_port

BAR_IPC_OF_COPY, BAR_FULL_S, BAR_PAUSE_S = 0.5, 0.5, 1.0
CONTEXT = 4096
REPEATS = 3
SHARES = (0.01, 0.1, 1.0)
PROMPT = list(range(10, 74))
NEW_TOKENS = 2000
ADMISSION_S = 15.0
"""For the requests to be running; how many were is part of the row."""
HTTP_BUCKET_BYTES = 256 << 20
ONE_BUCKET_BYTES = 16 << 30


class Report:
    """Rows by name, on disk after each."""

    def __init__(self, path: Path | None, deadline: float) -> None:
        self.path, self.deadline = path, deadline
        self.rows: dict[str, Any] = {}

    def put(self, name: str, row: Any) -> None:
        self.rows[name] = row
        print(f"{name}: {json.dumps(row)}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.rows, indent=1) + "\n")

    async def run(self, name: str, measure: Callable[[], Awaitable[Any]]) -> None:
        if time.monotonic() > self.deadline:
            self.put(name, {"skipped": "out of time"})
            return
        try:
            self.put(name, await measure())
        except Exception:  # noqa: BLE001  (it is written down, and the other rows come)
            self.put(name, {"error": traceback.format_exc()[-1500:]})


@dataclass
class Bench:
    """The server, and the weights that are published to it."""

    engine: SGLangEngine
    size: Size
    device: str
    named: list[Weights]
    """Two versions, of which each publication takes the other."""
    memory: list[Path]
    """The same as HF directories in shared memory."""
    disk: list[Path]
    folder: Path
    registry: ProcessRegistry
    requests: int
    sender: LocalSender
    """Kept, as a trainer keeps its own: an engine then finds the same memory each time."""
    version: int = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.named[0].values())

    async def publish(self, transport: Transport) -> Published:
        self.version += 1
        return await publish([self.engine], transport, self.version, self.size.shapes, attempts=1)

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Of the version that comes next."""
        return list(self.named[(self.version + 1) % 2].items())

    async def speed(self, make: Callable[[], Awaitable[Transport]], repeats: int = REPEATS) -> dict[str, Any]:
        """The first publication warms up and is reported apart, where there are more."""
        done = [await self.publish(await make()) for _ in range(repeats + 1)]
        later = done[1:] or done
        seconds = statistics.median(each.load_seconds for each in later)
        return {
            "seconds": round(seconds, 4),
            "gb_per_s": round(self.nbytes / seconds / 1e9, 3),
            "first_seconds": round(done[0].load_seconds, 4),
            "pause_seconds": round(statistics.median(each.seconds for each in later), 4),
        }

    async def while_running(self, make: Callable[[], Awaitable[Transport]]) -> dict[str, Any]:
        """The pause, with requests in flight."""
        transport = await make()
        sampling = Sampling(1.0, NEW_TOKENS)
        tasks = [
            asyncio.create_task(self.engine.generate([*PROMPT, 100 + i], sampling, f"run-{self.version}-{i}"))
            for i in range(self.requests)
        ]
        try:
            running, begin = 0, time.monotonic()
            while running < self.requests * 0.9 and time.monotonic() < begin + ADMISSION_S:
                running = (await self.engine.metrics()).running
                await asyncio.sleep(0.05)
            done = await self.publish(transport)
            mode = "retract" if (await self.engine.abilities()).sessions else "abort"
            await self.engine.abort([f"run-{self.version - 1}-{i}" for i in range(self.requests)])
            ended, _ = await asyncio.wait(tasks, timeout=ADMISSION_S)
        finally:
            for task in tasks:
                task.cancel()
        failures = [str(task.exception()) for task in ended if task.exception() is not None]
        return {
            "running": running,
            "mode": mode,
            "pause_seconds": round(done.seconds, 4),
            "load_seconds": round(done.load_seconds, 4),
            "failures": failures[:2],
        }

    async def tensors(self) -> Transport:
        return TensorTransport(list(make_buckets(self.weights(), HTTP_BUCKET_BYTES)))

    async def ipc(self) -> Transport:
        self.sender.named = self.weights()
        return IpcTransport(self.sender, self.sender.plan(ONE_BUCKET_BYTES), {})


def copy_speed(bench: Bench) -> dict[str, Any]:
    """The model's tensors copied one by one on the device, and in one piece."""
    source, target = bench.named[0], {name: torch.empty_like(tensor) for name, tensor in bench.named[1].items()}
    flat = torch.empty(bench.nbytes, dtype=torch.uint8, device=bench.device)
    other = torch.empty_like(flat)

    def each() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)

    row: dict[str, Any] = {}
    for label, copy in (("one_by_one", each), ("in_one_piece", lambda: other.copy_(flat))):
        times = []
        for _ in range(6):
            _synchronise(bench.device)
            begin = time.perf_counter()
            copy()
            _synchronise(bench.device)
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times[1:])
        row[label] = {"seconds": round(seconds, 5), "gb_per_s": round(bench.nbytes / seconds / 1e9, 2)}
    return row


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Patches:
    """A receiver beside the engine, and one version after another sent to it; over the loopback: the work at both ends
    is measured, not a network."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.last: tuple[Held, Weights] | None = None
        self.process: ManagedProcess | None = None
        self.url = ""

    async def start(self) -> tuple[Held, Weights]:
        bench, port = self.bench, free_port()
        self.last = (Held(900, bench.memory[0]), bench.named[0])
        command = [sys.executable, "-m", "rl.weights.receiver", "--model", str(bench.memory[0]), "--version", "900"]
        command += ["--copies", str(bench.folder / "copies"), "--port", str(port)]
        self.process = bench.registry.start("receiver", command, bench.folder / "receiver.log", grace_s=2.0)
        self.url = f"http://127.0.0.1:{port}"
        await _answers(f"{self.url}/versions")
        return self.last

    async def send(self, share: float) -> dict[str, Any]:
        bench = self.bench
        base, weights = self.last or await self.start()
        version = bench.version + 1
        weights = changed(weights, share, seed=version)
        new = Held(version, write(bench.folder / f"patched-{version}", bench.size, weights, CONTEXT))
        transport = DeltaTransport(new, base, {bench.engine.url: self.url}, bench.folder / "patches", timeout_s=300)
        begin = time.perf_counter()
        await transport.prepare([bench.engine], version)
        prepared = time.perf_counter() - begin
        sent, compression = transport.sent[bench.engine.url], transport.compression
        done = await bench.publish(transport)
        if base.version != 900:
            shutil.rmtree(base.directory)
        self.last = (new, weights)
        return {
            "sent": sent.how,
            "sent_bytes": sent.nbytes,
            "compression": round(compression, 2) if compression else None,
            "prepare_seconds": round(prepared, 3),
            "prepare_gb_per_s": round(bench.nbytes / prepared / 1e9, 3),
            "load_seconds": round(done.load_seconds, 4),
            "pause_seconds": round(done.seconds, 4),
        }


async def _answers(url: str, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)


async def collective(bench: Bench) -> dict[str, Any]:
    """NCCL where the engine has a GPU of its own; else gloo, since NCCL does not join two processes on one GPU."""
    apart = bench.device == "cuda" and torch.cuda.device_count() > 1
    broadcasts = Broadcasts(bench.sender, "nccl" if apart else "gloo", timeout_s=60)
    bench.sender.named = bench.weights()
    plan = bench.sender.plan(ONE_BUCKET_BYTES)

    async def make() -> Transport:
        bench.sender.named = bench.weights()
        return CollectiveTransport(broadcasts, plan)

    try:
        return {"backend": broadcasts.backend} | await bench.speed(make)
    finally:
        await broadcasts.leave([bench.engine])


async def exact(bench: Bench) -> dict[str, Any]:
    """Largest difference of the server's log-probs from HF's with the weights that it was sent, and with the others."""
    from transformers import AutoModelForCausalLM

    found = torch.from_numpy(await bench.engine.score(PROMPT))[1:]
    row = {}
    for name, index in (("of_its_weights", bench.version % 2), ("of_the_others", (bench.version + 1) % 2)):
        model = AutoModelForCausalLM.from_pretrained(
            bench.memory[index], dtype=bench.named[0]["model.norm.weight"].dtype
        )
        model = model.to(bench.device).eval()
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT], device=bench.device)).logits[0, :-1].float().log_softmax(-1).cpu()
        expected = logits.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        row[name] = round(float((expected - found).abs().max()), 6)
    return row


async def measure(bench: Bench, report: Report) -> None:
    report.put("copy", copy_speed(bench))
    await report.run("ipc", lambda: bench.speed(bench.ipc))
    await report.run("ipc_exact", lambda: exact(bench))
    await report.run("ipc_while_running", lambda: bench.while_running(bench.ipc))

    def stored(where: list[Path]) -> Callable[[], Awaitable[Transport]]:
        async def make() -> Transport:
            return DiskTransport(where[(bench.version + 1) % 2])

        return make

    await report.run("shared_memory", lambda: bench.speed(stored(bench.memory)))
    await report.run("tensors", lambda: bench.speed(bench.tensors, repeats=0))
    await report.run("collective", lambda: collective(bench))
    await report.run("disk", lambda: bench.speed(stored(bench.disk), repeats=1))
    await report.run("shared_memory_while_running", lambda: bench.while_running(stored(bench.memory)))
    patches = Patches(bench)
    for share in SHARES:
        await report.run(f"delta_{share:g}", functools.partial(patches.send, share))
    report.put("bars", bars(report.rows))


def bars(rows: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, against what was measured."""

    def value(row: str, name: str) -> float | None:
        found = rows.get(row, {}).get(name)
        return float(found) if found is not None else None

    speed, copy = value("ipc", "gb_per_s"), rows["copy"]["one_by_one"]["gb_per_s"]
    return {
        "ipc_share_of_copy": {"measured": round(speed / copy, 4) if speed else None, "at_least": BAR_IPC_OF_COPY},
        "full_update_seconds": {"measured": value("ipc", "seconds"), "below": BAR_FULL_S},
        "pause_seconds": {"measured": value("ipc_while_running", "pause_seconds"), "below": BAR_PAUSE_S},
    }


def engine_config(device: str, requests: int, start_s: float) -> EngineConfig:
    common = {
        "device": device,
        "context_length": CONTEXT,
        "max_running_requests": requests,
        "start_timeout_s": start_s,
        "control_timeout_s": 120.0,
    }
    if device == "cpu":
        return EngineConfig.model_validate(common | {"max_total_tokens": requests * CONTEXT})
    extra = {
        "attention-backend": "triton",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "disable-prefill-cuda-graph": True,
        "cuda-graph-max-bs-decode": requests,
    }
    if torch.cuda.device_count() > 1:
        extra["base-gpu-id"] = 1
    settings = {"dtype": "bfloat16", "memory_fraction": 0.4, "extra_args": extra}
    return EngineConfig.model_validate(common | settings)


async def serve_and_measure(options: argparse.Namespace, report: Report) -> None:
    size = SIZES[options.size]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with (
        tempfile.TemporaryDirectory(dir=options.memory) as memory,
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
        ProcessRegistry() as registry,
    ):
        named = [random_weights(size, seed, options.device, dtype) for seed in (0, 1)]
        in_memory = [write(Path(memory) / f"m{i}", size, w, CONTEXT) for i, w in enumerate(named)]
        on_disk = [write(Path(disk) / f"m{i}", size, w, CONTEXT) for i, w in enumerate(named)]
        nbytes = sum(tensor.nbytes for tensor in named[0].values())
        report.put(
            "model", {"size": options.size, "parameters": size.parameters, "nbytes": nbytes, "dtype": str(dtype)}
        )
        config = engine_config(options.device, options.requests, options.start_s)
        fleet = EngineFleet(config, registry, Path(options.logs), on_progress=print)
        begin = time.monotonic()
        try:
            await fleet.start(in_memory[0])
            engine = fleet.engines[0]
            able = await engine.abilities()
            report.put("server", {"sglang": able.version, "start_seconds": round(time.monotonic() - begin, 1)})
            bench = Bench(
                engine,
                size,
                options.device,
                named,
                in_memory,
                on_disk,
                Path(memory),
                registry,
                options.requests,
                LocalSender([], options.device),
            )
            await measure(bench, report)
        finally:
            await fleet.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=sorted(SIZES), help="default: 1b on cuda, tiny on the CPU")
    parser.add_argument("--requests", type=int, default=64, help="in flight where the pause is measured")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which no further row is begun")
    parser.add_argument("--start-s", type=float, default=300.0, help="for the server to start")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "benchmark-publish")
    options = parser.parse_args()
    options.size = options.size or ("1b" if options.device == "cuda" else "tiny")
    options.logs.mkdir(parents=True, exist_ok=True)
    asyncio.run(serve_and_measure(options, Report(options.json, time.monotonic() + options.seconds)))


if __name__ == "__main__":
    main()
