"""On a GPU: weights through CUDA IPC and as patches, the engine's memory given away and taken back, a server that was
killed, with random Llamas. The server's log is below pytest's ``--basetemp``."""

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from benchmarks.publish.bits import engine_checksums
from benchmarks.publish.local import LocalSender
from rl.weights.collective import Broadcasts, CollectiveTransport
from rl.weights.colocation import Colocation
from rl.weights.delta import MODEL
from rl.weights.delta_transport import DeltaTransport, Held
from rl.weights.ipc import IpcTransport, Openings
from rl.weights.publisher import publish
from rl.weights.transports import DiskTransport
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.sglang import SGLangEngine, Timeouts
from rollout.processes import ProcessRegistry, free_port
from tests.engine.gpu_models import CONTEXT, NOISE, SETTINGS, SIZE, START_S, Model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(400),
]

IDS = list(range(10, 74))
BUCKET_BYTES = 64 << 20


class Trainer:
    """Its weights take the values of one version after another, and what it gives away of the device comes back."""

    def __init__(self, models, resident_bytes=10**10, keep=True):
        self.models = models
        self.weights = {name: tensor.clone() for name, tensor in models[0].weights.items()}
        self.sender = LocalSender(list(self.weights.items()), "cuda")
        self.openings = Openings(resident_bytes, keep)
        self.memory = None

    async def publish(self, engine, version, **settings):
        """Returns the publication, and how the engine loaded."""
        for name, tensor in self.weights.items():
            tensor.copy_(self.models[version % 2].weights[name])
        plan = self.sender.plan(BUCKET_BYTES)
        transport = IpcTransport(self.sender, plan, {}, self.openings, checksums=True)
        done = await publish([engine], transport, version, SIZE.shapes, **settings)
        return done, self.openings.last[engine.url][0]

    async def onload(self):
        self.memory = torch.empty(free_bytes() // 2, dtype=torch.uint8, device="cuda")

    async def offload(self):
        gained, self.memory = self.memory.nbytes, None
        gc.collect()
        torch.cuda.empty_cache()
        return gained

    async def release_bucket(self):
        await self.sender.release()
        torch.cuda.empty_cache()


def free_bytes():
    return torch.cuda.mem_get_info()[0]


async def gap(engine, model):
    found = torch.from_numpy(await engine.score(IDS))[1:]
    return float((found - model.logprobs(IDS)).abs().max())


async def assert_holds(engine, models, version):
    assert await gap(engine, models[version % 2]) < NOISE
    assert await gap(engine, models[(version + 1) % 2]) > 1


async def publish_by_disk(engine, models, version):
    await publish([engine], DiskTransport(models[version % 2].directory), version, SIZE.shapes)


@pytest.fixture(scope="module")
def models():
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield [Model(folder / str(seed), seed) for seed in (0, 1)]
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def fleet(models, tmp_path_factory):
    """One server of ``models[0]``, watched in a thread, and started again when it dies."""
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        context_length=CONTEXT,
        max_running_requests=16,
        memory_fraction=0.3,
        memory_saver=True,
        start_timeout_s=START_S,
        extra_args=SETTINGS,
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=START_S)

    with ProcessRegistry() as registry:
        fleet = EngineFleet(config, registry, tmp_path_factory.mktemp("logs"), print)
        run(fleet.start(models[0].directory))
        yield fleet
        run(fleet.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def with_engine(fleet, test):
    async def run():
        async with SGLangEngine(fleet.engines[0].url, Timeouts()) as engine:
            await test(engine, await engine.weight_version())

    asyncio.run(run())


@pytest.mark.parametrize("settings", [{}, {"resident_bytes": 0}, {"keep": False}], ids=["whole", "rounds", "closed"])
def test_ipc_leaves_the_bits_of_the_ordinary_way(fleet, models, settings):
    async def test(engine, version):
        expected = []
        for step in (1, 2):
            await publish_by_disk(engine, models, version + step)
            expected.append((await engine_checksums(engine))[0])
        trainer, answers = Trainer(models, **settings), []
        for step in (3, 4, 5, 6):
            done, answer = await trainer.publish(engine, version + step)
            answers.append(answer)
            assert done.attempts == 1
            await assert_holds(engine, models, version + step)
        assert [answer.checksums for answer in answers] == expected * 2
        assert expected[0] != expected[1]
        assert answers[0].why == ""
        assert all("plan" in answer.how for answer in answers[1:])

    with_engine(fleet, test)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_a_broadcast_from_another_gpu_leaves_the_bits_of_the_ordinary_way(fleet, models):
    async def test(engine, version):
        expected = []
        for step in (1, 2):
            await publish_by_disk(engine, models, version + step)
            expected += await engine_checksums(engine)
        sender = LocalSender([], "cuda:1")
        broadcasts, found = Broadcasts(sender, "nccl", timeout_s=60), []
        for step in (3, 4):
            sender.named = [
                (name, tensor.to("cuda:1")) for name, tensor in models[(version + step) % 2].weights.items()
            ]
            transport = CollectiveTransport(broadcasts, sender.plan(BUCKET_BYTES))
            done = await publish([engine], transport, version + step, SIZE.shapes)
            assert done.attempts == 1
            await assert_holds(engine, models, version + step)
            found += await engine_checksums(engine)
        await broadcasts.leave([engine])
        assert found == expected
        assert expected[0] != expected[1]

    with_engine(fleet, test)


def test_memory_is_given_away_and_taken_back(fleet, models):
    async def test(engine, version):
        trainer = Trainer(models, keep=False)
        colocation = Colocation(lambda: [engine], trainer)
        awake = free_bytes()
        for step in (1, 2):
            await colocation.to_trainer()
            trainer_holds = trainer.memory.nbytes
            assert trainer_holds + free_bytes() > awake + (10 << 30)  # 30 % of an 80 GB device are 24 GB
            await colocation.wake_weights()
            await trainer.publish(engine, version + step, before_resume=colocation.to_engines)
            assert trainer.memory is None
            await assert_holds(engine, models, version + step)

    with_engine(fleet, test)


def test_patches_reach_the_engine(fleet, models, tmp_path):
    port, work = free_port(), tempfile.TemporaryDirectory(dir="/dev/shm")
    command = [sys.executable, "-m", "rl.weights.receiver", "--model", str(models[0].directory)]
    command += ["--version", "1000", "--copies", f"/dev/shm/copies-{port}", "--port", str(port)]
    receiver = subprocess.Popen(command, stdout=(tmp_path / "receiver.log").open("w"), stderr=subprocess.STDOUT)

    async def test(engine, version):
        for base, new in ((1000, 1001), (1001, 1002)):
            transport = DeltaTransport(
                Held(new, models[new % 2].directory),
                Held(base, models[base % 2].directory),
                {engine.url: f"http://127.0.0.1:{port}"},
                Path(work.name),
                timeout_s=120,
                sender=MODEL,
            )
            await publish([engine], transport, new, SIZE.shapes)
            assert transport.sent[engine.url].how == "patch"
            await assert_holds(engine, models, new)

    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/versions", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the receiver does not answer"
                time.sleep(0.1)
        with_engine(fleet, test)
    finally:
        receiver.terminate()
        receiver.wait(30)
        work.cleanup()


def test_a_server_that_was_started_anew_opens_the_memory_again(fleet, models):
    """The trainer speaks to it through the same object, so that it thinks that the server has the memory open."""

    async def test(engine, version):
        trainer = Trainer(models)
        done, _ = await trainer.publish(engine, version + 1)
        killed = fleet.engines[0]
        os.kill(fleet.processes["engine-0"].pid, signal.SIGKILL)
        deadline = time.monotonic() + START_S
        while not fleet.engines or fleet.engines[0] is killed:
            assert time.monotonic() < deadline, "the server was not started again"
            await asyncio.sleep(0.5)
        again, answer = await trainer.publish(engine, version + 2)
        assert (done.attempts, again.attempts) == (1, 2)
        assert answer.how == "loader, recorded"
        await assert_holds(engine, models, version + 2)

    with_engine(fleet, test)
