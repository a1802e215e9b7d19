"""Whatever ends the driver, its descendants end with it, those of its children's making too."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

DRIVER = """
import subprocess, sys
from rollout.orphans import OrphanWatch
with OrphanWatch():
    # A child that starts a grandchild in a session of its own, as daemons do.
    subprocess.Popen([sys.executable, "-c", '''
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
'''])
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, None])
def test_no_descendant_survives(kill):
    driver = psutil.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    driver.stdout.readline()
    deadline = time.monotonic() + 60
    while len(descendants := driver.children(recursive=True)) < 3:  # child, grandchild, watch
        assert time.monotonic() < deadline, descendants
        time.sleep(0.1)
    time.sleep(4)  # the watch looks once a second, once it has started
    if kill is not None:
        driver.send_signal(kill)
    driver.stdin.close()
    driver.wait(60)
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert alive == []
