"""A server, and a trainer's weights that are published to it."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.publish.local import LocalSender
from benchmarks.publish.models import Size, Weights, turn
from benchmarks.publish.watch import Span, Watched, phases
from rl.weights.ipc import IpcTransport, Openings
from rl.weights.publisher import Published, publish
from rl.weights.target import WeightTarget
from rl.weights.transports import Transport
from rollout.engine.opened_memory import Answer
from rollout.engine.protocol import Sampling
from rollout.engine.sglang import SGLangEngine
from rollout.processes import ProcessRegistry

Make = Callable[[], Awaitable[Transport]]
ATTEMPTS = 2
"""An engine may have been spoken to otherwise meanwhile; it is then told anew what it forgot."""
PROMPT = list(range(10, 74))
NEW_TOKENS = 2000
ADMISSION_S = 15.0
"""For the requests to be running; how many were is part of the row."""
HTTP_BUCKET_BYTES = 256 << 20
ONE_BUCKET_BYTES = 64 << 30


class OfHandles(IpcTransport):
    """As to a server that was not started with our loader: a handle a bucket, and SGLang's loader for the tensors."""

    async def _all_open(self, engines: Sequence[WeightTarget]) -> bool:
        return False


@dataclass
class Bench:
    engine: SGLangEngine
    size: Size
    device: str
    weights: Weights
    """The trainer's, which stay where they are. Even versions have these, odd ones the same turned round."""
    memory: list[Path]
    """Both as HF directories in shared memory; empty where the model is too large for that."""
    disk: list[Path]
    folder: Path
    registry: ProcessRegistry
    requests: int
    version: int = 0
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Kept, as a trainer keeps its own: an engine then finds the same memory each time.
        self.sender = Watched(LocalSender(list(self.weights.items()), self.device), self.spans)
        self.target = Watched(self.engine, self.spans)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    async def publish(self, make: Make, same: bool = False) -> Published:
        """The next version, or, if ``same``, the current weights under the next number."""
        self.version += 1 + same
        if not same:
            turn(self.weights)
        transport = await make()
        self.spans.clear()
        return await publish([self.target], transport, self.version, self.size.shapes, attempts=ATTEMPTS)

    async def speed(self, make: Make, repeats: int, openings: Openings | None = None) -> dict[str, Any]:
        """Medians. The first publication warms up and is reported apart, where there are more."""
        done, steps, answer = [], [], None
        for _ in range(repeats + 1):
            done.append(await self.publish(make))
            answer = self._answer(openings)
            steps.append(phases(self.spans, answer, done[-1]))
        later = done[1:] or done
        seconds = statistics.median(each.load_seconds for each in later)
        row = {
            "seconds": round(seconds, 5),
            "gb_per_s": round(self.nbytes / seconds / 1e9, 3),
            "first_seconds": round(done[0].load_seconds, 4),
            "pause_seconds": round(statistics.median(each.seconds for each in later), 4),
            "attempts": max(each.attempts for each in later),
            "milliseconds": _medians(steps[1:] or steps),
        }
        if answer is not None:
            row |= {"how": answer.how, "why": answer.why, "copies": answer.copies}
        return row

    def _answer(self, openings: Openings | None) -> Answer | None:
        answers = openings.last.get(self.engine.url, []) if openings is not None else []
        return answers[0] if answers else None

    async def ipc(self, openings: Openings, bucket_bytes: int = ONE_BUCKET_BYTES) -> Transport:
        plan = self.sender.plan(bucket_bytes)
        return IpcTransport(self.sender, plan, {}, openings)  # type: ignore[arg-type]

    async def handles(self) -> Transport:
        return OfHandles(self.sender, self.sender.plan(ONE_BUCKET_BYTES), {}, Openings(0))  # type: ignore[arg-type]

    async def while_running(self, make: Make) -> dict[str, Any]:
        """The pause, with requests in flight, after a publication without."""
        await self.publish(make)
        name = f"run-{self.version}"
        sampling = Sampling(1.0, NEW_TOKENS)
        tasks = [
            asyncio.create_task(self.engine.generate([*PROMPT, 100 + i], sampling, f"{name}-{i}"))
            for i in range(self.requests)
        ]
        try:
            running, over, begin = 0, 0, time.monotonic()
            while running + over < self.requests * 0.9 and time.monotonic() < begin + ADMISSION_S:
                running = (await self.engine.metrics()).running
                over = sum(task.done() for task in tasks)
                await asyncio.sleep(0.05)
            done = await self.publish(make)
            steps = phases(self.spans, None, done)
            mode = "retract" if (await self.engine.abilities()).sessions else "abort"
            await self.engine.abort([f"{name}-{i}" for i in range(self.requests)])
            ended, _ = await asyncio.wait(tasks, timeout=ADMISSION_S)
        finally:
            for task in tasks:
                task.cancel()
        failures = [str(task.exception()) for task in ended if task.exception() is not None]
        return {
            "running": running,
            "over_before": over,
            "mode": mode,
            "pause_seconds": round(done.seconds, 4),
            "load_seconds": round(done.load_seconds, 4),
            "milliseconds": _medians([steps]),
            "failures": failures[:2],
        }

    async def logprob_gap(self) -> dict[str, float]:
        """Largest difference of the server's log-probs from HF's with the weights that it was sent, and the others."""
        from transformers import AutoModelForCausalLM

        found = torch.from_numpy(await self.engine.score(PROMPT))[1:]
        row = {}
        for name, index in (("of_its_weights", self.version % 2), ("of_the_others", (self.version + 1) % 2)):
            dtype = self.weights["model.norm.weight"].dtype
            model = AutoModelForCausalLM.from_pretrained(self.memory[index], dtype=dtype).to(self.device).eval()
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT], device=self.device)).logits[0, :-1].float().log_softmax(-1).cpu()
            expected = logits.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
            row[name] = round(float((expected - found).abs().max()), 6)
        return row


def _medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(step.get(name, 0.0) for step in steps), 3) for name in steps[-1]}


def checking(transport: Transport) -> Transport:
    """The same, and the engine says the checksums of what it then holds."""
    assert isinstance(transport, IpcTransport)
    return dataclasses.replace(transport, checksums=True)
