"""Run one task's server: ``python -m tasks.serve TASK --port N [--host H] [--slots N] [--options JSON]``.

Prints one line when it is ready (``ready URL task=TASK slots=N``) and nothing else; a fault in a task's code is logged
to stderr. SIGTERM and SIGINT cancel all episodes; it then exits with 0 within 2 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence

from tasks.registry import LoadedTask, TaskError, load_task
from tasks.server import EpisodeServer, listening


async def serve(task: LoadedTask, host: str, port: int, slots: int) -> int:
    """Serve until SIGTERM or SIGINT; returns how many plays ignored their cancellation."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = EpisodeServer(task, slots)
    async with listening(server, host, port) as url:
        # What was imported stays to the end: without this the collector walks all of it once more at exit.
        gc.freeze()
        print(f"ready {url} task={task.name} slots={slots}", flush=True)
        await stop.wait()
    if server.running:
        print(f"tasks.serve: {server.running} plays of {task.name} ignored their cancellation", file=sys.stderr)
        # Leaving the loop the ordinary way would wait for them without end.
        os._exit(1)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 stopped by a signal, 1 cannot listen, 2 bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m tasks.serve", description="Serve the episodes of one task.")
    parser.add_argument("task", help="name of a folder under tasks/")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one; the ready line names it")
    parser.add_argument("--slots", type=int, default=256, help="episodes at once")
    parser.add_argument("--options", default="{}", help="the task's options, a JSON object")
    arguments = parser.parse_args(argv)
    if arguments.slots < 1:
        parser.error(f"--slots: {arguments.slots} is less than 1")
    try:
        options = json.loads(arguments.options)
    except json.JSONDecodeError as error:
        parser.error(f"--options: no JSON: {error}")
    if not isinstance(options, dict):
        parser.error("--options: not a JSON object")
    try:
        task = load_task(arguments.task, options)
    except TaskError as error:
        parser.error(str(error))
    try:
        return asyncio.run(serve(task, arguments.host, arguments.port, arguments.slots))
    except OSError as error:
        print(f"tasks.serve: cannot listen on {arguments.host}:{arguments.port}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
