"""One real server a test session, on a tiny random model.

Its even weight versions are the weights of ``models[0]``, the odd ones those of ``models[1]``.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.fresh_model import FreshModel, create_model
from rl.weights.publisher import Published, publish
from rl.weights.serialize import directory_shapes, make_buckets
from rl.weights.transports import DiskTransport, TensorTransport
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.launcher import Launched
from rollout.engine.sglang import SGLangEngine, Timeouts
from rollout.engine.sglang_answers import STREAM_INTERVAL
from rollout.processes import ProcessRegistry

CONTEXT_LENGTH = 256
EOS = 1


@dataclass(frozen=True)
class Model:
    directory: Path
    hf: Any

    @torch.no_grad()
    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """Log-prob of each token given those before it; position 0 is 0."""
        logits = self.hf(torch.tensor([token_ids])).logits[0, :-1] / temperature
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return np.concatenate([[0.0], chosen.numpy()])

    @torch.no_grad()
    def likeliest(self, token_ids: list[int], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs of the likeliest tokens at each position; nothing at position 0."""
        top = torch.log_softmax(self.hf(torch.tensor([token_ids])).logits[0, :-1], -1).topk(count, -1)
        nothing = np.zeros((1, count))
        return np.concatenate([nothing, top.indices.numpy()]), np.concatenate([nothing, top.values.numpy()])


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> tuple[Model, Model]:
    made = []
    for seed in (0, 1):
        directory = tmp_path_factory.mktemp(f"model{seed}")
        create_model(directory, FreshModel(context_length=CONTEXT_LENGTH, initializer_range=0.3), seed)
        hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():  # its logit is then 0 among large ones: generations seldom end by themselves
            hf.get_input_embeddings().weight[EOS] = 0
        hf.save_pretrained(directory)
        made.append(Model(directory, hf))
    return made[0], made[1]


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110  # nothing tells us
            await asyncio.sleep(0.01)


async def received(process: Launched) -> list[dict[str, Any]]:
    """Bodies of the requests that a ``fake_server`` got, in their order."""
    async with aiohttp.ClientSession() as http, http.get(process.url + "/requests") as response:
        bodies: list[dict[str, Any]] = await response.json()
        return bodies


async def until_received(process: Launched, request_id: str, tokens: int = 0) -> None:
    """Until the server got the request, and sent so many tokens."""

    async def there() -> bool:
        mine = [body for body in await received(process) if body["rid"].startswith(request_id)]
        return any(body.get("sent", 0) >= tokens for body in mine)

    await until(there, 60)


async def until_running(engine: SGLangEngine, requests: int) -> None:
    async def enough() -> bool:
        return (await engine.metrics()).running >= requests

    await until(enough)


async def until_streaming(engine: SGLangEngine, prompts: Sequence[Sequence[int]]) -> None:
    """Until the server has so many tokens of these prompts' replies that all must have sent some."""
    held = sum(len(prompt) + 2 * STREAM_INTERVAL for prompt in prompts)

    async def enough() -> bool:
        metrics = await engine.metrics()
        return metrics.running == len(prompts) and metrics.raw["num_used_tokens"] >= held

    await until(enough, 60)


async def until_idle(engine: SGLangEngine) -> None:
    async def idle() -> bool:
        metrics = await engine.metrics()
        return metrics.running + metrics.waiting == 0

    await until(idle)


@dataclass
class Server:
    """A fleet of one server, and the event loop of a thread that watches it."""

    fleet: EngineFleet
    loop: asyncio.AbstractEventLoop
    models: tuple[Model, Model]

    @property
    def url(self) -> str:
        return self.fleet.engines[0].url

    def engine(self, **timeouts: float) -> SGLangEngine:
        """A client for the test's own event loop."""
        return SGLangEngine(self.url, Timeouts(**timeouts))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run in the fleet's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=120)

    def transport(self, version: int) -> TensorTransport:
        named = self.models[version % 2].hf.state_dict().items()
        # lm_head is tied to the embedding and no tensor of its own
        weights = [(name, tensor) for name, tensor in named if name != "lm_head.weight"]
        return TensorTransport(list(make_buckets(weights, bucket_bytes=100_000)))

    def disk(self, version: int) -> DiskTransport:
        return DiskTransport(self.models[version % 2].directory)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return directory_shapes(self.models[0].directory)

    async def publish(self, engine: SGLangEngine, version: int) -> Published:
        return await publish([engine], self.transport(version), version, self.shapes())


@pytest.fixture(scope="session")
def running_server(models, tmp_path_factory):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    config = EngineConfig(context_length=CONTEXT_LENGTH, max_running_requests=32, max_total_tokens=8192)
    with ProcessRegistry() as registry:
        fleet = EngineFleet(config, registry, tmp_path_factory.mktemp("logs"), print)
        server = Server(fleet, loop, models)
        server.run(fleet.start(models[0].directory))
        yield server
        server.run(fleet.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def server(running_server):
    """With the weights of ``models[0]``."""

    async def reset() -> None:
        async with running_server.engine() as engine:
            version = await engine.weight_version()
            if version % 2:
                await running_server.publish(engine, version + 1)
            await until_idle(engine)

    asyncio.run(reset())
    return running_server
