"""What the kernel counts for the process stays within the budgets of the tiers."""

from __future__ import annotations

import subprocess
import sys

from tests.teachers.made import SHARD, made_store

PROGRAM = """
import re, sys, torch
from teachers.store import TeacherStore
from teachers.tiers import TierManager
def most():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1))
store, shard, hbm, pinned = TeacherStore(sys.argv[1]), *sys.argv[2:]
torch.ones(1 << 20).clone()
before = most()
tiers = TierManager(store, shard, "cpu", int(hbm), int(pinned))
names = list(tiers.shards)
for schedule in (names, names[::-1], names):
    tiers.plan(schedule)
    for name in schedule:
        with tiers.lease(name) as weights:
            sum(float(tensor.float().sum()) for tensor in weights.values() if tensor.numel() < 10_000)
tiers.close()
print(most() - before)
"""
BESIDES = 16 << 20
"""Threads' stacks, Python objects, torch's own."""


def test_peak_memory_of_the_process_grows_by_no_more_than_both_budgets(tmp_path):
    store, _ = made_store(tmp_path, 12, width=512)
    size = store.open("t0", SHARD).device_bytes
    hbm, pinned = 2 * size, 3 * size
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), SHARD, str(hbm), str(pinned)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    grown = int(ran.stdout)
    assert 4 * size < grown <= hbm + pinned + BESIDES < 12 * size
