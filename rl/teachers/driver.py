"""The teachers as a run's loop sees them: whose prompts a batch has, what servers elsewhere say, what comes next."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from rl.config import ConfigError
from rl.preflight import Plan
from rl.teachers.routing import Routing, Shares
from rl.teachers.servers import check_server_tokenizer
from rl.teachers.sources import TeacherSourceError
from rl.teachers.teaching import TeacherSetup, Teaching
from rl.trainer.group import TrainerGroup
from rollout.engine.protocol import Engine
from rollout.engine.sglang import SGLangEngine, Timeouts
from rollout.prompts import PromptRef
from rollout.trajectory import Trajectory
from tasks.protocol import Prompt

SAY_EVERY_S = 15.0
CONCURRENT_SCORES = 64
"""Requests in flight at one server."""


async def start_teachers(
    plan: Plan, trainer: TrainerGroup, stack: AsyncExitStack, say: Callable[[str], None]
) -> Teachers | None:
    """Give the trainer the teachers' weights, and connect to those that run elsewhere; ``stack`` closes it.

    Raises:
        ConfigError: a server elsewhere does not answer, or has another tokenizer.
        TeacherError: an import failed, or a teacher does not fit its tier.
    """
    teaching, config = plan.teaching, plan.config
    if teaching is None:
        return None
    store = config.distillation.store or plan.folder.path / "teachers"
    setup = TeacherSetup(
        teaching.sources, str(store.resolve()), config.distillation.hbm_bytes, config.distillation.pinned_bytes
    )
    if teaching.sources:
        say(f"teachers: {len(teaching.sources)} in {store}; what it lacks of them is imported first")
    if line := await load_teachers(trainer, setup, say):
        say(line)
    timeouts = Timeouts(config.engine.request_timeout_s, config.engine.control_timeout_s)
    engines = {}
    for name, url in teaching.urls.items():
        engines[name] = await stack.enter_async_context(SGLangEngine(url, timeouts))
        if not await engines[name].health():
            raise ConfigError(f"teachers.{name}.url: {url} does not answer as an SGLang server does; start it first")
        tokenizer = config.teachers[name].tokenizer
        assert tokenizer is not None  # it goes with url
        try:
            await check_server_tokenizer(name, url, tokenizer, config.engine.request_timeout_s)
        except TeacherSourceError as error:
            raise ConfigError(str(error)) from error
    prompts = {name: task.prompts("train") for name, task in plan.tasks.items()}
    return Teachers(teaching.routing, prompts, engines)


async def load_teachers(
    trainer: TrainerGroup, setup: TeacherSetup, say: Callable[[str], None], every_s: float = SAY_EVERY_S
) -> str:
    """``TrainerGroup.load_teachers``, and meanwhile what this machine has written of an import that takes its time."""
    packs = Path(setup.store) / "packs"
    before, started = _bytes_in(packs), time.monotonic()
    loading = asyncio.ensure_future(trainer.load_teachers(setup))
    try:
        while not (await asyncio.wait([loading], timeout=every_s))[0]:
            written = (_bytes_in(packs) - before) / 1e9
            say(f"teachers: imported for {time.monotonic() - started:.0f} s, {written:.2f} GB written on this machine")
        return loading.result()
    finally:
        loading.cancel()


def _bytes_in(packs: Path) -> int:
    total = 0
    for path in packs.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed since it was listed
            total += path.stat().st_size
    return total


class Teachers:
    """Of one run.

    Args:
        prompts: by task; those that the run trains on.
        engines: teachers that are servers elsewhere.
    """

    def __init__(
        self, routing: Routing, prompts: Mapping[str, Iterable[Prompt]], engines: Mapping[str, Engine]
    ) -> None:
        self.routing = routing
        self.engines = dict(engines)
        self._data: dict[str, dict[str, Mapping[str, Any]]] = {
            task: {prompt.prompt_id: prompt.data for prompt in of_task} for task, of_task in prompts.items()
        }

    def shares(self, task: str, prompt_id: str) -> Shares:
        return self.routing.shares(self.routing.value(task, self._data[task][prompt_id]))

    def counts(self, prompts: Iterable[PromptRef]) -> Counter[str]:
        """Prompts by teacher."""
        return Counter(teacher for ref in prompts for teacher in self.shares(ref.task, ref.prompt_id))

    async def teaching(self, trajectories: Sequence[Trajectory], ahead: Iterable[PromptRef] = ()) -> Teaching:
        """
        Raises:
            EngineError: a server elsewhere did not score; the message names its URL.
        """
        shares = [self.shares(t.task, t.prompt_id) for t in trajectories]
        names = sorted(self.engines)
        scored = await asyncio.gather(*(self._scored(name, trajectories, shares) for name in names))
        return Teaching(shares, dict(zip(names, scored, strict=True)), dict(self.counts(ahead)))

    async def _scored(
        self, teacher: str, trajectories: Sequence[Trajectory], shares: Sequence[Shares]
    ) -> list[np.ndarray | None]:
        room, engine = asyncio.Semaphore(CONCURRENT_SCORES), self.engines[teacher]

        async def one(trajectory: Trajectory, share: Shares) -> np.ndarray | None:
            if teacher not in share:
                return None
            async with room:
                return await engine.score(trajectory.token_ids.tolist())

        return list(await asyncio.gather(*(one(t, s) for t, s in zip(trajectories, shares, strict=True))))
