"""Prefill and decode on servers apart (PD disaggregation): one server computes a request's prompt and sends its KV
cache to another, which generates.

The prefill servers may keep the prefix cache, also where the decode servers run HiSparse: with both on one server
HiSparse computes every turn's whole prefix again.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout.engine.settings import Argument, Settings

Role = Literal["both", "prefill", "decode"]


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
    must then leave room for each other."""

    def of(self, role: Role) -> RoleConfig:
        return self.prefill if role == "prefill" else self.decode
