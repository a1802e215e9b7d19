"""What joining the process group changes of this process."""

import ctypes
import subprocess
import sys

import pytest
import torch

from rollout.processes import free_port

BYTES, TIMES = 20_000_000, 5
FAULTS = """
import ctypes, resource, sys

import torch

from rl.trainer import platform
from rl.trainer.config import ParallelConfig

size, times = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def allocate_and_free():
    blocks = [libc.malloc(size) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)


platform.install()
if len(sys.argv) > 3:
    platform.init_distributed(ParallelConfig(), 0, 1, "127.0.0.1", int(sys.argv[3]), 60, seed=1)
allocate_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(times):
    allocate_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
platform.shutdown_distributed()
"""


def faults(*port):
    """Page faults of a process that takes four blocks and gives them back, again and again, once it has joined a group
    at this port, if any. (Tensors would leave small blocks at the heap's end, which then stays as long as they do.)"""
    command = [sys.executable, "-c", FAULTS, *map(str, (BYTES, TIMES, *port))]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's allocator keeps what was freed")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library isn't glibc")
def test_on_the_cpu_a_rank_keeps_freed_memory():
    assert faults(free_port()) < faults() / 10
