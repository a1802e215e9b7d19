"""The last resort against orphans: a small process that outlives ours by seconds and kills what we left behind.

The processes that we start die with us (``rollout.die_with_parent``), but libraries start their own, such as Ray its
agents, and a driver that gets SIGKILL can't end them. The watch remembers every descendant that it sees while the
driver lives. It learns of the driver's end by the end of its standard input, whatever the driver died of.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from types import TracebackType

import psutil

LOOK_S = 1.0
"""Between two looks at the driver's descendants."""
GRACE_S = 5.0
"""After an orderly end, for what was told to end."""
GOODBYE = b"done"


class OrphanWatch:
    """While this context is open, a watch runs beside this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OrphanWatch:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollout.orphans", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say that the end is an orderly one. The pipe stays open: what libraries end at exit is theirs until then."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(GOODBYE)
            self._process.stdin.flush()


def watch(driver: int) -> None:
    """Look at the driver's descendants until it ends, then end those that are left."""
    seen: set[psutil.Process] = set()
    me = psutil.Process()
    said = b""
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], LOOK_S)
        if ready:
            data = os.read(sys.stdin.fileno(), 64)
            if not data:
                break
            said += data
        try:
            seen |= set(psutil.Process(driver).children(recursive=True)) - {me}
        except psutil.NoSuchProcess:
            break
    alive = [process for process in seen if process.is_running()]
    if said == GOODBYE:
        _, alive = psutil.wait_procs(alive, timeout=GRACE_S)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    watch(int(sys.argv[1]))
