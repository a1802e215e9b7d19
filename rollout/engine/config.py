"""How inference servers are run, and the command line that does it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Argument = bool | int | float | str


class EngineConfig(BaseModel):
    """A set of SGLang servers that serve one model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "cuda"] = "cpu"
    servers: int = Field(1, gt=0)
    tensor_parallel: int = Field(1, gt=0)
    """GPUs a server; on a CPU 1."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    context_length: int = Field(gt=0)
    """Tokens of prompt and answer together."""
    max_running_requests: int = Field(64, gt=0)
    """Requests decoded together by one server; more wait in its queue."""
    max_total_tokens: int | None = Field(None, gt=0)
    """Size of a server's KV pool in tokens; None lets SGLang take what ``memory_fraction`` leaves."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV pool; None lets SGLang choose."""
    prefix_cache: bool = True
    deterministic: bool = False
    """Sampling depends on ``Sampling.seed`` alone, not on the batch; slower. Without it those seeds are ignored."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of a server's own random numbers."""
    cpu_threads: int = Field(1, gt=0)
    """Threads of one CPU server's matrix products."""
    port: int | None = Field(None, gt=0, lt=65_536)
    """Port of the first server, the others have the next ones; None takes free ones."""
    start_timeout_s: float = Field(300.0, gt=0)
    """From launch to the first token."""
    request_timeout_s: float = Field(600.0, gt=0)
    """For one generation, the wait in the server's queue included."""
    control_timeout_s: float = Field(60.0, gt=0)
    """For pausing, aborting, metrics and each step of a weight update."""
    health_interval_s: float = Field(10.0, gt=0)
    extra_args: dict[str, Argument] = Field(default_factory=dict)
    """Further arguments of SGLang's without the dashes (``chunked-prefill-size: 512``; true is a bare flag). SGLang's
    own parser refuses what it does not know when the server starts."""

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.device == "cpu" and self.tensor_parallel != 1:
            raise ValueError("engine.tensor_parallel must be 1 on a CPU")
        if self.port is not None and self.port + self.servers > 65_536:
            raise ValueError(f"engine.port {self.port} leaves no ports for {self.servers} servers")
        ours = {argument[2:] for argument in _arguments(self, Path(), 0, 0, 0) if argument.startswith("--")}
        twice = ours & {name.replace("_", "-") for name in self.extra_args}
        if twice:
            raise ValueError(f"engine.extra_args sets {sorted(twice)}, which the other keys of engine set already")
        return self


def command(config: EngineConfig, model_dir: Path, port: int, weight_version: int = 0, index: int = 0) -> list[str]:
    """Command line of one server.

    Args:
        model_dir: HF directory.
        port: where it listens, on 127.0.0.1.
        weight_version: version of the weights in ``model_dir``.
        index: which of the servers of this machine it is; says which GPUs it gets.
    """
    launcher = [sys.executable, "-m", "rollout.engine.cpu_launch"]
    return [*launcher, *_arguments(config, model_dir, port, weight_version, index), *_extra(config)]


def environment(config: EngineConfig) -> dict[str, str]:
    """What SGLang itself reads from its environment."""
    common = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}  # seconds until a cancelled request is noticed and ended
    if config.device == "cuda":
        return common
    return common | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # no Triton to compile for
        "OMP_NUM_THREADS": str(config.cpu_threads),
    }


def _arguments(config: EngineConfig, model_dir: Path, port: int, weight_version: int, index: int) -> list[str]:
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
        "log-level": "warning",
    }
    if config.max_total_tokens is not None:
        options["max-total-tokens"] = config.max_total_tokens
    if config.memory_fraction is not None:
        options["mem-fraction-static"] = config.memory_fraction
    if not config.prefix_cache:
        options["disable-radix-cache"] = True
    if config.deterministic:
        options["enable-deterministic-inference"] = True
    if config.device == "cpu":
        options |= {
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "grammar-backend": "none",
            "sleep-on-idle": True,  # else the scheduler spins on a core
            "disable-overlap-schedule": True,  # nothing to overlap, and version spans are exact
        }
    else:
        options["base-gpu-id"] = index * config.tensor_parallel
    return _flags(options)


def _extra(config: EngineConfig) -> list[str]:
    return _flags({name.replace("_", "-"): value for name, value in config.extra_args.items()})


def _flags(options: dict[str, Argument]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not False:
            flags += [f"--{name}", str(value)]
    return flags
