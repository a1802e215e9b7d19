"""HiSparse on the decode server of a pair: a random model with sparse attention generates past its top k, on three
servers of one GPU. A prefill server sends KV caches over TCP into the decode server's host memory; an ordinary server
says which log-probs are right.

Rounding moves what a random model selects, so what may differ is measured beside it: how far the ordinary server's own
log-probs, as it generates, are from those that it gives the same tokens at once. As a control it scores them after
other prompts, as with a wrong KV cache: that must be far from it. The servers' logs are below pytest's ``--basetemp``.
"""

import asyncio
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.weights.publisher import publish
from rl.weights.transports import DiskTransport, directory_shapes
from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import DisaggregationConfig, RoleConfig, transfer_problem
from rollout.engine.fleet import EngineFleet
from rollout.engine.hisparse import HiSparseConfig
from rollout.engine.protocol import FinishReason, Generation, Sampling
from rollout.processes import ProcessRegistry, free_port
from tests.engine.conftest import until_running
from tests.engine.gpu_models import SPARSE_SETTINGS, SPARSE_VOCABULARY, START_S, sparse_config, write_sparse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(400),
]

TOP_K, PAGE, CONTEXT, RUNNING = 2048, 64, 4608, 8
HISPARSE = HiSparseConfig(device_buffer_size=TOP_K, host_to_device_ratio=4, swap_in_block_size=960)
PROMPTS = (2200, 2560, 3000, 3333, TOP_K - 40, 300)
"""Lengths: past the top k, on a page's end and not; one whose answer passes it; one that the hot buffer holds."""
GREEDY, LONG = Sampling(0.0, 96), Sampling(0.0, 1200)
STEPS_S = 120.0
"""For what takes a second or two once the servers run; the first may compile kernels."""


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, SPARSE_VOCABULARY, length).tolist()


def one_config(**settings: Any) -> EngineConfig:
    base: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "context_length": CONTEXT,
        "max_running_requests": RUNNING,
        "memory_fraction": 0.5,  # of what it finds free; the pools' sizes are given
        "start_timeout_s": START_S,
        "request_timeout_s": STEPS_S,
        "extra_args": SPARSE_SETTINGS,
    }
    return EngineConfig(**(base | settings))


def pair_config() -> EngineConfig:
    return one_config(
        hisparse=HISPARSE,
        disaggregation=DisaggregationConfig(
            prefill=RoleConfig(max_total_tokens=RUNNING * CONTEXT),
            decode=RoleConfig(max_total_tokens=RUNNING * HISPARSE.needed_tokens),
            transfer_backend="mooncake_tcp",
            bootstrap_port=free_port(),
            share_gpus=True,
        ),
    )


@dataclass
class Servers:
    """A pair and an ordinary server with the same weights, and the event loop that watches them."""

    pair: EngineFleet
    plain: EngineFleet
    models: tuple[Path, Path]
    logs: Path
    loop: asyncio.AbstractEventLoop
    requests: int = 0

    def run(self, work: Coroutine[Any, Any, Any], seconds: float = 2 * STEPS_S) -> Any:
        with self.told():
            return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self.loop).result()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """What fails says how the servers' logs end."""
        try:
            yield
        except BaseException as error:
            tails = [f"{log.name}:\n" + "\n".join(_lines(log)[-25:]) for log in sorted(self.logs.rglob("*.log"))]
            error.add_note("\n\n".join(["The ends of the servers' logs.", *tails]))
            raise

    async def generate(self, fleet: EngineFleet, ids: Sequence[int], sampling: Sampling, name: str = "") -> Generation:
        self.requests += 1
        return await fleet.generate(ids, sampling, name or f"r{self.requests}", f"s{self.requests}")

    async def off(self, ids: Sequence[int], answer: Generation) -> float:
        """Mean distance of an answer's log-probs from the ordinary server's."""
        return distance(answer.logprobs, await self.after(ids, answer))

    async def after(self, ids: Sequence[int], answer: Generation) -> np.ndarray:
        """The ordinary server's log-probs of an answer's tokens."""
        return (await self.plain.score([*ids, *answer.token_ids.tolist()]))[len(ids) :]


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    assert len(found) == len(expected)
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).mean())


def corrupted(ids: Sequence[int]) -> dict[str, list[int]]:
    """Prompts as a wrong KV cache would have them, the last page as it was."""
    kept, others = ids[-PAGE:], prompt(len(ids), 99)
    return {
        "another prompt": [*others[:-PAGE], *kept],
        "each token's neighbour": [ids[-PAGE - 1], *ids[: -PAGE - 1], *kept],
        "one page of another": [*ids[:PAGE], *others[PAGE : 2 * PAGE], *ids[2 * PAGE :]],
    }


def allowed(noise: float) -> float:
    """Twice what an ordinary server itself is off by, and a little for means of few tokens; ``SPARSE_SPREAD`` says what
    errors make."""
    return 2 * noise + 0.01


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Path, Path]]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    made = folder / "0", folder / "1"
    for seed, directory in enumerate(made):
        write_sparse(sparse_config(), directory, seed)
    torch.cuda.empty_cache()
    yield made
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def servers(models, tmp_path_factory):
    if (problem := transfer_problem("mooncake_tcp")) is not None:
        pytest.skip(problem)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    logs = tmp_path_factory.mktemp("servers")
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:.0f} s: {line}", flush=True)

    with ProcessRegistry() as registry, pytest.MonkeyPatch.context() as patch:
        # Prompts below the top k would take FlashAttention-3, which need not be there.
        patch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")
        plain = one_config(prefix_cache=False, max_total_tokens=RUNNING * CONTEXT)
        made = Servers(
            EngineFleet(pair_config(), registry, logs / "pair", say),
            EngineFleet(plain, registry, logs / "plain", say),
            models,
            logs,
            loop,
        )

        async def start() -> None:
            async with asyncio.TaskGroup() as group:
                for fleet in (made.pair, made.plain):
                    group.create_task(fleet.start(models[0]))

        async def stop() -> None:
            await asyncio.gather(made.pair.stop(), made.plain.stop())

        made.run(start(), START_S)
        yield made
        made.run(stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_the_decode_server_alone_runs_hisparse(servers):
    async def able():
        return [(await engine.abilities()).hisparse for engine in (*servers.pair.engines, *servers.plain.engines)]

    assert servers.run(able()) == [False, True, False]


def test_a_pair_with_hisparse_generates_what_an_ordinary_server_does(servers):
    prompts = [prompt(length, seed) for seed, length in enumerate(PROMPTS)]

    async def answers(fleet: EngineFleet) -> list[Generation]:
        return await asyncio.gather(*(servers.generate(fleet, ids, GREEDY) for ids in prompts))

    async def work() -> list[tuple[float, float, float]]:
        apart, one = await answers(servers.pair), await answers(servers.plain)
        found = []
        for ids, answer, other in zip(prompts, apart, one, strict=True):
            assert len(answer.token_ids) == GREEDY.max_new_tokens
            right = await servers.after(ids, answer)
            off, noise = distance(answer.logprobs, right), await servers.off(ids, other)
            wrong = {name: distance(await servers.after(bad, answer), right) for name, bad in corrupted(ids).items()}
            same = int(np.argmin([*(answer.token_ids == other.token_ids), False]))
            controls = ", ".join(f"{name} {gap:.3f}" for name, gap in wrong.items())
            print(
                f"prompt of {len(ids)}: the pair is off by {off:.3f}, one server by {noise:.3f}; {controls}; ", end=""
            )
            print(f"the largest of the pair {np.abs(answer.logprobs - right).max():.3f}, {same} first tokens are equal")
            found.append((off, noise, wrong["another prompt"]))
        return found

    gaps = np.array(servers.run(work()))
    noise = float(gaps[:, 1].mean())
    with servers.told():
        assert (gaps[:, 0] < gaps[:, 2] / 3).all()
        assert float(gaps[:, 0].mean()) < allowed(noise)
        assert allowed(noise) < float(gaps[:, 2].mean()) / 3  # else the above would prove little


def test_requests_that_are_aborted_go_on_from_what_they_had(servers):
    prompts = {name: prompt(length, 7 + length) for name, length in (("a", 2300), ("b", 3100))}

    async def work() -> list[float]:
        tasks = [servers.generate(servers.pair, ids, LONG, name) for name, ids in prompts.items()]
        running = asyncio.gather(*tasks)
        await until_running(servers.pair.engines[1], len(prompts))
        await asyncio.sleep(0.5)
        await servers.pair.abort(list(prompts))
        begun = await running
        gaps = []
        for ids, first in zip(prompts.values(), begun, strict=True):
            assert first.finish_reason is FinishReason.ABORT
            assert 0 < len(first.token_ids) < LONG.max_new_tokens
            longer = [*ids, *first.token_ids.tolist()]
            rest = await servers.generate(servers.pair, longer, GREEDY)
            gaps.append((await servers.off(ids, first), await servers.off(longer, rest)))
            print(f"aborted after {len(first.token_ids)} tokens: off by {gaps[-1]}", flush=True)
        one = await servers.generate(servers.plain, prompts["b"], GREEDY)
        noise = await servers.off(prompts["b"], one)
        another = corrupted(prompts["b"])["another prompt"]
        wrong = distance(await servers.after(another, one), await servers.after(prompts["b"], one))
        print(f"one server is off by {noise:.3f}, wrong KV by {wrong:.3f}", flush=True)
        return [*np.ravel(gaps).tolist(), wrong]

    *gaps, wrong = servers.run(work())
    with servers.told():
        assert max(gaps) < wrong / 3


def test_weights_are_published_to_both_halves_while_they_generate(servers):
    ids = prompt(2700, 21)

    async def work() -> tuple[Generation, Generation, float, float]:
        shapes = directory_shapes(servers.models[1])
        running = asyncio.create_task(servers.generate(servers.pair, ids, LONG, "before"))
        await until_running(servers.pair.engines[1], 1)
        for fleet in (servers.pair, servers.plain):
            async with fleet.publication() as publication:
                done = await publish(publication.engines, DiskTransport(servers.models[1]), 1, shapes)
                publication.holds = 1
            print(f"published in {done.seconds:.1f} s", flush=True)
        before = await running
        longer = [*ids, *before.token_ids.tolist()]
        after = await servers.generate(servers.pair, longer, GREEDY)
        old = await servers.off(ids, before)  # by the new weights
        return before, after, old, await servers.off(longer, after)

    before, after, old, new = servers.run(work())
    print(
        f"by the new weights: {len(before.token_ids)} tokens before are off by {old:.3f}, after by {new:.3f}",
        flush=True,
    )
    with servers.told():
        assert (before.finish_reason, after.finish_reason) == (FinishReason.ABORT, FinishReason.LENGTH)
        assert set(after.weight_versions.tolist()) == {1}
        assert new < old / 3
