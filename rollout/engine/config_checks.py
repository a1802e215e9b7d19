"""Settings of an engine that exclude each other: every line names them and says which to change.

Held by SGLang itself later, where the models are loaded: ``arg_groups/parallel_hook.py``, ``hisparse_hook.py``,
``hicache_hook.py``, ``pd_disaggregation_hook.py`` of 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.engine import hicache, hisparse, router_settings
from rollout.engine.disaggregation import DisaggregationConfig
from rollout.engine.hisparse import HiSparseConfig
from rollout.engine.launch import OWN_ARGUMENTS, arguments
from rollout.engine.settings import Argument

if TYPE_CHECKING:
    from rollout.engine.config import EngineConfig

MAX_PORT = 65_535


def problems(config: EngineConfig) -> Iterator[str]:
    """What can't work, each beginning with a key below ``engine``."""
    yield from _parallel_problems(config)
    servers = sum(config.servers_of(role) for role in config.roles)
    if config.port is not None and config.port + servers > MAX_PORT + 1:
        yield f"port {config.port} leaves no ports for {servers} servers"
    extra = _with_dashes(config.extra_args)
    twice = sorted((arguments(config, Path(), 0, 0).keys() | OWN_ARGUMENTS) & extra.keys())
    if twice:
        yield f"extra_args sets {twice}, which other keys of engine set"
    if config.moe_configs is not None and config.device == "cpu":
        yield "moe_configs is for the kernel of a GPU, and device is cpu: set moe_configs to null"
    if config.moe_configs is not None and config.deterministic:
        yield "moe_configs is not read with deterministic: set moe_configs to null, or deterministic to false"
    if config.hicache is not None:
        yield from hicache.problems(config.hicache)
        if not config.prefix_cache:
            yield (
                "hicache keeps what the prefix cache evicts, but prefix_cache is false: set prefix_cache to true, or "
                "hicache to null"
            )
    if config.sglang_router is not None:
        yield from router_settings.problems(config)
    if config.disaggregation is not None:
        yield from _disaggregation_problems(config, config.disaggregation, servers)
        if config.hisparse is not None:
            prefill = _with_dashes(config.extra_args | config.disaggregation.prefill.extra_args)
            yield from hisparse.transfer_problems(config.disaggregation.transfer_backend, config.kv_dtype, prefill)
    elif config.hisparse is not None:
        yield from _hisparse_problems(config, config.hisparse, extra)


def _with_dashes(arguments: Mapping[str, Argument]) -> dict[str, Argument]:
    return {name.replace("_", "-"): value for name, value in arguments.items()}


def _parallel_problems(config: EngineConfig) -> Iterator[str]:
    tp, dp, ep = config.tensor_parallel, config.data_parallel_attention, config.expert_parallel
    nodes, running = config.nodes_per_server, config.max_running_requests
    if config.device == "cpu" and tp != 1:
        yield f"tensor_parallel must be 1 on a CPU, and is {tp}: set it to 1, or device to cuda"
    if tp % dp:
        yield f"tensor_parallel={tp} GPUs do not split into data_parallel_attention={dp} groups: change one of the two"
    if ep not in (1, tp):
        yield f"expert_parallel={ep} must be 1 or tensor_parallel={tp}"
    if tp % nodes:
        yield f"tensor_parallel={tp} GPUs do not spread over nodes_per_server={nodes}: change the one or the other"
    if running < dp:
        yield f"max_running_requests={running} gives data_parallel_attention={dp} groups less than one each: raise it"


def _hisparse_problems(config: EngineConfig, section: HiSparseConfig, extra: dict[str, Argument]) -> Iterator[str]:
    if config.device == "cpu":
        yield "hisparse needs a GPU, and device is cpu: set device to cuda, or hisparse to null"
    if config.prefix_cache:
        yield (
            "hisparse and prefix_cache exclude each other (cached prefixes stay whole on the GPU): set prefix_cache to "
            "false, or hisparse to null"
        )
    running = -(-config.max_running_requests // config.data_parallel_attention)
    yield from hisparse.problems(section, config.kv_dtype, running, config.max_total_tokens, extra)


def _disaggregation_problems(config: EngineConfig, apart: DisaggregationConfig, servers: int) -> Iterator[str]:
    if config.servers != 1:
        yield (
            f"servers={config.servers} counts servers that do both: leave it 1, and set disaggregation.prefill.servers "
            "and disaggregation.decode.servers"
        )
    first, last = apart.bootstrap_port, apart.bootstrap_port + apart.prefill.servers - 1
    if last > MAX_PORT:
        yield f"disaggregation.bootstrap_port={first} leaves no ports for {apart.prefill.servers} prefill servers"
    if config.port is not None and config.port <= last and first < config.port + servers:
        yield (
            f"disaggregation.bootstrap_port={first} is among the servers' own ports, from port={config.port} on: "
            "move one of the two"
        )
    if apart.share_gpus and config.memory_fraction is None:
        for role in ("prefill", "decode"):
            if apart.of(role).memory_fraction is None:
                yield f"disaggregation.share_gpus puts two servers on a GPU: set disaggregation.{role}.memory_fraction"
