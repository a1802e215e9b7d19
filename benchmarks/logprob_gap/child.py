"""A process of its own for work that may hang, fail or leave memory behind: it calls functions, one after the other."""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

GRACE_S = 5.0
"""For an idle process, which ends when its pipe is closed."""


class ChildError(RuntimeError):
    """What went wrong in the child, with its traceback, or that it took too long and was killed."""


class Child:
    """Starts at its first call, and again after it died or was killed. Functions and arguments are pickled."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def call(self, timeout_s: float, function: Callable[..., Any], *arguments: object) -> Any:
        """The function's result. Calls of several threads take turns, and their time begins with theirs.

        Raises:
            ChildError: the function failed, the process died, or the time was over.
        """
        with self._lock:
            return self._call(timeout_s, function, arguments)

    def _call(self, timeout_s: float, function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
        connection = self._connection or self._start()
        try:
            connection.send((function, arguments))
            if not connection.poll(max(0.0, timeout_s)):
                self.close()
                raise ChildError(f"{self.name}: killed after {timeout_s:.0f} s")
            failed, result = connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise ChildError(f"{self.name}: the process died") from error
        if failed:
            raise ChildError(f"{self.name}: {result}")
        return result

    def close(self) -> None:
        """End it, and kill it where it does not end; nothing happens where it does not run."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.join(GRACE_S)
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=self.name)
        self._process.start()
        theirs.close()
        return self._connection


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (False, function(*arguments))
        except Exception:  # noqa: BLE001  (the caller is told)
            answer = (True, traceback.format_exc()[-3000:])
        connection.send(answer)
