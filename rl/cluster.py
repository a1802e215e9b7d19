"""Ray: one of our own on this machine, or a cluster that runs already."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack

import ray

from rl.config import ClusterConfig, ConfigError, RunConfig
from rollout.engine.launch import server_specs
from rollout.engine.ray_launcher import bundle

log = logging.getLogger(__name__)

CONNECT_S = 5.0
TOO_SLOW = "timed out during startup"
"""Of Ray's error where its node did not register."""


def start_ray(config: ClusterConfig, stack: AsyncExitStack) -> None:
    """Connect; what was started here ends with the stack.

    Called from the main thread: the processes of a local Ray end with the thread that started them.

    Raises:
        ConfigError: no cluster is at ``config.address``.
    """
    if config.address is not None:
        try:
            _reach(config.address)
            ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
        except OSError as error:  # Ray's own are ConnectionError, too
            why = str(error).splitlines()[0]
            raise ConfigError(
                f"cluster.address={config.address}: no Ray cluster can be reached there ({why}); "
                "run `ray start --head` on a node and `ray start --address=...` on the others, or choose cluster=local"
            ) from error
    else:
        _start_here(config)
    stack.callback(ray.shutdown)


def _start_here(config: ClusterConfig) -> None:
    """Once more where it was too slow: Ray gives its own node 30 s to register, which can't be set."""
    for again in (True, False):
        try:
            ray.init(
                address="local",  # never a Ray that happens to run here
                num_cpus=config.cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=config.object_store_bytes,
            )
        except Exception as error:  # Ray raises no type of its own here
            if TOO_SLOW not in str(error):
                raise
            ray.shutdown()
            if not again:
                raise RuntimeError(
                    "Ray did not start on this machine within 30 s, twice: it is too busy, or what its logs say "
                    "(/tmp/ray/session_latest/logs/raylet.err)"
                ) from error
            log.warning("Ray did not start within 30 s on this machine, which may be busy; it is started again")
        else:
            return


def _reach(address: str) -> None:
    """Ray itself tries for minutes to reach a head node that is not there."""
    if found := re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d+)", address):
        with socket.create_connection((found[1], int(found[2])), CONNECT_S):
            return


def demand(config: RunConfig) -> dict[str, float]:
    """What a run asks of Ray, by its resources' names."""
    trainer = config.trainer
    wanted = {"CPU": trainer.world_size * trainer.cpus_per_rank, "GPU": trainer.world_size * trainer.gpus_per_rank}
    if config.needs_engine and config.engine.placement == "ray":
        for spec in server_specs(config.engine):
            for name, count in bundle(spec.settings).items():
                wanted[name] += spec.settings.nodes_per_server * count
    return wanted


def shortage(config: RunConfig, resources: Mapping[str, float]) -> str | None:
    """What the cluster lacks, as it is now, for trainer and engines; a cluster may still grow."""
    lacking = [
        f"{resources.get(name, 0):g} {name}s of the {count:g} that this run takes"
        for name, count in demand(config).items()
        if resources.get(name, 0) < count
    ]
    return f"the Ray cluster has {' and '.join(lacking)}" if lacking else None
