"""What an engine holds, by checksum: to compare ways of publishing bit by bit."""

from __future__ import annotations

import torch

from rl.weights.flat import memory_handle
from rl.weights.ipc import Openings, checked_answers
from rl.weights.target import WeightTarget, in_session
from rollout.engine.opened_memory import Layout, Request
from rollout.engine.protocol import EngineError

NOTHING = Layout(rounds=())


async def engine_checksums(engine: WeightTarget) -> list[dict[str, str]]:
    """Checksum of every parameter as SGLang lays it out, for each tensor-parallel rank: a request to copy nothing. The
    engine must be idle or paused; it closes what it had open.

    Raises:
        EngineError: it was not started with our loader, or failed.
    """
    able = await engine.abilities()
    if not able.opens_memory:
        raise EngineError(f"{engine.url} was not started with our loader, which makes the checksums")
    openings = Openings(0)
    memory = torch.zeros(8, dtype=torch.uint8)  # kept: the first rank to close it would take it from the next
    try:
        file = openings.answer_file()
        request = Request(
            layout_id=NOTHING.checksum,
            memory_id="nothing",
            rounds=(),
            answers=file,
            layout=NOTHING,
            handle=memory_handle(memory),
            keep=False,
            checksums=True,
        )
        requests = [request] * able.tensor_parallel
        await in_session([engine], lambda: engine.update_weights_from_memory(requests, None, flush=False))
        return [answer.checksums for answer in checked_answers(engine.url, file, able.tensor_parallel)]
    finally:
        openings.close()
