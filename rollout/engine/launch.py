"""Which servers an engine has, and the command line and environment of each; for SGLang 0.5.16 and 0.5.23."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.engine import expert_tiles, hisparse
from rollout.engine.disaggregation import Role
from rollout.engine.model_shape import read_model_shape
from rollout.engine.opened_memory import LOADER
from rollout.engine.settings import Argument, flags
from rollout.engine.sglang_answers import STREAM_INTERVAL

if TYPE_CHECKING:
    from rollout.engine.config import EngineConfig

OWN_ARGUMENTS = frozenset(
    {
        "base-gpu-id",
        "nnodes",
        "node-rank",
        "dist-init-addr",
        "dp-size",
        "enable-dp-attention",
        "attn-dp-size",
        "ep-size",
    }
    | {"kv-cache-dtype", "max-total-tokens", "mem-fraction-static", "enable-hisparse", "hisparse-config"}
    | {"enable-hierarchical-cache", "hicache-ratio", "hicache-size", "hicache-write-policy", "hicache-io-backend"}
    | {"hicache-mem-layout", "hicache-storage-backend", "hicache-storage-prefetch-policy", "disaggregation-mode"}
    | {"disaggregation-transfer-backend", "disaggregation-bootstrap-port", "disaggregation-ib-device"}
)
"""Arguments that are set from typed settings, where those are given."""


@dataclass(frozen=True)
class ServerSpec:
    """One server of a set."""

    index: int
    role: Role
    settings: EngineConfig
    """Of this server alone: its role's settings, ``servers`` 1, no ``disaggregation``."""
    first_gpu: int
    """Of its machine, counted as if all servers were on one."""
    bootstrap_port: int | None
    """Of a prefill server; requests to a decode server name it."""

    @property
    def name(self) -> str:
        return f"engine-{self.index}" if self.role == "both" else f"{self.role}-{self.index}"


def server_specs(config: EngineConfig) -> tuple[ServerSpec, ...]:
    """All servers, prefill servers first."""
    apart = config.disaggregation
    specs: list[ServerSpec] = []
    gpu = 0
    for role in config.roles:
        settings = config.for_role(role)
        gpu = 0 if apart is not None and apart.share_gpus else gpu
        for rank in range(config.servers_of(role)):
            port = apart.bootstrap_port + rank if apart is not None and role == "prefill" else None
            specs.append(ServerSpec(len(specs), role, settings, gpu, port))
            gpu += settings.tensor_parallel
    return tuple(specs)


def command(
    config: EngineConfig,
    model_dir: Path,
    port: int,
    weight_version: int = 0,
    index: int = 0,
    node_rank: int = 0,
    head_address: str | None = None,
) -> list[str]:
    """Command line of one server (of one of its machines, where it spans several).

    Args:
        model_dir: HF directory.
        port: where it listens, on 127.0.0.1 (on all addresses where servers are reached from other machines).
        weight_version: version of the weights in ``model_dir``.
        index: which of ``server_specs`` it is; says its role and which GPUs it gets.
        node_rank: which of the server's machines.
        head_address: host:port where the server's machines meet; needed where ``nodes_per_server`` is more than 1.
    """
    spec = server_specs(config)[index]
    launcher = "rollout.engine.cpu_launch" if config.device == "cpu" else "sglang.launch_server"
    options = arguments(spec.settings, model_dir, port, weight_version) | _placement(spec, config)
    if spec.settings.nodes_per_server > 1:
        if head_address is None:
            raise ValueError("a server on several machines needs head_address, where they meet")
        options |= {"nnodes": spec.settings.nodes_per_server, "node-rank": node_rank, "dist-init-addr": head_address}
    if spec.settings.hisparse is not None:
        shape = read_model_shape(model_dir)
        for problem in hisparse.model_problems(spec.settings.hisparse, shape.index_topk, shape.model_type):
            raise ValueError(f"engine.{problem}")
        assert shape.index_topk is not None
        options |= spec.settings.hisparse.arguments(shape.index_topk)
    return [sys.executable, "-m", launcher, *flags(options), *flags(spec.settings.extra_args)]


CUMEM = "NCCL_CUMEM_ENABLE"
NCCL_DECIDES = "-2"
"""NCCL's own default. SGLang writes 0 where it finds nothing, and then a broadcast from a trainer, whose NCCL decides
for itself, ends with "invalid argument": both sides of a connection must share memory in the same way. What is set for
the run is the trainer's, too, and stays."""


def environment(config: EngineConfig, address: str = "127.0.0.1") -> dict[str, str]:
    """What SGLang itself reads from its environment.

    Args:
        address: by which the other machines reach this one.
    """
    common = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}  # seconds until a cancelled request is noticed and ended
    if config.disaggregation is not None:
        common["SGLANG_HOST_IP"] = address  # where KV caches are sent to; else the first network card's
    if config.device == "cuda":
        reserve = hisparse.RESERVE if config.hisparse is not None else {}
        return common | {CUMEM: os.environ.get(CUMEM, NCCL_DECIDES)} | reserve | expert_tiles.environment(config)
    return common | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # no Triton to compile for
        "OMP_NUM_THREADS": str(config.cpu_threads),
    }


def arguments(config: EngineConfig, model_dir: Path, port: int, weight_version: int) -> dict[str, Argument]:
    """SGLang's arguments that follow from the settings alone, by name."""
    options: dict[str, Argument] = {
        "model-path": str(model_dir),
        "host": "127.0.0.1",
        "port": port,
        "device": config.device,
        "dtype": config.dtype,
        "tp-size": config.tensor_parallel,
        "context-length": config.context_length,
        "max-running-requests": config.max_running_requests,
        "weight-version": str(weight_version),
        "random-seed": config.seed,
        "skip-tokenizer-init": True,  # ids in, ids out: nothing to decode
        "skip-server-warmup": True,  # the fleet's first request does that
        "incremental-streaming-output": True,
        "log-level": "warning",
        "disable-radix-cache": not config.prefix_cache,
        "enable-deterministic-inference": config.deterministic,
        "enable-memory-saver": config.memory_saver,
        "enable-metrics": config.metrics,
        "enable-return-routed-experts": config.routed_experts,
        "custom-weight-loader": LOADER,
    }
    if config.sglang_router is not None:  # which drops the request's own
        options["stream-interval"] = STREAM_INTERVAL
    if config.kv_dtype != "auto":
        options["kv-cache-dtype"] = config.kv_dtype
    if config.max_total_tokens is not None:
        options["max-total-tokens"] = config.max_total_tokens
    if config.memory_fraction is not None:
        options["mem-fraction-static"] = config.memory_fraction
    if config.data_parallel_attention > 1:  # the spelling that both 0.5.16 and 0.5.23 take
        options |= {"dp-size": config.data_parallel_attention, "enable-dp-attention": True}
    if config.expert_parallel > 1:
        options["ep-size"] = config.expert_parallel
    if config.hicache is not None:
        options |= config.hicache.arguments()
    if config.device == "cpu":
        options |= {
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "grammar-backend": "none",
            "sleep-on-idle": True,  # else the scheduler spins on a core
            "disable-overlap-schedule": True,  # nothing to overlap, and version spans are exact
        }
    return options


def _placement(spec: ServerSpec, config: EngineConfig) -> dict[str, Argument]:
    options: dict[str, Argument] = {}
    if config.device == "cuda":
        options["base-gpu-id"] = spec.first_gpu
    apart = config.disaggregation
    if apart is None:
        return options
    options |= {"disaggregation-mode": spec.role, "disaggregation-transfer-backend": apart.transfer_backend}
    if config.hisparse is not None:
        options |= hisparse.apart_arguments(spec.role, config.kv_dtype, spec.settings.extra_args)
    if config.device == "cpu" and spec.role == "decode":
        options["disaggregation-decode-retraction-backup"] = "cpu_tensor"  # by default in memory that CUDA pins
    if spec.bootstrap_port is not None:
        options["disaggregation-bootstrap-port"] = spec.bootstrap_port
    if apart.ib_device is not None:
        options["disaggregation-ib-device"] = apart.ib_device
    return options
