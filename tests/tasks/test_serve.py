"""``python -m tasks.serve`` as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tasks import serve
from tests.tasks.conftest import Client, gateway, until

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tasks.serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        match = re.fullmatch(r"ready (http://127\.0\.0\.1:\d+) task=\w+ slots=\d+\n", ready)
        assert match, ready
        yield process, match[1]
    finally:
        process.kill()
        process.communicate(timeout=5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_the_episodes_and_exits_with_0_at_once(number):
    async def start_and_stop(process: subprocess.Popen[str], url: str) -> str:
        timeout = aiohttp.ClientTimeout(total=10)
        async with gateway(hang=True) as fake, aiohttp.ClientSession(timeout=timeout) as http:
            client = Client(http, url, fake.url)
            for episode_id in ("1", "2"):
                assert (await client.post(client.body(episode_id, {"expression": "3*4-5"})))[0] == 202
            polls = [asyncio.create_task(client.wait(episode_id)) for episode_id in ("1", "2")]
            await until(lambda: len(fake.requests) == 2)
            process.send_signal(number)
            # Who waits for an episode hears that it was cancelled.
            states = {(await poll).state for poll in polls}
            await until(lambda: fake.dropped == 2)
            return " ".join(states)

    with server("calculator") as (process, url):
        assert asyncio.run(asyncio.wait_for(start_and_stop(process, url), 20)) == "cancelled"
        started = time.monotonic()
        rest, errors = process.communicate(timeout=10)
        assert time.monotonic() - started < 5  # 0.3 s by itself; the tests may share a busy machine
        assert (process.returncode, rest, errors) == (0, "", "")


def test_options_reach_the_play():
    async def play(url: str) -> float | None:
        timeout = aiohttp.ClientTimeout(total=10)
        async with gateway(policy=lambda messages: "[1+1]") as fake, aiohttp.ClientSession(timeout=timeout) as http:
            status = await Client(http, url, fake.url).episode("1", {"expression": "3*4-5"})
            return status.metrics["turns"]

    with server("calculator", "--options", json.dumps({"max_turns": 2})) as (_, url):
        assert asyncio.run(play(url)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chess",), "'chess' does not exist; there are: calculator, "),
        (("calculator", "--options", '{"colour": 1}'), "tasks.calculator.options.colour: unknown option"),
        (("calculator", "--options", "{"), "--options: no JSON"),
        (("calculator", "--options", "[]"), "--options: not a JSON object"),
        (("calculator", "--slots", "0"), "--slots: 0 is less than 1"),
    ],
)
def test_bad_arguments_are_named_on_the_last_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        serve.main([*arguments, "--port", "0"])
    written = capsys.readouterr()
    assert written.out == ""
    assert message in written.err.splitlines()[-1]


def test_a_taken_port_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert serve.main(["calculator", "--port", port]) == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert len(written.err.splitlines()) == 1
    assert f"127.0.0.1:{port}" in written.err
