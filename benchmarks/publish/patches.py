"""Patches: what changed goes to a receiver beside the engine."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from typing import Any

import aiohttp

from benchmarks.publish.bench import Bench
from benchmarks.publish.models import Weights, changed, write
from rl.weights.delta import MODEL, threads
from rl.weights.delta_transport import DeltaTransport, Held
from rl.weights.publisher import publish
from rollout.processes import ManagedProcess, free_port

FIRST = 900
"""Version of what the receiver starts with."""


class Patches:
    """One version after another sent over the loopback: the work at both ends is measured, not a network."""

    def __init__(self, bench: Bench, context: int) -> None:
        self.bench, self.context = bench, context
        self.last: tuple[Held, Weights] | None = None
        self.process: ManagedProcess | None = None
        self.url = ""

    async def _start(self) -> tuple[Held, Weights]:
        bench, port = self.bench, free_port()
        which = bench.version % 2
        self.last = (Held(FIRST, bench.memory[which]), bench.weights)
        command = [sys.executable, "-m", "rl.weights.receiver", "--model", str(bench.memory[which])]
        command += ["--version", str(FIRST), "--copies", str(bench.folder / "copies"), "--port", str(port)]
        self.process = bench.registry.start("receiver", command, bench.folder / "receiver.log", grace_s=2.0)
        self.url = f"http://127.0.0.1:{port}"
        await _answers(f"{self.url}/versions")
        return self.last

    async def send(self, share: float) -> dict[str, Any]:
        bench = self.bench
        base, weights = self.last or await self._start()
        bench.version += 2
        version = bench.version
        weights = changed(weights, share, seed=version)
        new = Held(version, write(bench.folder / f"patched-{version}", bench.size, weights, self.context))
        receivers, work = {bench.engine.url: self.url}, bench.folder / "patches"
        transport = DeltaTransport(new, base, receivers, work, timeout_s=300, sender=MODEL)
        begin = time.perf_counter()
        await transport.prepare([bench.engine], version)
        prepared = time.perf_counter() - begin
        sent, compression = transport.sent[bench.engine.url], transport.compression
        done = await publish([bench.engine], transport, version, bench.size.shapes, attempts=1)
        if base.version != FIRST:
            shutil.rmtree(base.directory)
        self.last = (new, weights)
        return {
            "sent": sent.how,
            "sent_bytes": sent.nbytes,
            "compression": round(compression, 2) if compression else None,
            "prepare_seconds": round(prepared, 3),
            "encoding_seconds": round(transport.encoding_seconds, 3),
            "threads": threads(),
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
