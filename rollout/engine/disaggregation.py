"""Prefill and decode on servers apart (PD disaggregation): one server computes a request's prompt and sends its KV
cache to another, which generates.

The prefill servers may keep the prefix cache, also where the decode servers run HiSparse: with both on one server
HiSparse computes every turn's whole prefix again.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Literal

from pydantic import Field

from rollout.engine.settings import Argument, Settings

Role = Literal["both", "prefill", "decode"]

CHECK_TIMEOUT_S = 60.0
MOONCAKE = ("mooncake.engine", "mooncake-transfer-engine (on a CPU mooncake-transfer-engine-non-cuda)")
PACKAGES = {
    "mooncake": MOONCAKE,
    "mooncake_tcp": MOONCAKE,
    "nixl": ("nixl._api", "nixl"),
    "mori": ("mori.io", "amd-mori"),
    "ascend": ("memfabric_hybrid", "memfabric-hybrid"),
}
"""What SGLang imports to send KV caches, by transfer backend, and the package that has it."""


class RoleConfig(Settings):
    """One kind of server; what is None is as in the engine's own settings."""

    servers: int = Field(default=1, gt=0)
    tensor_parallel: int | None = Field(default=None, gt=0)
    data_parallel_attention: int | None = Field(default=None, gt=0)
    expert_parallel: int | None = Field(default=None, gt=0)
    memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    max_running_requests: int | None = Field(default=None, gt=0)
    max_total_tokens: int | None = Field(default=None, gt=0)
    extra_args: dict[str, Argument] = Field(default_factory=dict)
    """Added to the engine's own, and before them where both name one."""


class DisaggregationConfig(Settings):
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
    transfer_backend: Literal["mooncake", "mooncake_tcp", "nixl", "mori", "ascend"] = "mooncake"
    """How KV goes from prefill to decode; mooncake_tcp needs no RDMA."""
    bootstrap_port: int = Field(8998, gt=0, lt=65_536)
    """Of the first prefill server, where decode servers ask for its addresses; the others have the next ones."""
    ib_device: str | None = None
    """InfiniBand devices (``mlx5_0,mlx5_1``); null lets the transfer backend look."""
    share_gpus: bool = False
    """Prefill server i and decode server i on the same GPUs, to try the wiring on few; ``memory_fraction`` of the two
    must then leave room for each other. They start together, and each takes its share of what it finds free: set
    ``max_total_tokens`` of both, so that neither finds too little."""

    def of(self, role: Role) -> RoleConfig:
        return self.prefill if role == "prefill" else self.decode


@functools.cache
def transfer_problem(backend: str) -> str | None:
    """Why servers on this machine could not send KV caches, or None: what SGLang will import is imported, in a process
    of its own, because it also needs libraries that no Python package brings."""
    module, package = PACKAGES[backend]
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        reason = f"nothing within {CHECK_TIMEOUT_S:g} s"
    else:
        if done.returncode == 0:
            return None
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    hint = "; that is in the system's package libibverbs1 (rdma-core)" if "libibverbs" in reason else ""
    return (
        f"disaggregation.transfer_backend={backend} needs the Python package {package}, and importing {module} says: "
        f"{reason}{hint}"
    )
