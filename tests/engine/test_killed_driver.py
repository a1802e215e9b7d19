"""A real server under a driver that is killed; the server runs deterministically, which is looked at on the way."""

import json
import signal
import subprocess
import sys
import textwrap
import time

import psutil

DRIVER = textwrap.dedent("""
    import asyncio, json, sys
    from pathlib import Path
    import psutil
    from rollout.engine.config import EngineConfig
    from rollout.engine.fleet import EngineFleet
    from rollout.engine.protocol import Sampling
    from rollout.processes import ProcessRegistry

    async def main():
        config = EngineConfig(context_length=256, max_running_requests=8, max_total_tokens=4096, deterministic=True)
        fleet = EngineFleet(config, ProcessRegistry(), Path(sys.argv[2]))
        await fleet.start(Path(sys.argv[1]))
        async def sample(seed, name):
            return (await fleet.generate([5, 6, 7], Sampling(1.0, 16, seed), name, session=name)).token_ids.tolist()
        seeds = [1, 2, 1, 1, 3]
        together = await asyncio.gather(*(sample(seed, f"{i}") for i, seed in enumerate(seeds)))
        pid = fleet.processes["engine-0"].pid
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        print(json.dumps({"pids": pids, "samples": [await sample(1, "alone"), *together]}), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
""")


def alive(pids):
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_no_process_outlives_a_killed_driver(models, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(models[0].directory), str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        line = driver.stdout.readline()
        assert line, "".join(log.read_text() for log in tmp_path.glob("*.log"))
        told = json.loads(line)
        alone, first, other, *again = told["samples"]
        assert len(told["pids"]) >= 3  # HTTP server, scheduler, detokenizer
        assert alive(told["pids"]) == told["pids"]
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    deadline = time.monotonic() + 5
    while alive(told["pids"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(told["pids"]) == []

    assert alone == first == again[0] == again[1]
    assert len({tuple(first), tuple(other), tuple(again[2])}) == 3
