"""Ray: one of our own on this machine, or a cluster that runs already."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

import ray

from rl.config import ClusterConfig


def start_ray(config: ClusterConfig, stack: AsyncExitStack) -> None:
    """Connect; what was started here ends with the stack.

    Called from the main thread: the processes of a local Ray end with the thread that started them.
    """
    if config.address is not None:
        ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(
            address="local",  # never a Ray that happens to run here
            num_cpus=config.cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=config.object_store_bytes,
        )
    stack.callback(ray.shutdown)
