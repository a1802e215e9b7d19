"""The capacity plan of an engine: its checked inputs, and what is reported of them. ``atelier plan`` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from rl.config import ConfigError, Section
from rollout.engine import fit
from rollout.engine.capacity import CapacityError, PoolPlan, Version, Workload, gigabytes, predict_pools
from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import Role
from rollout.engine.model_shape import ModelShape, ModelShapeError, model_shape, read_model_shape
from rollout.engine.throughput import Comparison, Machine, Point, break_even, calibrate, plateau, predict_curve

UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SGLANG_HOST_RESERVE = 10e9
"""Host memory that SGLang leaves alone, a process."""


class PlanConfig(Section):
    """``configs/plan.yaml`` and its overrides."""

    engine: EngineConfig
    model: dict[str, Any]
    seed: int
    gpus: int = Field(gt=0)
    gpu_memory: float = Field(gt=0)
    gpu_reserved: float = Field(ge=0)
    host_memory: float | None = Field(gt=0)
    context: int | None = Field(gt=1)
    output: int = Field(gt=0)
    concurrency: list[int] = Field(min_length=1)
    locality: float = Field(ge=0, le=1)
    sglang: Version
    hbm_bandwidth: float = Field(gt=0)
    pcie_bandwidth: float = Field(gt=0)
    flops: float = Field(gt=0)
    step_overhead_ms: float = Field(ge=0)
    request_overhead_us: float = Field(ge=0)
    swap_overhead_us: float = Field(ge=0)
    expert_tile_rows: int | None = Field(gt=0)
    measured: dict[int, float] | None

    @field_validator(
        "gpu_memory", "gpu_reserved", "host_memory", "hbm_bandwidth", "pcie_bandwidth", "flops", mode="before"
    )
    @classmethod
    def _with_unit(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value

    @property
    def machine(self) -> Machine:
        return Machine(
            hbm_bandwidth=self.hbm_bandwidth,
            host_bandwidth=self.pcie_bandwidth,
            flops=self.flops,
            step_overhead_s=self.step_overhead_ms / 1e3,
            request_overhead_s=self.request_overhead_us / 1e6,
            swap_overhead_s=self.swap_overhead_us / 1e6,
            expert_tile_rows=self.expert_tile_rows,
        )

    @property
    def load(self) -> Workload:
        context = self.engine.context_length if self.context is None else self.context
        return Workload(context - self.output, self.output)


@dataclass(frozen=True)
class ServerPlan:
    """What one kind of server does."""

    role: Role
    settings: EngineConfig
    pools: PoolPlan
    machine: Machine
    """As given, or with the overheads that were measured."""

    def requests(self, load: Workload) -> int:
        """Of a server."""
        return self.pools.requests(load) * self.settings.data_parallel_attention

    def curve(
        self, shape: ModelShape, load: Workload, concurrencies: Sequence[int], locality: float
    ) -> Sequence[Point]:
        return predict_curve(self.settings, shape, self.pools, load, concurrencies, self.machine, locality)


@dataclass(frozen=True)
class Worth:
    """Of HiSparse, for one workload."""

    asked: Comparison
    """At the concurrencies asked for."""
    every: Comparison
    """At each concurrency that a server can run."""
    break_even: float | None
    """Locality from which on its plateau is above the plateau without; None where it never is."""


@dataclass(frozen=True)
class Plan:
    shape: ModelShape
    server: ServerPlan
    """That decodes."""
    without: ServerPlan | None
    """The same without HiSparse, where it has it: of the same GPU bytes."""
    prefill: ServerPlan | None
    curve: Sequence[Point]
    """Of the server that decodes, at the concurrencies asked for."""
    worth: Worth | None
    """Of HiSparse, where the server has it."""


def parse_size(text: str) -> float:
    """``141GB`` or ``4e12`` as a number; powers of 1000, with ``i`` of 1024.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([a-z]*?)(?:/s)?\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is no size: write such as 141GB, 128GiB or 4.0e12")
    return float(match[1]) * UNITS[match[2].upper()]


def check_plan(composed: Mapping[str, Any]) -> PlanConfig:
    """The typed inputs.

    Raises:
        ConfigError: naming each key that is unknown, missing or wrong.
    """
    try:
        config = PlanConfig.model_validate(dict(composed))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, p['loc']))}: {p['msg'].removeprefix('Value error, ')}" for p in error.errors()]
        raise ConfigError("\n".join(lines)) from error
    if config.measured is not None and len(config.measured) < 2:
        raise ConfigError("measured: give at least two, {concurrency: tokens a second}, or null")
    longest = config.load.context
    if config.output >= longest:
        raise ConfigError(f"output={config.output} leaves no prompt in context={longest}: lower it, or raise context")
    if longest > config.engine.context_length:
        raise ConfigError(
            f"context={longest} is more than engine.context_length={config.engine.context_length}: raise "
            "it, or lower context"
        )
    return config


def shape_of(model: Mapping[str, Any]) -> ModelShape:
    """The shape of ``model.checkpoint``, or else of ``model.hf_config``.

    Raises:
        ConfigError: neither says it.
    """
    checkpoint = model.get("checkpoint")
    try:
        if checkpoint not in (None, "???"):
            return read_model_shape(Path(str(checkpoint)))
        if model.get("hf_config"):
            return model_shape(model["hf_config"])
    except ModelShapeError as error:
        raise ConfigError(f"model: {error}") from error
    raise ConfigError(
        "model.checkpoint: give an HF directory, or choose a model that has model.hf_config, such as glm5"
    )


def make_plan(config: PlanConfig) -> Plan:
    """Compute everything.

    Raises:
        ConfigError: the engine does not fit the model or the GPUs; naming the settings to change.
    """
    shape = shape_of(config.model)
    wrong = list(fit.problems(config.engine, shape, config.gpus))
    if wrong:
        raise ConfigError("\n".join(wrong))
    try:
        roles: dict[Role, ServerPlan] = {
            role: _server_plan(config, shape, role, config.engine.for_role(role)) for role in config.engine.roles
        }
        server = roles["decode"] if "decode" in roles else roles["both"]
        without = None
        if server.settings.hisparse is not None:
            dense = server.settings.model_copy(update={"hisparse": None, "max_total_tokens": None})
            without = _server_plan(config, shape, server.role, dense)
        curve = server.curve(shape, config.load, config.concurrency, config.locality)
        worth = None if without is None else _worth(config, shape, without, server)
        plan = Plan(shape, server, without, roles.get("prefill"), curve, worth)
    except CapacityError as error:
        raise ConfigError(str(error)) from error
    for problem in _host_problems(config, plan):
        raise ConfigError(problem)
    return plan


def host_bytes(config: PlanConfig, plan: Plan) -> int:
    """Pinned host memory of all servers."""
    servers = [server for server in (plan.server, plan.prefill) if server is not None]
    return sum(
        server.pools.host_bytes * server.settings.tensor_parallel * config.engine.servers_of(server.role)
        for server in servers
    )


def _server_plan(config: PlanConfig, shape: ModelShape, role: Role, settings: EngineConfig) -> ServerPlan:
    free = int(config.gpu_memory - config.gpu_reserved)
    pools = predict_pools(settings, shape, free, version=config.sglang, role=role)
    machine = config.machine
    if config.measured is not None:
        dense = settings.model_copy(update={"hisparse": None})
        machine = calibrate(dense, shape, config.load, config.measured, machine)
    return ServerPlan(role, settings, pools, machine)


def _worth(config: PlanConfig, shape: ModelShape, without: ServerPlan, sparse: ServerPlan) -> Worth:
    load = config.load
    most = max(without.requests(load), sparse.requests(load), 1)

    def compare(concurrencies: Sequence[int]) -> Comparison:
        return Comparison(*(side.curve(shape, load, concurrencies, config.locality) for side in (without, sparse)))

    def rate(locality: float) -> float:
        return plateau(sparse.curve(shape, load, [most], locality))

    every = compare(range(1, most + 1))
    return Worth(compare(config.concurrency), every, break_even(rate, plateau(every.without)))


def _host_problems(config: PlanConfig, plan: Plan) -> Iterator[str]:
    pools, load = plan.server.pools, config.load
    if plan.server.requests(load) == 0 and pools.hot_tokens is not None and pools.entering_tokens(load) > pools.tokens:
        yield (
            f"context={load.context}: with HiSparse a prompt lies whole on the GPU while it is computed, and "
            f"{pools.entering_tokens(load):,} tokens do not fit into the GPU pool of {pools.tokens:,}: lower "
            "engine.hisparse.host_to_device_ratio or context, or raise engine.memory_fraction"
        )
    elif plan.server.requests(load) == 0:
        yield (
            f"context={load.context}: not one request of that length fits into the pool of {pools.logical_tokens:,} "
            "tokens: lower it, or raise engine.memory_fraction"
        )
    needed = host_bytes(config, plan)
    if config.host_memory is not None and needed and needed + SGLANG_HOST_RESERVE > config.host_memory:
        key = "hisparse.host_to_device_ratio" if plan.server.settings.hisparse is not None else "hicache.ratio"
        yield (
            f"host_memory={gigabytes(config.host_memory)} does not hold the {gigabytes(needed)} of the host pools and "
            f"{gigabytes(SGLANG_HOST_RESERVE)} beside: lower engine.{key} or engine.memory_fraction, or raise "
            "host_memory"
        )
