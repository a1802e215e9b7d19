"""SGLang's answers as our records. Pure; an answer of another shape raises KeyError, TypeError or ValueError.

Seen in 0.5.23, and read in 0.5.16: both stream ``meta_info.output_token_logprobs`` with the tokens, and take
``sampling_params.stream_interval``; 0.5.16 has no ``weight_versions``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from prometheus_client.parser import text_string_to_metric_families

from rollout.engine.protocol import (
    CachedTokens,
    EngineLost,
    EngineMetrics,
    FinishReason,
    Generation,
    Latency,
    TopLogprobs,
)

TRANSFER_ERROR = "KVTransferError"
"""Names, in what a prefill or decode server says, that a KV cache did not get from the one to the other."""
ABORTED_BETWEEN = "Aborted by AbortReq."
"""So ends such an error where the request was aborted while it was between the two: an abort like others."""

STREAM_INTERVAL = 32
"""Tokens an event, after the first token's: a server that dies costs a reply at most so many tokens less one."""


class GenerationStream:
    """Puts one generation together from the events of ``/generate`` with ``stream`` and ``return_logprob``.

    The server must send each token once (``--incremental-streaming-output``). Tokens are counted by their log-probs: of
    an aborted request SGLang may have sent fewer of those than tokens.
    """

    def __init__(
        self, prompt_tokens: int, experts_from: int | None = None, experts_shape: tuple[int, int] = (0, 0)
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._experts_from = experts_from
        self._experts_shape = experts_shape
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._stamps: list[int] = []
        self._top: list[Sequence[Sequence[Any]]] = []
        self._meta: Mapping[str, Any] = {}
        self._first_s: float | None = None
        self._last_s = 0.0

    def add(self, event: Mapping[str, Any], seconds: float) -> None:
        """Take an event that came ``seconds`` after the request was sent.

        Raises:
            EngineLost: its KV cache was lost on the way from the prefill to the decode server.
            ValueError: also where SGLang refused the request, or aborted it for a reason of its own.
        """
        if "error" in event:
            raise ValueError(f"refused: {event['error'].get('message', event['error'])}")
        meta = event["meta_info"]
        reason = meta["finish_reason"] or {}
        if reason.get("type") == "abort" and reason.get("status_code") is not None:
            message = str(reason.get("message"))
            if TRANSFER_ERROR not in message:
                raise ValueError(f"aborted by the server: {message}")
            if ABORTED_BETWEEN not in message:
                raise EngineLost(message)
        entries = meta.get("output_token_logprobs") or []
        top = meta.get("output_top_logprobs") or []
        if reason.get("type") == "abort" and "prompt_tokens" not in meta:
            entries, top = self._of_waiting(entries, meta), self._of_waiting(top, meta)
        ids = [entry[1] for entry in entries]
        if reason.get("type") != "abort":
            if ids != list(event["output_ids"]):
                raise ValueError(f"{len(ids)} log-probs for {len(event['output_ids'])} tokens, or for others")
            if len(self._ids) + len(ids) != meta["completion_tokens"]:
                raise ValueError(
                    f"after {meta['completion_tokens']} tokens the events hold {len(self._ids) + len(ids)}: the server "
                    "must run with --incremental-streaming-output"
                )
        self._ids += ids
        self._logprobs += [entry[0] for entry in entries]
        self._stamps += [int(meta["weight_version"])] * len(ids)
        self._top += top
        self._meta = meta
        self._last_s = seconds
        if ids and self._first_s is None:
            self._first_s = seconds

    def _of_waiting(self, entries: Sequence[Any], meta: Mapping[str, Any]) -> Sequence[Any]:
        """What is new in the end of a request that was aborted while it waited, as retracted ones do: SGLang then says
        all of its tokens' log-probs again, after those that it had not sent yet."""
        whole = entries[max(len(entries) - meta["completion_tokens"], 0) :]
        return whole[len(self._ids) :]

    @property
    def partial(self) -> Generation | None:
        """What was received so far, as an aborted generation; None where nothing was."""
        return self._generation(FinishReason.ABORT) if self._ids else None

    def finish(self) -> Generation:
        """The whole generation.

        Raises:
            ValueError: the last event says no reason why it ended.
        """
        reason = self._meta.get("finish_reason")
        if reason is None:
            raise ValueError("the events end without a finish_reason")
        return self._generation(FinishReason(reason["type"]))

    def _generation(self, reason: FinishReason) -> Generation:
        return Generation(
            token_ids=np.array(self._ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            weight_versions=self._versions(),
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached=_cached(self._meta),
            latency=None if self._first_s is None else Latency(self._first_s, self._last_s),
            top_logprobs=_top_logprobs(self._top) if self._top else None,
            routed_experts=self._routed_experts(),
        )

    def _versions(self) -> Int32[np.ndarray, " tokens"]:
        """By the spans that the last event says; without any (0.5.16), by what each event was stamped with."""
        spans: Sequence[Mapping[str, Any]] = self._meta.get("weight_versions") or []
        versions = np.array(self._stamps, np.int32)
        if spans:
            versions[:] = -1
            for span in spans:
                versions[span["start"] : span["end"]] = int(span["version"])
            uncovered = versions < 0
            if uncovered.any() and FinishReason.ABORT.value != (self._meta["finish_reason"] or {}).get("type"):
                raise ValueError(f"the weight versions {spans} do not cover {len(versions)} tokens")
            versions[uncovered] = np.array(self._stamps, np.int32)[uncovered]
        return versions

    def _routed_experts(self) -> Int32[np.ndarray, "positions layers top_k"] | None:
        encoded = self._meta.get("routed_experts")
        if encoded is None or self._experts_from is None:
            return None
        flat = np.frombuffer(base64.b64decode(encoded), np.int32)
        rows = self._prompt_tokens + len(self._ids) - 1 - self._experts_from
        layers, top_k = self._experts_shape
        if flat.size != rows * layers * top_k:
            raise ValueError(
                f"{flat.size} routed experts for {rows} positions of {layers} layers with {top_k} experts each"
            )
        return flat.reshape(rows, layers, top_k)


def _cached(meta: Mapping[str, Any]) -> CachedTokens:
    details = meta.get("cached_tokens_details")
    if details:
        return CachedTokens(int(details["device"]), int(details["host"]), int(details.get("storage", 0)))
    return CachedTokens(hbm=int(meta.get("cached_tokens", 0)))


def _top_logprobs(positions: Sequence[Sequence[Sequence[Any]]]) -> TopLogprobs:
    return TopLogprobs(
        np.array([[entry[1] for entry in position] for position in positions], np.int32),
        np.array([[entry[0] for entry in position] for position in positions], np.float32),
    )


def parse_loads(answer: Mapping[str, Any]) -> EngineMetrics:
    """Answer of ``/v1/loads``: sums over the data-parallel ranks, and the fullest rank's share of its KV pool."""
    loads = answer["loads"]
    raw: dict[str, float] = {}
    for load in loads:
        for name, value in load.items():
            if isinstance(value, int | float) and name not in ("timestamp", "dp_rank"):
                raw[name] = raw.get(name, 0.0) + float(value)
    hits = [float(load["cache_hit_rate"]) for load in loads if "cache_hit_rate" in load]
    return EngineMetrics(
        running=int(raw["num_running_reqs"]),
        waiting=int(raw["num_waiting_reqs"]),
        kv_used_share=max(float(load["token_usage"]) for load in loads),
        tokens_per_second=raw["gen_throughput"],
        prefix_hit_share=sum(hits) / len(hits) if hits else None,
        raw=raw,
    )


def parse_prometheus(text: str) -> dict[str, float]:
    """``/metrics`` of a server with ``--enable-metrics``: samples by name without ``sglang:``, summed over labels.

    Histograms keep their ``_sum`` and ``_count``.
    """
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("sglang:") and not sample.name.endswith(("_bucket", "_created")):
                name = sample.name.removeprefix("sglang:")
                samples[name] = samples.get(name, 0.0) + sample.value
    return samples


def host_used_share(samples: Mapping[str, float]) -> float | None:
    """Of the host memory's KV pool, from ``parse_prometheus``. SGLang 0.5.23 says it of HiCache; what HiSparse's pools
    hold is in its log alone."""
    total = samples.get("hicache_host_total_tokens", 0.0)
    return samples["hicache_host_used_tokens"] / total if total else None
