"""The servers, and what they sample."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from benchmarks.engine.pools import PAGE, KvBytes, hisparse_pool
from benchmarks.engine.servers import Argument, Server, ServerSpec, common
from benchmarks.logprob_gap.models import (
    DENSE_LAYERS,
    DSA_LAYERS,
    FP32_HEAD,
    INDEX_DIM,
    LATENT,
    ROTARY,
    SERVER_MODELS,
    TOP_K,
    Case,
)
from benchmarks.logprob_gap.records import record
from rollout.engine.hisparse import RESERVE
from rollout.trajectory import NOT_RECORDED, Trajectory

SLACK = 64
"""Tokens of a context that stay free."""
NO_DENSE_PREFILL = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}
"""Prompts below the top k would take FlashAttention-3, which need not be there."""


def server_spec(server: str, directory: Path, context: int, requests: int, cuda: bool, dummy: bool) -> ServerSpec:
    """
    Args:
        dummy: start with any weights; others will be published.
    """
    arguments = common(directory, context + SLACK, requests) | {"sampling-backend": "pytorch"}
    arguments |= {"enable-fp32-lm-head": server == FP32_HEAD} | ({"load-format": "dummy"} if dummy else {})
    if not cuda:
        arguments |= {
            "device": "cpu",
            "dtype": "float32",
            "attention-backend": "torch_native",
            "sleep-on-idle": True,
            "disable-overlap-schedule": True,
            "max-total-tokens": 16_384,
        }
        cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "2"}
        return ServerSpec("plain", arguments, cpu)
    tokens = requests * (context + SLACK + PAGE) // PAGE * PAGE
    arguments |= {
        "dtype": "bfloat16",
        "disable-prefill-cuda-graph": True,
        "mem-fraction-static": 0.8,
        "cuda-graph-bs-decode": " ".join(map(str, sorted({max(1, requests // 2), requests}))),
        "max-total-tokens": tokens,
    }
    if SERVER_MODELS[server] == "dense":
        return ServerSpec("plain", arguments | {"attention-backend": "triton"}, {})
    arguments |= {
        "kv-cache-dtype": "bfloat16",
        "dsa-prefill-backend": "flashmla_sparse",
        "dsa-decode-backend": "flashmla_sparse",
        "chunked-prefill-size": 8192,
    }
    if server == "dsa":
        return ServerSpec("plain", arguments | {"enable-return-routed-experts": True}, NO_DENSE_PREFILL)
    return _with_hisparse(arguments, context + SLACK, requests)


def _with_hisparse(arguments: dict[str, Argument], context: int, requests: int) -> ServerSpec:
    pool = hisparse_pool(requests, context, TOP_K, context, DSA_LAYERS, KvBytes.of(LATENT, ROTARY, INDEX_DIM))
    config = {"top_k": TOP_K, "device_buffer_size": pool.buffer, "host_to_device_ratio": pool.ratio}
    arguments |= {
        "disable-radix-cache": True,
        "enable-hisparse": True,
        "hisparse-config": json.dumps(config),
        "max-total-tokens": pool.device_tokens,
    }
    return ServerSpec("hisparse", arguments, RESERVE | NO_DENSE_PREFILL)


def until_idle(server: Server, timeout_s: float) -> None:
    """A server answers a moment before it is done with a request, and refuses until then to drop its prefixes, which a
    change of weights must do.

    Raises:
        RuntimeError: it did not become idle.
    """
    if server.side != "hisparse":  # which keeps no prefixes
        server.post(f"/flush_cache?timeout={timeout_s:.1f}", {}, 2 * timeout_s)


def rollouts(
    server: Server,
    prompts: Int32[np.ndarray, "requests prompt"],
    case: Case,
    experts: tuple[int, int] | None,
    timeout_s: float,
) -> list[Trajectory]:
    """
    Args:
        experts: layers, and experts a token, where the server shall say which it chose.
    """
    body: dict[str, Any] = {
        "input_ids": prompts.tolist(),
        "sampling_params": {"max_new_tokens": case.output, "temperature": 1.0},
        "return_logprob": True,
    }
    if experts is not None:
        body["return_routed_experts"] = True
    answers = server.post("/generate", body, timeout_s)
    return [
        _trajectory(index, prompt, answer["meta_info"], experts)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _trajectory(
    index: int, prompt: Int32[np.ndarray, " prompt"], meta: dict[str, Any], experts: tuple[int, int] | None
) -> Trajectory:
    sampled = [(logprob, token) for logprob, token, *_ in meta["output_token_logprobs"]]
    length, given = len(prompt) + len(sampled), len(prompt)
    trajectory = record(
        np.array([*prompt, *(token for _, token in sampled)], np.int32),
        np.arange(length) >= given,
        np.array([0.0] * given + [logprob for logprob, _ in sampled], np.float32),
        index,
        reward=0.0,
    )
    if experts is None:
        return trajectory
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(-1, *experts)
    chosen = np.full((length, *experts), NOT_RECORDED, np.int32)
    chosen[: len(rows)] = rows[:length]
    chosen[:, :DENSE_LAYERS] = NOT_RECORDED  # they have no experts
    return replace(trajectory, routed_experts=chosen)
