"""On a GPU: weights through CUDA IPC, and the engine's memory given away and taken back, with random Llamas."""

import asyncio
import gc

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.publish.models import SIZES, random_weights, write
from rl.weights.colocation import Colocation
from rl.weights.ipc import IpcTransport
from rl.weights.local import LocalSender
from rl.weights.publisher import publish
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.processes import ProcessRegistry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZE = SIZES["135m"]
CONTEXT = 2048
IDS = list(range(10, 74))
NOISE = 0.15
"""Largest |Δ log-prob| of one model on two kernels in bfloat16; other weights differ by whole units."""
START_S = 280.0
"""The first start compiles kernels."""


class Model:
    """A version: its weights on the device, its directory, and HF's log-probs of it."""

    def __init__(self, directory, seed):
        self.weights = random_weights(SIZE, seed, "cuda", torch.bfloat16)
        for name, tensor in self.weights.items():
            if "norm" not in name:
                tensor.mul_(3)  # so that two versions disagree clearly
        self.directory = write(directory, SIZE, self.weights, CONTEXT)
        hf = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.bfloat16).cuda().eval()
        with torch.no_grad():
            scores = hf(torch.tensor([IDS], device="cuda")).logits[0, :-1].float().log_softmax(-1).cpu()
        self.logprobs = scores.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


class Trainer:
    """What a trainer does to the device: it holds memory, or does not."""

    def __init__(self):
        self.memory = None

    async def onload(self):
        self.memory = torch.empty(free_bytes() // 2, dtype=torch.uint8, device="cuda")

    async def offload(self):
        gained, self.memory = self.memory.nbytes, None
        gc.collect()
        torch.cuda.empty_cache()
        return gained

    async def release_bucket(self):
        """The test's sender keeps its buffer."""


def free_bytes():
    return torch.cuda.mem_get_info()[0]


async def gap(engine, model):
    found = torch.from_numpy(await engine.score(IDS))[1:]
    return float((found - model.logprobs).abs().max())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [Model(tmp_path_factory.mktemp("models") / str(seed), seed) for seed in (0, 1)]


def with_engine(models, tmp_path, test, **settings):
    """Run ``test(engine)`` with a server of ``models[0]``."""

    async def run():
        extra = {"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none"}
        config = EngineConfig(
            device="cuda",
            dtype="bfloat16",
            context_length=CONTEXT,
            max_running_requests=16,
            memory_fraction=0.3,
            start_timeout_s=START_S,
            extra_args=extra | {"disable-prefill-cuda-graph": True, "cuda-graph-max-bs-decode": 16},
            **settings,
        )
        with ProcessRegistry() as registry:
            fleet = EngineFleet(config, registry, tmp_path, print)
            await fleet.start(models[0].directory)
            try:
                await test(fleet.engines[0])
            finally:
                await fleet.stop()

    asyncio.run(run())


async def publish_by_ipc(engine, sender, model, version, **kwargs):
    sender.named = list(model.weights.items())
    transport = IpcTransport(sender, sender.plan(64 << 20), {})
    return await publish([engine], transport, version, SIZE.shapes, **kwargs)


@pytest.mark.timeout(400)
def test_ipc_is_exact(models, tmp_path):
    async def test(engine):
        sender = LocalSender([], "cuda")
        assert await gap(engine, models[0]) < NOISE < 1 < await gap(engine, models[1])
        for version in (1, 2, 3):
            done = await publish_by_ipc(engine, sender, models[version % 2], version)
            assert done.attempts == 1
            assert await gap(engine, models[version % 2]) < NOISE
            assert await gap(engine, models[(version + 1) % 2]) > 1

    with_engine(models, tmp_path, test)


@pytest.mark.timeout(400)
def test_memory_is_given_away_and_taken_back(models, tmp_path):
    async def test(engine):
        trainer, sender = Trainer(), LocalSender([], "cuda")
        colocation = Colocation(lambda: [engine], trainer)
        awake = free_bytes()
        for version in (1, 2):
            await colocation.to_trainer()
            trainer_holds = trainer.memory.nbytes
            assert trainer_holds + free_bytes() > awake + (10 << 30)  # 30 % of an 80 GB device are 24 GB
            await colocation.wake_weights()
            model = models[version % 2]
            await publish_by_ipc(engine, sender, model, version, before_resume=colocation.to_engines)
            assert trainer.memory is None
            assert await gap(engine, model) < NOISE
            assert await gap(engine, models[(version + 1) % 2]) > 1

    with_engine(models, tmp_path, test, memory_saver=True)
