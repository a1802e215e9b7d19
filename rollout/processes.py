"""Child processes that never outlive us: one registry starts them and stops them in reverse order.

Three things end a child. ``ProcessRegistry.stop`` (also at the end of its ``with`` block and at interpreter exit)
stops it and everything it started. When this process dies without running any of that, the kernel kills the child
(``rollout.die_with_parent``). A child's own children must then follow it by themselves, as SGLang's do.
"""

from __future__ import annotations

import atexit
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

WRAPPER = Path(__file__).with_name("die_with_parent.py")
KILL_WAIT_S = 5.0
"""How long SIGKILL may take to show; a process in an uninterruptible read can exceed it."""
SPAWN_S = 60.0
"""For the system to start a child, which takes milliseconds; more on a disk that hangs."""
PORTS = range(20_000, 32_000)
"""Below the ports that the kernel gives to outgoing connections, one of which could take ours before it is bound."""
TAIL_LINES = 20
TAIL_BYTES = 16_384


class ProcessError(RuntimeError):
    """A child process could not be started, or died; the message names it and shows the end of its log."""


@dataclass(frozen=True)
class ManagedProcess:
    """A running child, in a session and process group of its own."""

    name: str
    log_path: Path
    """Where its stdout and stderr go; appended to."""
    grace_s: float
    """Seconds between SIGTERM and SIGKILL when it is stopped; with 0 it is killed at once."""
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number where a signal ended it."""
        return self.popen.poll()

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def check(self) -> None:
        """Raises:
        ProcessError: where it has ended, with its name, exit code and last log lines."""
        code = self.exit_code
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ProcessError(f"{self.name} (pid {self.pid}) {how}; the end of {self.log_path}:\n{self.log_tail()}")

    def tree(self) -> list[psutil.Process]:
        """It and all that it started and that still runs: its descendants, and the orphans of its session."""
        if self.exit_code is not None and psutil.pid_exists(self.pid):
            return []  # the number is another's now, which it cannot be while a process of the session is left
        found = {process.pid: process for process in _descendants(self.pid)}
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid:
                    found[process.pid] = process
            except (ProcessLookupError, PermissionError):
                continue
        return list(found.values())


class ProcessRegistry:
    """Starts child processes and stops every one of them, the last started first.

    Use it as a context manager. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[ManagedProcess] = []
        self._spawner = _Spawner()
        atexit.register(self.stop_all)

    def __enter__(self) -> ProcessRegistry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()
        atexit.unregister(self.stop_all)

    def start(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        grace_s: float = 10.0,
    ) -> ManagedProcess:
        """Start a command; returns at once.

        Args:
            name: what errors call it.
            env: added to this process's environment.
            log_path: file for its output; its directory is made.
            grace_s: seconds from SIGTERM to SIGKILL when it is stopped.

        Raises:
            ProcessError: where it cannot be started.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        wrapped = [sys.executable, "-I", "-S", str(WRAPPER), str(os.getpid()), *command]
        with log_path.open("ab") as log:
            try:
                popen = self._spawner.popen(wrapped, log.fileno(), {**os.environ, **(env or {})})
            except OSError as error:
                raise ProcessError(f"{name} could not be started: {error}") from error
        process = ManagedProcess(name, log_path, grace_s, popen)
        with self._lock:
            self._processes.append(process)
        return process

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """Those started and not stopped, in the order of their start; some may have died."""
        with self._lock:
            return tuple(self._processes)

    def stop(self, process: ManagedProcess) -> None:
        """Stop one process and its tree; nothing happens where it was stopped before.

        Raises:
            ProcessError: where something of it outlives SIGKILL.
        """
        with self._lock:
            if process not in self._processes:
                return
            self._processes.remove(process)
        _stop_tree(process)

    def stop_all(self) -> None:
        """Stop everything in reverse order of its start; may be called again.

        Raises:
            ProcessError: after all were tried, where something outlives SIGKILL.
        """
        survivors: list[ProcessError] = []
        for process in reversed(self.processes):
            try:
                self.stop(process)
            except ProcessError as error:
                survivors.append(error)
        if survivors:
            raise ProcessError("; ".join(map(str, survivors)))


class _Spawner:
    """One thread that starts all children and lives as long as this process.

    The kernel sends the parent-death signal when the *thread* that forked ends, so a child started from a pool's
    worker thread would be killed with that thread.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Future[subprocess.Popen[bytes]], list[str], int, dict[str, str]]]
        self._requests = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def popen(self, command: list[str], output: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="process-spawner", daemon=True)
                self._thread.start()
        answer: Future[subprocess.Popen[bytes]] = Future()
        self._requests.put((answer, command, os.dup(output), env))  # theirs may be closed when it comes late
        try:
            return answer.result(SPAWN_S)
        except TimeoutError as error:
            answer.add_done_callback(_kill_late)
            raise OSError(f"the system did not start it within {SPAWN_S:g} s") from error

    def _run(self) -> None:
        while True:
            answer, command, output, env = self._requests.get()
            try:
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
            except BaseException as error:  # noqa: BLE001  (told to who waits; the next needs this thread)
                answer.set_exception(error)
            else:
                answer.set_result(popen)
            finally:
                os.close(output)


def _kill_late(answer: Future[subprocess.Popen[bytes]]) -> None:
    """Of a process that nobody waits for any more."""
    if answer.exception() is None:
        answer.result().kill()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _stop_tree(process: ManagedProcess) -> None:
    tree = process.tree()  # before any signal: a child whose parent has died can no longer be found from it
    if process.exit_code is None and process.grace_s > 0:
        process.popen.terminate()
        _ended(process, process.grace_s)
    known = {member.pid for member in tree}
    tree += [member for member in process.tree() if member.pid not in known]
    for member in tree:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + KILL_WAIT_S
    _ended(process, KILL_WAIT_S)
    while alive := [member.pid for member in tree if _runs(member)]:
        if time.monotonic() > deadline:
            raise ProcessError(f"{process.name}: processes {alive} outlive SIGKILL")
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    """False also for a zombie: an orphan stays one where process 1 does not reap."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _ended(process: ManagedProcess, timeout_s: float) -> bool:
    try:
        process.popen.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different TCP ports that were free a moment ago.

    Raises:
        ProcessError: where too few are.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with socket.socket() as listener:
            try:
                listener.bind((host, port))
            except OSError:
                continue
        found.append(port)
    if len(found) < count:
        raise ProcessError(f"only {len(found)} of {count} ports of {PORTS} are free on {host}")
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    return free_ports(1, host)[0]


def require_free_port(name: str, port: int, host: str = "127.0.0.1") -> None:
    """Raises:
    ProcessError: where somebody listens on the port already; ``name`` says whose port it was to be."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, so TIME_WAIT does not count
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ProcessError(f"{name}: port {port} of {host} is taken ({error.strerror})") from error
