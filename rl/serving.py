"""What a run needs to generate: task servers, inference servers and the gateway between them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from rl.config import ConfigError, RunConfig, TaskConfig
from rollout.chat import ChatRenderer
from rollout.engine.fleet import EngineFleet
from rollout.engine.ray_launcher import RayLauncher
from rollout.episode import EpisodeRunner, EpisodeSettings
from rollout.gateway import Gateway
from rollout.processes import ManagedProcess, ProcessRegistry, free_ports
from rollout.task_client import TaskClient, TaskServerError
from rollout.telemetry import engine_figures

TASK_START_S = 60.0
TASK_POLL_S = 0.2


@dataclass(frozen=True)
class Serving:
    fleet: EngineFleet
    gateway: Gateway
    runner: EpisodeRunner
    slots: Mapping[str, int]
    """Episodes at once, by task."""

    async def engine_figures(self) -> dict[str, float]:
        """What the servers say of themselves now, and latencies since the last call; ``engine/…`` in a step's row."""
        figures = engine_figures(await self.fleet.metrics()) | self.gateway.telemetry.latencies()
        return {f"engine/{name}": value for name, value in figures.items()}


async def start_serving(
    config: RunConfig,
    renderer: ChatRenderer,
    model_dir: Path,
    registry: ProcessRegistry,
    stack: AsyncExitStack,
    logs: Path,
    say: Callable[[str], None],
    top_logprobs: int = 0,
) -> Serving:
    """Start everything together; ``stack`` ends it, the last started first.

    Args:
        top_logprobs: likeliest tokens that are recorded at each sampled position.

    Raises:
        ProcessError, EngineError, TaskServerError: something did not come up; the message names it and its log.
    """
    shape = _experts_shape(model_dir) if config.engine.routed_experts else (0, 0)
    check_top_logprobs(model_dir, top_logprobs)
    launcher = RayLauncher(config.engine, logs) if config.engine.placement == "ray" else None
    fleet = EngineFleet(config.engine, registry, logs, on_progress=say, launcher=launcher, experts_shape=shape)
    stack.push_async_callback(fleet.stop)
    clients: dict[str, TaskClient] = {}
    processes: dict[str, list[ManagedProcess]] = {}
    for name, task in config.tasks.items():
        urls, processes[name] = _task_servers(name, task, registry, logs)
        clients[name] = await stack.enter_async_context(TaskClient(name, urls))
    gateway = Gateway(
        fleet,
        renderer,
        config.engine.context_length,
        config.model.name,
        config.engine.routed_experts,
        top_logprobs,
    )
    await gateway.start(config.rollout.gateway_host, config.rollout.gateway_port)
    stack.push_async_callback(gateway.stop)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fleet.start(model_dir))
            waits = {
                name: group.create_task(_wait_for_task(client, processes[name])) for name, client in clients.items()
            }
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # it cancelled the others
    settings = {name: EpisodeSettings(task.max_tokens, task.episode_timeout_s) for name, task in config.tasks.items()}
    return Serving(
        fleet, gateway, EpisodeRunner(gateway, clients, settings), {name: wait.result() for name, wait in waits.items()}
    )


def _experts_shape(model_dir: Path) -> tuple[int, int]:
    """Layers and experts a token of a mixture model, as SGLang counts them: dense layers, too.

    Raises:
        ConfigError: the model has no experts.
    """
    model = AutoConfig.from_pretrained(model_dir).get_text_config()
    layers, top_k = model.num_hidden_layers, getattr(model, "num_experts_per_tok", None)
    if top_k is None:
        raise ConfigError(f"engine.routed_experts: {model_dir} is no mixture of experts; set it to false")
    return int(layers), int(top_k)


def check_top_logprobs(model_dir: Path, count: int) -> None:
    """Raises:
    ConfigError: the model has fewer tokens."""
    if not count:
        return
    vocabulary = AutoConfig.from_pretrained(model_dir).get_text_config().vocab_size
    if count > vocabulary:
        raise ConfigError(
            f"algorithm.rollout_top_k={count}, but the vocabulary of {model_dir} has {vocabulary} tokens; lower it"
        )


async def check_remote_tasks(config: RunConfig) -> None:
    """Ask the task servers that run elsewhere who they are, before anything is started.

    Raises:
        ConfigError: one does not answer, or is not that task's server.
    """
    for name, task in config.tasks.items():
        urls = task.urls
        if not urls:
            continue
        async with TaskClient(name, urls) as client:
            try:
                await client.check()
            except TaskServerError as error:
                raise ConfigError(f"tasks.{name}.url: {error}; start it, or leave url out to run one here") from error


def _task_servers(
    name: str, task: TaskConfig, registry: ProcessRegistry, logs: Path
) -> tuple[list[str], list[ManagedProcess]]:
    """URLs of a task's servers, and the processes of those that are started here."""
    urls, processes = task.urls, []
    if urls:
        return urls, []
    for replica, port in enumerate(free_ports(task.replicas)):
        command = [sys.executable, "-m", "tasks.serve", name, "--port", str(port), "--slots", str(task.slots)]
        command += ["--options", json.dumps(task.options)]
        label = f"task-{name}-{replica}"
        processes.append(registry.start(label, command, logs / f"{label}.log", grace_s=3.0))
        urls.append(f"http://127.0.0.1:{port}")
    return urls, processes


async def _wait_for_task(client: TaskClient, processes: list[ManagedProcess]) -> int:
    """Slots of the task's servers, once all of them answer; servers that run elsewhere must answer at once."""
    deadline = time.monotonic() + TASK_START_S
    while True:
        for process in processes:
            process.check()
        try:
            return await client.check()
        except TaskServerError:
            if not processes or time.monotonic() > deadline:
                raise
        await asyncio.sleep(TASK_POLL_S)
