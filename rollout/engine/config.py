"""Settings of a set of SGLang servers that serve one model.

Settings that can't work together are refused here (``config_checks``), those that do not fit the model in ``fit``,
arguments of SGLang's that SGLang does not know in ``arguments``. ``launch`` makes command lines of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from rollout.engine.config_checks import MAX_PORT, problems
from rollout.engine.disaggregation import DisaggregationConfig, Role
from rollout.engine.hicache import HiCacheConfig
from rollout.engine.hisparse import HiSparseConfig
from rollout.engine.recovery import RecoveryConfig
from rollout.engine.router_settings import SGLangRouterConfig
from rollout.engine.settings import Argument, Settings


class EngineConfig(Settings):
    """A set of SGLang servers that serve one model."""

    device: Literal["cpu", "cuda"] = "cpu"
    servers: int = Field(1, gt=0)
    """That prefill and decode; with ``disaggregation`` its two roles say how many."""
    tensor_parallel: int = Field(1, gt=0)
    """GPUs a server; on a CPU 1."""
    data_parallel_attention: int = Field(1, gt=0)
    """Groups that a server's GPUs split into for attention, each with requests and KV of its own; else every GPU holds
    MLA's latent again. ``max_running_requests`` is over all of them."""
    expert_parallel: int = Field(1, gt=0)
    """GPUs that the experts are spread over whole: 1 (every GPU holds a slice of each) or ``tensor_parallel``."""
    nodes_per_server: int = Field(1, gt=0)
    """Machines that a server's GPUs are on."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    kv_dtype: Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Of the KV cache; auto is ``dtype`` (SGLang stores DSA models in fp8 on Blackwell)."""
    context_length: int = Field(gt=0)
    """Tokens of prompt and answer together."""
    max_running_requests: int = Field(64, gt=0)
    """Requests decoded together by one server; more wait in its queue."""
    max_total_tokens: int | None = Field(None, gt=0)
    """Size of a server's KV pool in tokens; None lets SGLang take what ``memory_fraction`` leaves."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV pool; None lets SGLang choose."""
    memory_saver: bool = False
    """Let the server give its weights' and KV pool's memory back while a trainer uses the GPU (torch-memory-saver)."""
    prefix_cache: bool = True
    hisparse: HiSparseConfig | None = None
    """KV cache in host memory, hot tokens on the GPU; with ``disaggregation`` on the decode servers alone."""
    hicache: HiCacheConfig | None = None
    """Evicted prefixes in host memory; with ``disaggregation`` on the prefill servers alone."""
    disaggregation: DisaggregationConfig | None = None
    """Prefill and decode on servers apart."""
    metrics: bool = False
    """Serve Prometheus metrics at each server's ``/metrics``."""
    routed_experts: bool = False
    """Be able to return which experts computed each token (router replay)."""
    moe_configs: Path | None = None
    """Directory of tuned tiles for the experts' kernel, as SGLang's tuner names them: ``configs/triton_X_Y_Z/E=...``.
    SGLang then reads all of them from there and none of its own; null: its own, or a rule of thumb."""
    deterministic: bool = False
    """Sampling depends on ``Sampling.seed`` alone, not on the batch; slower. Without it those seeds are ignored."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of a server's own random numbers."""
    cpu_threads: int = Field(1, gt=0)
    """Threads of one CPU server's matrix products."""
    port: int | None = Field(None, gt=0, le=MAX_PORT)
    """Port of the first server, the others have the next ones; None takes free ones."""
    start_timeout_s: float = Field(300.0, gt=0)
    """From launch to the first token."""
    request_timeout_s: float = Field(600.0, gt=0)
    """For one generation, the wait in the server's queue included."""
    control_timeout_s: float = Field(60.0, gt=0)
    """For pausing, aborting, metrics and each step of a weight update."""
    recovery: RecoveryConfig = RecoveryConfig()
    sglang_router: SGLangRouterConfig | None = None
    """Generation goes through a ``sglang-router`` process, which chooses the server; None: ours does (``routing``)."""
    placement: Literal["local", "ray"] = "local"
    """Where servers run: children of the driver, or wherever Ray has room (needed for several machines)."""
    extra_args: dict[str, Argument] = Field(default_factory=dict)
    """Further arguments of SGLang's without the dashes (``chunked-prefill-size: 512``; true is a bare flag).
    ``rollout.engine.arguments`` has SGLang's own parser judge them before anything is launched."""

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        for problem in problems(self):
            raise ValueError(f"engine.{problem}")
        for role in self.roles if self.disaggregation is not None else ():
            try:
                self.for_role(role)
            except ValidationError as error:
                raise ValueError(f"engine.disaggregation.{role}: {_first_message(error)}") from error
        return self

    @property
    def roles(self) -> tuple[Role, ...]:
        """Kinds of servers there are."""
        return ("both",) if self.disaggregation is None else ("prefill", "decode")

    def servers_of(self, role: Role) -> int:
        return self.servers if self.disaggregation is None else self.disaggregation.of(role).servers

    def for_role(self, role: Role) -> EngineConfig:
        """What one server of a role runs with: ``servers`` 1, no ``disaggregation``."""
        if self.disaggregation is None:
            return self.model_copy(update={"servers": 1})
        own = self.disaggregation.of(role)
        changes: dict[str, Any] = {"servers": 1, "disaggregation": None}
        changes |= {name: value for name, value in own if name not in ("servers", "extra_args") and value is not None}
        changes["extra_args"] = self.extra_args | own.extra_args
        if role == "prefill":
            changes["hisparse"] = None
        else:
            changes |= {"hicache": None, "prefix_cache": False}  # as SGLang itself does on a decode server
        return EngineConfig(**(dict(self) | changes))


def _first_message(error: ValidationError) -> str:
    return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
