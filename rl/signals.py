"""SIGTERM and Ctrl-C end a run in order."""

from __future__ import annotations

import asyncio
import signal


def cancel_on_signals() -> None:
    """Let SIGTERM and SIGINT cancel the current task, so that everything it started is ended. May be called again,
    where a library has replaced the handlers."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
