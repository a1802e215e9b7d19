"""Where the time of a publication goes: the calls to engine and trainer, and what the loader in the server says."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.weights.publisher import Published
from rollout.engine.opened_memory import Answer

COPIED = "update_weights_from_memory"


@dataclass(frozen=True)
class Span:
    name: str
    begin: float
    end: float


class Watched:
    """Another object, whose coroutines' spans are noted."""

    def __init__(self, inner: Any, spans: list[Span]) -> None:
        self._inner, self._spans = inner, spans

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(value):
            return value

        @functools.wraps(value)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            try:
                return await value(*args, **kwargs)
            finally:
                self._spans.append(Span(name, begin, time.monotonic()))

        return watched


def phases(spans: Sequence[Span], answer: Answer | None, done: Published) -> dict[str, float]:
    """Milliseconds of one publication. ``stage_weights`` comes before the pause; ``load`` is from the first call of the
    load to the last answer, and holds the calls to the trainer and what follows ``to_server``."""
    found: dict[str, float] = {}
    for span in spans:
        found[span.name] = found.get(span.name, 0.0) + (span.end - span.begin) * 1e3
    copied = [span for span in spans if span.name == COPIED]
    if answer is not None and len(copied) == 1:
        found["to_server"] = (answer.began - copied[0].begin) * 1e3
        found |= {f"server_{name}": seconds * 1e3 for name, seconds in answer.seconds.items()}
        found["from_server"] = (copied[0].end - answer.ended) * 1e3
    return found | {"load": done.load_seconds * 1e3, "pause_to_resume": done.seconds * 1e3}
