"""SGLang's answers as our records. Pure; an answer of another shape raises KeyError, TypeError or ValueError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from rollout.engine.protocol import EngineMetrics, FinishReason, Generation


def parse_generation(answer: Mapping[str, Any], prompt_tokens: int) -> Generation:
    """Answer of ``/generate`` with ``return_logprob``.

    Raises:
        ValueError: also where SGLang aborted the request for a reason of its own, such as a prompt too long.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason["type"] == "abort" and "status_code" in reason and reason["status_code"] is not None:
        raise ValueError(f"aborted by the server: {reason.get('message')}")
    entries = meta.get("output_token_logprobs") or []
    token_ids = np.array([entry[1] for entry in entries], np.int32)
    logprobs = np.array([entry[0] for entry in entries], np.float32)
    # An aborted request that had been retracted reports fewer tokens than were sampled; then these two differ as well.
    if reason["type"] != "abort" and list(token_ids) != answer["output_ids"]:
        raise ValueError(f"{len(token_ids)} log-probs for {len(answer['output_ids'])} tokens, or for others")
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        weight_versions=_versions(meta, len(token_ids)),
        finish_reason=FinishReason(reason["type"]),
        prompt_tokens=prompt_tokens,
        cached_tokens=int(meta.get("cached_tokens", 0)),
    )


def _versions(meta: Mapping[str, Any], tokens: int) -> Int32[np.ndarray, " tokens"]:
    spans: Sequence[Mapping[str, Any]] = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": tokens}
    ]
    versions = np.full(tokens, -1, np.int32)
    for span in spans:
        versions[span["start"] : span["end"]] = int(span["version"])
    if (versions < 0).any():
        raise ValueError(f"the weight versions {spans} do not cover {tokens} tokens")
    return versions


def parse_loads(answer: Mapping[str, Any]) -> EngineMetrics:
    """Answer of ``/v1/loads``: sums over the data-parallel ranks, and the fullest rank's share of its KV pool."""
    loads = answer["loads"]
    raw: dict[str, float] = {}
    for load in loads:
        for name, value in load.items():
            if isinstance(value, int | float) and name not in ("timestamp", "dp_rank"):
                raw[name] = raw.get(name, 0.0) + float(value)
    return EngineMetrics(
        running=int(raw["num_running_reqs"]),
        waiting=int(raw["num_waiting_reqs"]),
        kv_used_share=max(float(load["token_usage"]) for load in loads),
        tokens_per_second=raw["gen_throughput"],
        raw=raw,
    )
