"""What is measured, in order; each row by itself, so that any can be left out."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from benchmarks.publish.bench import HTTP_BUCKET_BYTES, ONE_BUCKET_BYTES, Bench, checking
from benchmarks.publish.bits import engine_checksums
from benchmarks.publish.copies import copy_speed
from benchmarks.publish.patches import Patches
from benchmarks.publish.report import Report
from rl.weights.collective import Broadcasts, CollectiveTransport
from rl.weights.ipc import Openings
from rl.weights.serialize import make_buckets
from rl.weights.transports import DiskTransport, TensorTransport, Transport

REPEATS, FEW = 9, 3
SMALL_ROUND_BYTES, ROUND_BYTES = 512 << 20, 4 << 30
SHARES = (0.01, 0.1, 1.0)
BAR_IPC_OF_COPY, BAR_FULL_S, BAR_PAUSE_S = 0.5, 0.5, 1.0

Row = Callable[[], Awaitable[dict[str, Any]]]


class Rows:
    """Of one server."""

    def __init__(self, bench: Bench, apart: bool, context: int) -> None:
        """
        Args:
            apart: the server has a GPU of its own.
        """
        self.bench = bench
        self.kept, self.closed = Openings(ONE_BUCKET_BYTES), Openings(ONE_BUCKET_BYTES, keep=False)
        self.bounded = Openings(0)
        # NCCL does not join two processes on one GPU
        self.broadcasts = Broadcasts(bench.sender, "nccl" if apart else "gloo", timeout_s=60)  # type: ignore[arg-type]
        ipc = functools.partial(bench.ipc, self.kept)
        memory, disk = self._stored(bench.memory), self._stored(bench.disk)
        patches = Patches(bench, context)
        one_device: dict[str, Row] = {
            "ipc": lambda: bench.speed(ipc, REPEATS, self.kept),
            "ipc_bits": self.ipc_bits,
            "ipc_closed_each_time": lambda: bench.speed(
                functools.partial(bench.ipc, self.closed), REPEATS, self.closed
            ),
            "ipc_in_rounds": lambda: self._in_rounds(ROUND_BYTES),
            "ipc_in_small_rounds": lambda: self._in_rounds(SMALL_ROUND_BYTES),
            "ipc_of_handles": lambda: bench.speed(bench.handles, FEW),
        }
        with_files: dict[str, Row] = {
            "shared_memory": lambda: bench.speed(memory, FEW),
            "shared_memory_while_running": lambda: bench.while_running(memory),
            "disk": lambda: bench.speed(disk, 1),
            "tensors": lambda: bench.speed(self._tensors, 0),
        }
        self.rows: dict[str, Row] = {"copy": self._copy}
        if not apart:
            self.rows |= one_device
        self.rows["collective"] = self.collective
        if bench.memory:
            if not apart:
                self.rows["ipc_logprobs"] = bench.logprob_gap
                self.rows["ipc_while_running"] = lambda: bench.while_running(ipc)
            self.rows["collective_bits"] = self.collective_bits
            self.rows["collective_while_running"] = lambda: bench.while_running(self._collective)
            self.rows |= with_files
            self.rows |= {f"delta_{share:g}": functools.partial(patches.send, share) for share in SHARES}

    async def measure(self, report: Report, prefix: str, only: Sequence[str], without: Sequence[str]) -> None:
        unknown = [name for name in (*only, *without) if name not in self.rows]
        if unknown and self.bench.memory:
            raise ValueError(f"there are no rows {unknown}; there are {list(self.rows)}")
        try:
            for name, row in self.rows.items():
                if name not in without and (not only or name in only):
                    await report.run(f"{prefix}{name}", row)
        finally:
            for openings in (self.kept, self.closed, self.bounded):
                openings.close()

    async def _copy(self) -> dict[str, Any]:
        return copy_speed(self.bench.weights, self.bench.device)

    async def _in_rounds(self, nbytes: int) -> dict[str, Any]:
        make = functools.partial(self.bench.ipc, self.bounded, nbytes)
        return {"round_bytes": nbytes} | await self.bench.speed(make, FEW, self.bounded)

    async def ipc_bits(self) -> dict[str, Any]:
        """The engine's parameters after the plan's copies, after SGLang's own loader has loaded the same, and after
        other weights."""
        bench = self.bench

        async def planned() -> Transport:
            return checking(await bench.ipc(self.kept))

        await bench.publish(planned)
        answer = self.kept.last[bench.engine.url][0]
        await bench.publish(bench.handles, same=True)
        (own,) = await engine_checksums(bench.target)  # type: ignore[arg-type]
        await bench.publish(bench.handles)
        (other,) = await engine_checksums(bench.target)  # type: ignore[arg-type]
        return _compared(answer.checksums, own, other) | {"how": answer.how}

    async def collective(self) -> dict[str, Any]:
        return {"backend": self.broadcasts.backend} | await self.bench.speed(self._collective, FEW)

    async def collective_bits(self) -> dict[str, Any]:
        """Against what the engine loads from an HF directory of the same weights."""
        bench, memory = self.bench, self._stored(self.bench.memory)
        await bench.publish(self._collective)
        (sent,) = await engine_checksums(bench.target)  # type: ignore[arg-type]
        await bench.publish(memory, same=True)
        (own,) = await engine_checksums(bench.target)  # type: ignore[arg-type]
        await bench.publish(memory)
        (other,) = await engine_checksums(bench.target)  # type: ignore[arg-type]
        return _compared(sent, own, other)

    async def close(self) -> None:
        await self.broadcasts.leave([self.bench.engine])

    async def _collective(self) -> Transport:
        return CollectiveTransport(self.broadcasts, self.bench.sender.plan(ONE_BUCKET_BYTES))

    async def _tensors(self) -> Transport:
        return TensorTransport(list(make_buckets(self.bench.weights.items(), HTTP_BUCKET_BYTES)))

    def _stored(self, where: Sequence[Any]) -> Callable[[], Awaitable[Transport]]:
        async def make() -> Transport:
            return DiskTransport(where[self.bench.version % 2])

        return make


def _compared(sent: Mapping[str, str], own: Mapping[str, str], other: Mapping[str, str]) -> dict[str, Any]:
    return {
        "parameters": len(own),
        "equal": sum(sent.get(name) == found for name, found in own.items()),
        "equal_to_other_weights": sum(sent.get(name) == found for name, found in other.items()),
    }


def bars(rows: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What was asked for, against what was measured."""

    def value(row: str, *names: str) -> float | None:
        found: Any = rows.get(f"{prefix}{row}", {})
        for name in names:
            found = found.get(name, {}) if isinstance(found, Mapping) else {}
        return float(found) if isinstance(found, int | float) else None

    def share(row: str, baseline: str) -> float | None:
        speed, copy = value(row, "gb_per_s"), value("copy", baseline, "gb_per_s")
        return round(speed / copy, 4) if speed and copy else None

    return {
        "ipc_share_of_copy": {
            "of_tensor_by_tensor": share("ipc", "one_by_one"),
            "of_one_piece": share("ipc", "in_one_piece"),
            "closed_each_time": share("ipc_closed_each_time", "one_by_one"),
            "of_handles": share("ipc_of_handles", "one_by_one"),
            "at_least": BAR_IPC_OF_COPY,
        },
        "full_update_seconds": {"measured": value("ipc", "seconds"), "below": BAR_FULL_S},
        "pause_seconds": {"measured": value("ipc_while_running", "pause_seconds"), "below": BAR_PAUSE_S},
    }
