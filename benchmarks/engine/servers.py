"""The SGLang servers that are compared: their arguments, their start, and what is asked of them beside generation."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.engine.pools import HiSparsePool
from rollout.engine.hisparse import RESERVE
from rollout.processes import ManagedProcess, ProcessError, ProcessRegistry, free_ports

Side = Literal["plain", "hisparse", "hicache"]
"""``plain`` has the radix cache; ``hicache`` adds host memory behind it."""
Argument = str | int | float | bool
STREAM_INTERVAL = 16
"""Tokens an event of a stream carries, so that streaming costs neither side much."""
PLAIN_RESERVE = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1024"}
"""Tokens that SGLang keeps free for a running request's growth."""
POLL_S = 0.5


@dataclass(frozen=True)
class ServerSpec:
    side: Side
    arguments: Mapping[str, Argument]
    environment: Mapping[str, str]


class Server:
    """One running server."""

    def __init__(self, spec: ServerSpec, process: ManagedProcess, port: int, folder: Path) -> None:
        self.spec, self.process, self.folder = spec, process, folder
        self.url = f"http://127.0.0.1:{port}"

    @property
    def side(self) -> Side:
        return self.spec.side

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """The answer's JSON, or its text."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self.side}: {path} answered {error.code}: {error.read()[:500]!r}") from error
        return json.loads(text) if text.startswith(("{", "[")) else text

    def load_weights(self, directory: Path, running: bool, timeout_s: float = 120.0) -> float:
        """Take the tensors of a directory, also with requests decoding (their KV stays); returns the seconds."""
        begin = time.monotonic()
        if running:
            self.post("/pause_generation", {"mode": "in_place"}, timeout_s)
        try:
            flush = not running and self.side != "hisparse"  # which keeps no prefixes
            body = {"model_path": str(directory), "load_format": "auto", "flush_cache": flush}
            answer = self.post("/update_weights_from_disk", body, timeout_s)
            if not answer["success"]:
                raise RuntimeError(f"{self.side}: weights of {directory} were refused: {answer['message']}")
        finally:
            if running:
                self.post("/continue_generation", {}, timeout_s)
        return time.monotonic() - begin

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def start(
    registry: ProcessRegistry, specs: Sequence[ServerSpec], folder: Path, timeout_s: float
) -> tuple[dict[Side, Server], dict[Side, str]]:
    """Start servers side by side; returns, once each is up or has failed, those that are up, and the others' errors."""
    servers: dict[Side, Server] = {}
    failed: dict[Side, str] = {}
    for spec, port in zip(specs, free_ports(len(specs)), strict=True):
        own = folder / spec.side
        own.mkdir(parents=True, exist_ok=True)
        (own / "pools.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.engine.launch", str(own), "--port", str(port)]
        process = registry.start(
            f"the {spec.side} server", command + flags(spec.arguments), own / "server.log", spec.environment
        )
        servers[spec.side] = Server(spec, process, port, own)
    waiting, deadline = dict(servers), time.monotonic() + timeout_s
    while waiting:
        late = time.monotonic() > deadline
        for side, server in list(waiting.items()):
            try:
                server.process.check()
            except ProcessError as error:
                failed[side] = str(error)
            if side not in failed and late:
                failed[side] = f"not up after {timeout_s:g} s; the end of its log:\n{server.process.log_tail()}"
            if side in failed or server.healthy():
                del waiting[side]
        time.sleep(POLL_S)
    return {side: server for side, server in servers.items() if side not in failed}, failed


def flags(arguments: Mapping[str, Argument]) -> list[str]:
    """As a command line; a list is a string with spaces."""
    found: list[str] = []
    for name, value in arguments.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not False:
            found += [f"--{name}", *(value.split() if name == "cuda-graph-bs-decode" else [value])]  # type: ignore[union-attr]
    return [str(part) for part in found]


def cuda_spec(side: Side, model: Path, pool: HiSparsePool, plain_tokens: int, graphs: Sequence[int]) -> ServerSpec:
    """A server for the sparse-attention model on one GPU, which it may share with another one.

    Args:
        pool: HiSparse's; sets the number of requests and the context of all sides.
        plain_tokens: KV pool of the sides without HiSparse.
        graphs: batch sizes to record CUDA graphs for.
    """
    arguments: dict[str, Argument] = common(model, pool.context, pool.requests) | {
        "load-format": "dummy",
        "sampling-backend": "pytorch",
        "disable-prefill-cuda-graph": True,
        "kv-cache-dtype": "bfloat16",
        "dsa-prefill-backend": "flashmla_sparse",  # FlashAttention-3 need not be there
        "dsa-decode-backend": "flashmla_sparse",
        "chunked-prefill-size": 8192,
        "mem-fraction-static": 0.9,
        "cuda-graph-bs-decode": " ".join(map(str, graphs)),
        "max-total-tokens": plain_tokens,
    }
    reserve = PLAIN_RESERVE
    if side == "hisparse":
        reserve = RESERVE
        config = {"top_k": 2048, "device_buffer_size": pool.buffer, "host_to_device_ratio": pool.ratio}
        arguments |= {
            "disable-radix-cache": True,
            "enable-hisparse": True,
            "hisparse-config": json.dumps(config),
            "max-total-tokens": pool.device_tokens,
        }
    elif side == "hicache":
        arguments |= {"enable-hierarchical-cache": True, "hicache-size": round(pool.host_bytes / 1e9)}
    return ServerSpec(side, arguments, reserve)


def cpu_spec(model: Path, context: int, requests: int, tokens: int, threads: int) -> ServerSpec:
    """A server with the radix cache on the CPU, to try the benchmark itself."""
    arguments = common(model, context, requests) | {
        "device": "cpu",
        "dtype": "float32",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "sleep-on-idle": True,
        "disable-overlap-schedule": True,
        "max-total-tokens": tokens,
    }
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(threads)}
    return ServerSpec("plain", arguments, environment)


def common(model: Path, context: int, requests: int) -> dict[str, Argument]:
    return {
        "model-path": str(model),
        "host": "127.0.0.1",
        "context-length": context,
        "max-running-requests": requests,
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "grammar-backend": "none",
        "stream-interval": STREAM_INTERVAL,
        "incremental-streaming-output": True,
    }
