"""Whatever ends the driver, its descendants end with it, those of its children's making too."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

DRIVER = """
import subprocess, sys, time
from rollout.orphans import OrphanWatch
with OrphanWatch():
    # A child that starts a grandchild in a session of its own, as daemons do.
    subprocess.Popen([sys.executable, "-c", '''
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
'''])
    print("up", flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("sleep_s", "kill"), [(600, signal.SIGKILL), (600, signal.SIGTERM), (3, None)])
def test_no_descendant_survives(sleep_s, kill):
    driver = psutil.Popen([sys.executable, "-c", DRIVER, str(sleep_s)], stdout=subprocess.PIPE)
    driver.stdout.readline()
    time.sleep(2.5)  # the watch looks once a second
    descendants = driver.children(recursive=True)
    assert len(descendants) == 3  # child, grandchild, watch
    if kill is not None:
        driver.send_signal(kill)
    driver.wait(10)
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert alive == []
