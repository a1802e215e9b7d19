"""Work that goes on while servers start: one of them that does not start ends it, rather than be told after it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def ended(starting: asyncio.Task[Any]) -> None:
    """Nothing of it goes on, whatever became of it: that was for whoever waited for it."""
    starting.cancel()
    await asyncio.wait((starting,))
    if not starting.cancelled():
        starting.exception()


async def while_starting(starting: asyncio.Task[Any] | None, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result.

    Raises:
        Exception: what kept a server from starting, as soon as that is known; the work is cancelled, and has ended.
    """
    task = asyncio.ensure_future(work)
    try:
        if starting is not None:
            await asyncio.wait((task, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not task.done():
                starting.result()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
