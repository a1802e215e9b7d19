"""What HiSparse did in a running server, read from its own state, step by step.

SGLang 0.5.16 reports no hits and misses of HiSparse. Its swap-in kernel keeps, by layer and request, which token each
slot of the device buffer holds and the slots' order of use, both on the GPU. So around decode steps:

    misses (loads from host memory) = slots that hold another token than one step before
    the top k                       = the tokens in the slots used last

Nothing in the server is changed: ``ModelRunner.forward`` is wrapped, and while a request for an observation lies in the
folder, the two tensors are copied before each decode step. Also written once: the bytes of the KV pools.
"""

from __future__ import annotations

import itertools
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch

STEPS = 12
"""Steps of one observation."""
REQUESTS = 32
"""Running requests that are looked at."""
ASK, ANSWER, POOLS = "observe", "observed.json", "pools.json"


def ask(folder: Path) -> None:
    """Request one observation from the server that was started with this folder."""
    path = folder / ANSWER
    if path.exists() and "error" in json.loads(path.read_text()):
        return  # it has given up: that stays its answer
    path.unlink(missing_ok=True)
    (folder / ASK).touch()


def answer(folder: Path, timeout_s: float) -> dict[str, Any] | None:
    """The observation, or None where none came in time (no decode steps)."""
    deadline = time.monotonic() + timeout_s
    while not (folder / ANSWER).exists():
        if time.monotonic() > deadline:
            (folder / ASK).unlink(missing_ok=True)
            return None
        time.sleep(0.1)
    found: dict[str, Any] = json.loads((folder / ANSWER).read_text())
    return found


def pools(folder: Path) -> dict[str, Any] | None:
    """Bytes of the server's KV pools, or None before its first forward pass."""
    path = folder / POOLS
    return json.loads(path.read_text()) if path.exists() else None


class Observer:
    """Lives in the scheduler's process; ``install`` wraps the model runner's forward pass."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows: torch.Tensor | None = None
        self._pools_written = False
        self._works = True

    def install(self) -> None:
        import sglang.srt.managers.scheduler  # noqa: F401  (first, as SGLang's own processes do: the others import in circles)
        from sglang.srt.model_executor.model_runner import ModelRunner

        forward = ModelRunner.forward

        def observed(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._works:
                self.before_forward(runner, forward_batch)
            return forward(runner, forward_batch, *args, **kwargs)

        ModelRunner.forward = observed

    def before_forward(self, runner: Any, batch: Any) -> None:
        """Look, where that was asked for. An error is the answer, and the last one: it must not end the server."""
        try:
            self._look(runner, batch)
        except Exception:  # noqa: BLE001  (SGLang's insides may differ from those we know)
            self._works = False
            _write(self.folder / ANSWER, {"error": traceback.format_exc()[-1000:]})

    def _look(self, runner: Any, batch: Any) -> None:
        if not self._pools_written:
            self._pools_written = True
            _write(self.folder / POOLS, pool_bytes(runner))
        coordinator = runner.hisparse_coordinator
        if coordinator is None or not batch.forward_mode.is_decode() or not (self.folder / ASK).exists():
            self._taken, self._rows = [], None
            return
        if self._rows is None:
            self._rows = batch.req_pool_indices[:REQUESTS].clone()
        tokens, order = coordinator.req_device_buffer_tokens, coordinator.lru_slots
        self._taken.append((tokens[:, self._rows, : order.shape[-1]].clone(), order[:, self._rows].clone()))
        if len(self._taken) > STEPS:
            (self.folder / ASK).unlink(missing_ok=True)
            _write(self.folder / ANSWER, summary(self._taken, coordinator.top_k) | {"running": batch.batch_size})
            self._taken, self._rows = [], None


def summary(taken: list[tuple[torch.Tensor, torch.Tensor]], top_k: int) -> dict[str, Any]:
    """Means over steps, layers and requests, from the slots' tokens and order (layer, request, slot), oldest use first.

    The newest token has a slot of its own beside these; it counts as kept and as a hit.
    """
    misses, kept = [], []
    for (tokens_before, order_before), (tokens, order) in itertools.pairwise(taken):
        misses.append((tokens != tokens_before).float().sum(-1).mean().item())
        before, after = (_selected(t, o, top_k) for t, o in ((tokens_before, order_before), (tokens, order)))
        kept.append(_common(before, after))
    count = len(misses)
    return {
        "steps": count,
        "misses_per_layer": sum(misses) / count,
        "hit_share": 1 - sum(misses) / count / top_k,
        "locality": sum(kept) / count,
    }


def _selected(tokens: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    return tokens.gather(-1, order[..., -top_k:].long()).flatten(0, 1)


def _common(before: torch.Tensor, after: torch.Tensor) -> float:
    """Share of each row of ``after`` that is in that row of ``before``, averaged."""
    before = before.sort(-1).values
    at = torch.searchsorted(before, after.contiguous()).clamp(max=before.shape[-1] - 1)
    return (before.gather(-1, at) == after).float().mean().item()


def pool_bytes(runner: Any) -> dict[str, Any]:
    """Bytes on the GPU that KV takes, by what they are for, and in host memory; from the tensors themselves."""
    pool, requests, coordinator = runner.token_to_kv_pool, runner.req_to_token_pool, runner.hisparse_coordinator
    found = {
        "kv": _nbytes(vars(pool).get("kv_buffer") or (vars(pool).get("k_buffer"), vars(pool).get("v_buffer"))),
        "indexer_keys": _nbytes(vars(pool).get("index_k_with_scale_buffer")),
        "request_table": _nbytes(requests.req_to_token),
    }
    host = 0
    if coordinator is not None:
        host = _nbytes(coordinator.mem_pool_host.kv_buffer)
        found["hisparse_tables"] = sum(
            _nbytes(value) for value in vars(coordinator).values() if isinstance(value, torch.Tensor) and value.is_cuda
        )
        found["hisparse_map"] = _nbytes(coordinator.token_to_kv_pool_allocator.full_to_hisparse_device_index_mapping)
    return {"gpu": sum(found.values()), "host": host, "tokens": runner.max_total_num_tokens, "gpu_parts": found}


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(_nbytes(item) for item in value)
    return 0


def _write(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all: the benchmark polls for it."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(value))
    half.replace(path)
