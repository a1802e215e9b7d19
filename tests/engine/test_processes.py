"""Cheap children stand for the servers: the operating system does not know the difference."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from rollout import processes
from rollout.processes import ProcessError, ProcessRegistry, free_port, require_free_port

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def python(code):
    return [sys.executable, "-c", textwrap.dedent(code)]


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_all_are_stopped_last_first_also_after_an_exception(tmp_path):
    note = "import signal, sys, time\n"
    note += "def end(*_): print(sys.argv[1], file=open(sys.argv[2], 'a')); sys.exit(0)\n"
    note += "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
    order = tmp_path / "order"
    registry = ProcessRegistry()
    processes = [
        registry.start(name, [sys.executable, "-c", note, name, str(order)], tmp_path / f"{name}.log")
        for name in ("one", "two")
    ]
    for process in processes:
        until(lambda process=process: "ready" in process.log_tail())
    with pytest.raises(RuntimeError, match="mine"), registry:
        raise RuntimeError("mine")
    assert order.read_text().split() == ["two", "one"]
    assert [process.exit_code for process in processes] == [0, 0]
    registry.stop_all()
    assert registry.processes == ()


def test_a_tree_that_ignores_sigterm_is_killed(tmp_path):
    stubborn = python("""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(60)
    """)
    with ProcessRegistry() as registry:
        process = registry.start("stubborn", stubborn, tmp_path / "log", grace_s=0.3)
        until(lambda: process.log_tail().strip())
        child = int(process.log_tail())
        registry.stop(process)
        assert process.exit_code == -signal.SIGKILL
        assert not running(child)


def test_orphans_of_the_session_are_killed_too(tmp_path):
    leaves_one = python("""
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
    """)
    with ProcessRegistry() as registry:
        process = registry.start("leaves one", leaves_one, tmp_path / "log")
        until(lambda: process.exit_code == 0)
        orphan = int(process.log_tail())
        assert running(orphan)
    assert not running(orphan)


def test_death_is_reported_with_name_code_and_log(tmp_path):
    with ProcessRegistry() as registry:
        process = registry.start("teller", python("print('out of luck'); raise SystemExit(7)"), tmp_path / "log")
        until(lambda: process.exit_code is not None)
        with pytest.raises(ProcessError, match=r"(?s)teller .* exit code 7.*out of luck"):
            process.check()
        killed = registry.start("killed", SLEEP, tmp_path / "log2")
        os.kill(killed.pid, signal.SIGKILL)
        until(lambda: killed.exit_code is not None)
        with pytest.raises(ProcessError, match="killed by SIGKILL"):
            killed.check()


def test_a_command_that_does_not_exist(tmp_path):
    with ProcessRegistry() as registry:
        process = registry.start("nobody", ["/no/such/command"], tmp_path / "log")
        until(lambda: process.exit_code is not None)
        with pytest.raises(ProcessError, match=r"(?s)nobody .*exit code 1.*/no/such/command: No such file"):
            process.check()


def test_environment_is_added(tmp_path):
    with ProcessRegistry() as registry:
        code = "import os; print(os.environ['ADDED'], os.environ['PATH'], flush=True)"
        process = registry.start("env", python(code), tmp_path / "log", {"ADDED": "yes"})
        until(lambda: process.exit_code == 0)
        assert process.log_tail().startswith(f"yes {os.environ['PATH']}")


def test_a_child_outlives_the_thread_that_asked_for_it(tmp_path):
    with ProcessRegistry() as registry:
        thread = threading.Thread(target=lambda: registry.start("child", SLEEP, tmp_path / "log"))
        thread.start()
        thread.join()
        time.sleep(0.3)
        assert registry.processes[0].exit_code is None


def test_a_child_dies_with_a_killed_parent(tmp_path):
    driver = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from rollout.processes import ProcessRegistry
        registry = ProcessRegistry()
        code = "print('up', flush=True); import time; time.sleep(60)"
        process = registry.start("child", [sys.executable, "-c", code], Path(sys.argv[1]))
        while "up" not in process.log_tail():
            time.sleep(0.02)
        print(process.pid, flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", driver, str(tmp_path / "log")], stdout=subprocess.PIPE)
    try:
        child = int(parent.stdout.readline())
        assert running(child)
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: not running(child), seconds=2)


def test_a_driver_that_ends_stops_its_children(tmp_path):
    driver = textwrap.dedent("""
        import sys
        from pathlib import Path
        from rollout.processes import ProcessRegistry
        registry = ProcessRegistry()
        print(registry.start("child", [sys.executable, "-c", "import time; time.sleep(60)"], Path(sys.argv[1])).pid)
        raise RuntimeError("without a with block")
    """)
    done = subprocess.run([sys.executable, "-c", driver, str(tmp_path / "log")], capture_output=True, text=True)
    assert "without a with block" in done.stderr
    assert not running(int(done.stdout))


def test_ports():
    port = free_port()
    require_free_port("engine-0", port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ProcessError, match=f"engine-0: port {port} .*taken"):
        require_free_port("engine-0", port)


def test_whatever_keeps_a_child_from_starting_is_told_and_the_next_one_starts(tmp_path):
    with ProcessRegistry() as registry:
        with pytest.raises(ValueError, match="null byte"):
            registry.start("odd", ["a\0b"], tmp_path / "odd.log")
        process = registry.start("next", SLEEP, tmp_path / "next.log")
        assert process.exit_code is None


def test_a_child_that_the_system_does_not_start_is_given_up_and_killed_when_it_comes(tmp_path, monkeypatch):
    come, made = threading.Event(), []

    def slow(*arguments, **settings):
        come.wait(30)
        made.append(real(*arguments, **settings))
        return made[-1]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", slow)
    monkeypatch.setattr(processes, "SPAWN_S", 0.1)
    with ProcessRegistry() as registry:
        with pytest.raises(ProcessError, match=r"slow could not be started: .* within 0\.1 s"):
            registry.start("slow", SLEEP, tmp_path / "slow.log")
        assert registry.processes == ()
        come.set()
        until(lambda: made and made[0].poll() is not None)
